"""Which Hub is asked: the one that huggingface_hub is set up for, or a named one such as the embedded local Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from huggingface_hub import HfApi, constants

from publisher.hub import door


@dataclass(frozen=True, slots=True)
class Destination:
    """A Hub: that of huggingface_hub's own configuration, or a named endpoint with its token.

    Attributes:
        endpoint: address of the Hub; None stands for HF_ENDPOINT, or else for the public Hub.
        token: token for this Hub; None stands for huggingface_hub's own. It is never shown.
        rehearsal: whether this is the embedded local Hub, where local checkpoints may be published.
    """

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    rehearsal: bool = False

    @property
    def address(self) -> str:
        """The URL of the endpoint."""
        return self.endpoint or constants.ENDPOINT

    @property
    def label(self) -> str:
        """How messages and reports name this Hub."""
        return f"local Hub at {self.address}" if self.rehearsal else self.address

    @property
    def api(self) -> HfApi:
        """A client of huggingface_hub for this Hub."""
        return HfApi(endpoint=self.endpoint, token=self.token)


THE_HUB = Destination()
door.install()


@contextmanager
def embedded(endpoint: str, token: str) -> Iterator[Destination]:
    """Give the local Hub that this process runs as a destination, which is reached offline and past any proxy."""
    with door.embedded(endpoint):
        yield Destination(endpoint, token, rehearsal=True)
