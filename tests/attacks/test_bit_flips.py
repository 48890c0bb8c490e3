"""One bit of a release, of kept work or of a checkpoint is flipped: what is published is undamaged, or nothing is."""

import difflib
import os
import random
import shutil
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest

from publisher.audits import audit
from publisher.checkpoints.headers import read_headers
from publisher.errors import FetchError, PublisherError
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.fetch import _DigestMemo, _state_of
from publisher.records.extraction import Extraction
from publisher.records.files import sha256_of
from publisher.records.progress import silent
from publisher.records.sealed import read_sealed, write_sealed

pytestmark = pytest.mark.usefixtures("quick_read_back")

STAGED, WORK = Path("dist/m"), Path("dist/m.work")
ROOT = WORK / "root"
CHECKPOINT_FLIPS, MANY_CHECKPOINT_FLIPS = 4, 16


def again(*, last: str = "read_back", first: str = "fetch", rehearse: bool = False) -> list[str]:
    """Run once more; return what was told."""
    told: list[str] = []

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        told.append(what)

    options = Run(
        Path("m.yaml"), Path("dist"), device="cpu", first=first, last=last, dry_run=not rehearse, rehearse=rehearse
    )
    run(options, listen)
    return told


def flip(file: Path, bit: int) -> None:
    """Flip one bit, and leave size and time as they were."""
    state, content = file.stat(), bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def staged() -> dict[str, bytes]:
    return {file.relative_to(STAGED).as_posix(): file.read_bytes() for file in STAGED.rglob("*") if file.is_file()}


def changes(sound: dict[str, bytes]) -> list[str]:
    """Return the lines in which the staged tree differs from the undamaged one."""
    there = staged()
    found: list[str] = []
    for name in sorted(sound.keys() | there.keys()):
        if sound.get(name) != there.get(name):
            ours, theirs = (tree.get(name, b"").decode(errors="replace").splitlines() for tree in (sound, there))
            found += [name, *difflib.unified_diff(ours, theirs, n=0, lineterm="")]
    return found


def files_of(*folders: Path) -> list[Path]:
    """Those that have bits, sorted; not the embedded Hub, which is no work of this tool's."""
    found = (file for folder in folders for file in folder.rglob("*") if WORK / "hub" not in file.parents)
    return sorted(file for file in found if file.is_file() and file.stat().st_size)


# --- what a kill leaves -------------------------------------------------------------------------------------


def nothing_was_killed() -> None:
    """A run that has finished."""


def killed_before_the_verification_was_marked() -> None:
    (ROOT / "verify.json").unlink()


def killed_at_the_end_of_the_verification() -> None:
    killed_before_the_verification_was_marked()
    (STAGED / "verification.json").unlink()
    (STAGED / "README.md").unlink()


def killed_while_the_adapter_was_asked() -> None:
    killed_at_the_end_of_the_verification()
    answers = max((ROOT / "answers").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    content = answers.read_bytes()
    answers.write_bytes(content[: 2 * len(content) // 3])


def killed_before_the_validation_was_marked() -> None:
    killed_before_the_verification_was_marked()
    (ROOT / "validate.json").unlink()
    (ROOT / "loaders.json").unlink()


def killed_before_the_extraction_was_marked() -> None:
    killed_before_the_validation_was_marked()
    (ROOT / "extract.json").unlink()


def killed_while_modules_were_extracted() -> None:
    killed_before_the_extraction_was_marked()
    shutil.rmtree(STAGED)
    max(ROOT.glob("modules-*/*.json")).unlink()


STATES: dict[Callable[[], None], int] = {  # and how many flips make test-long tries: more where less is made again
    nothing_was_killed: 130,
    killed_before_the_verification_was_marked: 60,
    killed_at_the_end_of_the_verification: 35,
    killed_while_the_adapter_was_asked: 25,
    killed_before_the_validation_was_marked: 25,
    killed_before_the_extraction_was_marked: 25,
    killed_while_modules_were_extracted: 25,
}


@pytest.fixture
def sound(own_tiny_run: Path, tmp_path: Path) -> dict[str, bytes]:
    """What the undamaged run published, in a folder where it has just been found to hold; `restore` brings it back."""
    assert own_tiny_run == Path.cwd()
    again()
    shutil.copytree("dist", tmp_path / "sound")
    return staged()


def restore(tmp_path: Path) -> None:
    shutil.rmtree("dist")
    shutil.copytree(tmp_path / "sound", "dist")


# --- flips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [nothing_was_killed, killed_while_modules_were_extracted],
    ids=lambda state: state.__name__,
)
def test_after_one_flipped_bit_the_run_goes_on_and_stages_what_the_undamaged_one_did(
    sound: dict[str, bytes], tmp_path: Path, state: Callable[[], None]
) -> None:
    """One file of each kind, by its suffix, in each folder; `make test-long` does so for every file and state."""
    state()
    kinds = {(file.parent.name.partition("-")[0], file.suffix): file for file in files_of(STAGED, WORK)}
    chance = random.Random(state.__name__)  # noqa: S311 - places, not secrets
    for file in kinds.values():
        require_undamaged_after_a_flip(file, sound, tmp_path, state=state, chance=chance)
    assert {suffix for _, suffix in kinds} >= {".json", ".safetensors"}


@pytest.mark.long
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_after_one_flipped_bit_in_any_file_the_run_goes_on_and_stages_what_the_undamaged_one_did(
    sound: dict[str, bytes], tmp_path: Path, state: Callable[[], None]
) -> None:
    state()
    there = files_of(STAGED, WORK)
    assert STATES[state] >= len(there), "every file is hit"
    chance = random.Random(state.__name__)  # noqa: S311 - places, not secrets
    for file in islice(cycle(there), STATES[state]):
        require_undamaged_after_a_flip(file, sound, tmp_path, state=state, chance=chance)


def require_undamaged_after_a_flip(
    file: Path, sound: dict[str, bytes], tmp_path: Path, *, state: Callable[[], None], chance: random.Random
) -> None:
    restore(tmp_path)
    state()
    bit = chance.randrange(8 * file.stat().st_size)
    flip(file, bit)
    told = again()
    assert changes(sound) == [], f"bit {bit} of {file}: {told}"


@pytest.mark.parametrize(
    "state",
    [
        killed_at_the_end_of_the_verification,
        pytest.param(nothing_was_killed, marks=pytest.mark.long),
        pytest.param(killed_before_the_verification_was_marked, marks=pytest.mark.long),
    ],
    ids=lambda state: state.__name__,
)
def test_after_one_flipped_bit_a_rehearsal_publishes_what_the_undamaged_one_does(
    sound: dict[str, bytes], tmp_path: Path, state: Callable[[], None]
) -> None:
    chance = random.Random(state.__name__)  # noqa: S311 - places, not secrets
    restore(tmp_path)
    state()
    file = chance.choice(files_of(STAGED, WORK))
    bit = chance.randrange(8 * file.stat().st_size)
    flip(file, bit)
    again(rehearse=True)  # it reads back what it has published
    assert staged() == sound, f"bit {bit} of {file}"


def test_a_push_alone_refuses_a_staged_tree_with_one_flipped_bit(sound: dict[str, bytes], tmp_path: Path) -> None:
    chance = random.Random(6)  # noqa: S311 - places, not secrets
    for name, content in sound.items():
        restore(tmp_path)
        bit = chance.randrange(8 * len(content))
        flip(STAGED / name, bit)
        with pytest.raises(PublisherError):
            again(first="push", rehearse=True)
        assert not (WORK / "hub/models").exists() or not list((WORK / "hub").rglob("refs/heads/*")), f"{bit} of {name}"


def test_a_validation_alone_refuses_an_extraction_with_one_flipped_bit(sound: dict[str, bytes], tmp_path: Path) -> None:
    chance = random.Random(7)  # noqa: S311 - places, not secrets
    for name in ("extraction.json", "adapter_config.json", "adapter_model.safetensors"):
        for _ in range(3):
            restore(tmp_path)
            flip(STAGED / name, chance.randrange(8 * len(sound[name])))
            with pytest.raises(PublisherError, match=r"extract"):
                again(first="validate", last="validate")


def test_a_rotten_release_is_told_by_name_when_its_kept_work_does_not_hold(sound: dict[str, bytes]) -> None:
    figures = min(ROOT.glob("modules-*/*.json"))
    flip(figures, 8 * 100)
    killed_before_the_extraction_was_marked()
    told = again()
    assert [line for line in told if line.startswith("making ") and line.endswith("what was kept of it is not whole")]
    assert staged() == sound


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flips", [CHECKPOINT_FLIPS, pytest.param(MANY_CHECKPOINT_FLIPS, marks=pytest.mark.long)])
def test_a_flip_in_a_checkpoint_is_never_published_under_the_digest_of_before(
    sound: dict[str, bytes], tmp_path: Path, flips: int
) -> None:
    chance = random.Random(8)  # noqa: S311 - places, not secrets
    shutil.copytree("src", tmp_path / "src")
    shutil.copytree("base", tmp_path / "base")
    for number in range(flips):
        restore(tmp_path)
        for side in ("src", "base"):
            shutil.copyfile(tmp_path / side / "model.safetensors", Path(side) / "model.safetensors")
        again(last="validate")  # the memo knows the files as they are
        file = Path(("src", "base")[number % 2]) / "model.safetensors"
        flip(file, chance.randrange(8 * file.stat().st_size))
        try:
            again(last="validate")
        except PublisherError:
            continue
        assert stated() == found(), f"{file} after {number} flips"
    assert found() != stated_in(sound)


@pytest.mark.parametrize("finished", [True, False])
def test_what_rots_beneath_the_file_system_is_not_read_under_the_digest_of_before(
    sound: dict[str, bytes], *, finished: bool
) -> None:
    """No time and no inode tells of such rot; the memo is made to say so."""
    before = stated()
    file = Path("src/model.safetensors")
    flip(file, 8 * read_headers(Path("src"))["model.layers.0.self_attn.q_proj.weight"].start)
    memo = read_sealed(WORK / "digests.json", _DigestMemo)
    assert memo is not None
    path = str(file.resolve())
    known = _state_of(file.resolve(), sha256=memo.known[path].sha256)
    write_sealed(WORK / "digests.json", memo.model_copy(update={"known": {**memo.known, path: known}}))
    if finished:  # nothing is read, and the release is of the bytes of before
        again()
        assert staged() == sound
        return
    killed_before_the_extraction_was_marked()
    again(last="validate")
    assert stated() == found() != before


def test_weights_that_change_while_they_are_read_are_named_and_nothing_of_that_run_is_kept(
    sound: dict[str, bytes],
) -> None:
    file = Path("src/model.safetensors")
    content = file.read_bytes()

    def spoil(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        if what == "writing the adapter":
            flip(file, 8 * (len(content) - 1))

    shutil.rmtree("dist")
    with pytest.raises(FetchError, match=r"src/model\.safetensors changed while this run was reading from it"):
        run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="extract"), spoil)
    assert not list(ROOT.glob("modules-*"))
    file.write_bytes(content)
    again()
    assert staged() == sound


def stated() -> dict[str, str]:
    """The digests that the evidence states."""
    return stated_in(staged())


def stated_in(tree: dict[str, bytes]) -> dict[str, str]:
    evidence = Extraction.model_validate_json(tree["extraction.json"])
    sides = {"src": evidence.source, "base": evidence.base}
    return {f"{side}/{file.name}": file.sha256 for side, one in sides.items() for file in one.files}


def found() -> dict[str, str]:
    """The digests of the files that are there."""
    return {f"{side}/{name}": sha256_of(Path(side, name)) for side in ("src", "base") for name in NAMES}


NAMES = ("config.json", "model.safetensors")


# --- after publishing ---------------------------------------------------------------------------------------


def test_an_audit_fails_after_one_flipped_bit_in_a_published_file(sound: dict[str, bytes], tmp_path: Path) -> None:
    assert not audit(str(STAGED), deep=False, work=tmp_path / "audit", device="cpu", progress=silent).failed
    chance = random.Random(9)  # noqa: S311 - places, not secrets
    for name in ("README.md", "adapter_config.json", "adapter_model.safetensors", "errors.svg", "spectrum.svg"):
        for _ in range(2):
            restore(tmp_path)
            bit = chance.randrange(8 * len(sound[name]))
            flip(STAGED / name, bit)
            found = audit(str(STAGED), deep=False, work=tmp_path / "audit", device="cpu", progress=silent)
            assert found.failed, f"bit {bit} of {name}"
