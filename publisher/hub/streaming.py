"""Parts of remote files, read by range requests. Nothing is stored."""

import time
from collections.abc import Iterator

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented for use, though not in __all__
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from publisher.errors import HubError
from publisher.hub.destination import THE_HUB, Destination
from publisher.hub.failures import explained, is_on_the_way

_PARTIAL = 206
_PATIENCE = 5  # how often in a row a range may break without a byte of it having come
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a broken range is asked for again


def stream(
    repo: str, revision: str, *, filename: str, start: int, stop: int, at: Destination = THE_HUB
) -> Iterator[bytes]:
    """Yield a range of a file's bytes, in pieces as they arrive.

    A connection that breaks is taken up again at the byte where it broke; a Hub that answers 429 or 5xx is asked
    again when it says, or after a while.

    Args:
        repo: `owner/name` of a model repository.
        revision: full id of the commit.
        filename: path of the file inside the repository.
        start: first byte of the range.
        stop: the byte after the last of the range.
        at: the Hub that is asked.

    Yields:
        Pieces that are `stop - start` bytes together.

    Raises:
        MissingFileError: the repository has no such file.
        UnclearAnswerError: it went on breaking.
        HubError: it was refused, or the Hub does not send parts of files.
    """
    url = hf_hub_url(repo, filename, revision=revision, endpoint=at.endpoint)
    with explained(repo, revision, at=at):
        fruitless = 0
        while start < stop:
            fruitless += 1
            try:
                for piece in _range(url, start, stop=stop, token=at.token):
                    start += len(piece)
                    fruitless = 0
                    yield piece
            except Exception as error:
                if fruitless > _PATIENCE or not is_on_the_way(error):
                    raise
            if fruitless > _PATIENCE:
                raise TimeoutError
            if start < stop:
                time.sleep(min(_FIRST_WAIT * 2**fruitless, _LONGEST_WAIT))


def _range(url: str, start: int, *, stop: int, token: str | None) -> Iterator[bytes]:
    """Yield the pieces of one answer to one request."""
    headers = build_hf_headers(token=token) | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # the client's own repetition would not know where the last answer broke
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as response:
        hf_raise_for_status(response)
        place = response.headers.get("Content-Range", "")
        if response.status_code != _PARTIAL or not place.startswith(f"bytes {start}-"):
            raise HubError(
                f"{url} was asked for bytes {start}-{stop - 1} and answered with {place or 'the whole file'}",
                next_step="run the same command without --stream",
            )
        yield from response.iter_bytes()
