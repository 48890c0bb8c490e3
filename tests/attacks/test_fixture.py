"""The attackers' release is sound before anything is done to it."""

from pathlib import Path

from publisher.audits import audit
from publisher.records.progress import silent


def test_the_release_that_is_attacked_audits_green(own_tiny_run: Path) -> None:
    found = audit(str(own_tiny_run / "dist" / "m"), deep=False, work=own_tiny_run / "w", device="cpu", progress=silent)
    assert found.failed == ()
