"""Files of a repository, into huggingface_hub's cache; their name and size are checked before anything is written."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from publisher.border.escape import for_terminal
from publisher.border.limits import LIMITS
from publisher.errors import MissingFileError
from publisher.hub.answers import foreign, plain_path
from publisher.hub.destination import THE_HUB, Destination
from publisher.hub.failures import explained
from publisher.records.files import no_room

_AT_ONCE = 8  # files that are downloaded at the same time


def is_cached(repo: str, revision: str, *, filename: str) -> bool:
    """Return whether no network is needed for a file, since huggingface_hub's cache holds it.

    Args:
        repo: `owner/name` of a model repository.
        revision: full id of the commit.
        filename: path of the file inside the repository.

    Returns:
        Whether the cache holds the file at this commit.
    """
    return isinstance(try_to_load_from_cache(repo, filename, revision=revision), str)


def download(
    repo: str,
    revision: str,
    *,
    filename: str,
    at: Destination = THE_HUB,
    on_bytes: Callable[[int], None] | None = None,
) -> Path:
    """Download one file, unless the cache holds it.

    Args:
        repo: `owner/name` of a model repository.
        revision: full id of the commit.
        filename: path of the file inside the repository.
        at: the Hub that is asked.
        on_bytes: called with the number of bytes of each piece that has come.

    Returns:
        The file in huggingface_hub's cache.

    Raises:
        MissingFileError: the repository has no such file.
        HubError: it could not be had.
    """
    with explained(repo, revision, filename=filename, at=at):
        return _fetched(repo, revision, filename=filename, at=at, on_bytes=on_bytes)


def download_all(
    repo: str, revision: str, *, filenames: Sequence[str], cache: Path | None = None, at: Destination = THE_HUB
) -> Path:
    """Download several files of one commit, in parallel; a file that is missing is left out.

    Args:
        repo: `owner/name` of a model repository.
        revision: full id of the commit.
        filenames: paths of the files inside the repository.
        cache: folder of the cache; None stands for huggingface_hub's own.
        at: the Hub that is asked.

    Returns:
        The folder in the cache that holds them under their paths.

    Raises:
        MissingFileError: the repository has none of them.
        HubError: they could not be had.
    """

    def fetched(filename: str) -> Path | None:
        try:
            return _fetched(repo, revision, filename=filename, at=at, cache=cache)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None  # what is missing is seen by whoever looks into the folder

    with explained(repo, revision, at=at), ThreadPoolExecutor(_AT_ONCE) as threads:
        files = dict(zip(filenames, threads.map(fetched, filenames), strict=True))
    for name, file in files.items():
        if file is not None:
            return file.parents[name.count("/")]
    raise MissingFileError(
        f"{repo}@{revision[:8]} has none of the files {', '.join(sorted(filenames)[:3])}",
        next_step="correct the manifest",
    )


def download_from_dataset(repo: str, revision: str, *, filename: str) -> Path:
    """Download one file of a dataset repository, unless the cache holds it.

    Args:
        repo: `owner/name` of a dataset repository.
        revision: full id of the commit.
        filename: path of the file inside the repository.

    Returns:
        The file in huggingface_hub's cache.

    Raises:
        MissingFileError: it has no such file.
        HubError: it could not be had.
    """
    plain_path(filename, THE_HUB)
    with explained(repo, revision, filename=filename):
        return Path(THE_HUB.api.hf_hub_download(repo, filename, revision=revision, repo_type="dataset"))


def _fetched(
    repo: str,
    revision: str,
    *,
    filename: str,
    at: Destination,
    on_bytes: Callable[[int], None] | None = None,
    cache: Path | None = None,
) -> Path:
    plain_path(filename, at)
    size = None
    if not isinstance(try_to_load_from_cache(repo, filename, revision=revision, cache_dir=cache), str):
        size = _knock(repo, revision, filename=filename, at=at)
    bar: Any = _counting_bar(on_bytes, _Room(filename, size, at=at))
    return Path(at.api.hf_hub_download(repo, filename, revision=revision, cache_dir=cache, tqdm_class=bar))


def _knock(repo: str, revision: str, *, filename: str, at: Destination) -> int | None:
    """Ask once, without retries, so that a closed door is told at once: the client would try for 20 seconds.

    A Hub that answers, be it with a refusal, is left to the client. Returns the file's size, if the Hub states it.
    """
    url = hf_hub_url(repo, filename, revision=revision, endpoint=at.endpoint)
    with suppress(HfHubHTTPError):
        return at.api.get_hf_file_metadata(url=url).size
    return None


@dataclass
class _Room:
    """How much of a file may still come; `size` is what the server has stated, if it has."""

    filename: str
    size: int | None
    at: Destination
    taken: int = 0

    def __post_init__(self) -> None:
        size = self.size or 0
        if size > _free_room():
            raise no_room(Path(constants.HF_HUB_CACHE), name=self.filename, size=size, reason="too little is free")

    def take(self, octets: int) -> None:
        """Count what has come; refuse what was not announced."""
        self.taken += octets
        most = LIMITS.unsized_bytes if self.size is None else self.size
        if self.taken > most:
            found = f"sends more of {for_terminal(self.filename)} than the {most:,} bytes that it has stated"
            raise foreign(self.at, found, expected="the file as it was announced")


def _free_room() -> int:
    """Return the bytes that are free where huggingface_hub keeps its cache."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    return shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free


def _counting_bar(on_bytes: Callable[[int], None] | None, room: _Room) -> type:
    """Return what the client takes for the class of a progress bar; it draws nothing, and passes on what has come."""

    def count(octets: int) -> None:
        room.take(octets)
        if on_bytes:
            on_bytes(octets)

    class CountingBar:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            count(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """End nothing, since nothing was begun."""

        def update(self, octets: float | None = 1) -> None:
            count(int(octets or 0))

        def nothing(self, *_: object, **__: object) -> None:
            """Draw nothing; of what Xet tells twice, bytes that came in and bytes written, the latter count."""

        update_transfer = set_postfix_str = set_transfer_postfix_str = close = nothing

    return CountingBar
