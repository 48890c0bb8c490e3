"""Errors travel whole."""

import pickle

import pytest

from publisher import errors
from publisher.errors import PublisherError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PublisherError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_from_another_process_says_the_same(kind: type[PublisherError]) -> None:
    error = kind("a thing", expected="another", next_step="look")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    assert type(again) is kind
    assert str(again) == str(error) == "a thing. Expected another. Next: look."
    assert (again.found, again.expected, again.next_step) == ("a thing", "another", "look")
