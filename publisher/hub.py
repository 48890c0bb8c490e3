"""The Hugging Face Hub: the only module that imports huggingface_hub's client.

Each function asks one thing and answers with plain values, or raises one `HubError` that says what to do. The
endpoint and the token are huggingface_hub's own business (HF_ENDPOINT, HF_TOKEN, `hf auth login`); neither a
token nor a header ever enters a message.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from publisher.errors import HubError, MissingFileError, MissingRepositoryError, MissingRevisionError


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit; `sha256` is known for LFS and Xet files, `blob` for all."""

    path: str
    size: int
    blob: str
    sha256: str | None


def resolve_revision(repo: str, revision: str) -> str:
    """The full commit id of a branch, tag or abbreviated commit.

    Raises:
        HubError: no such repository or revision, no access, or no connection.
    """
    with _explained(repo, revision):
        sha = HfApi().model_info(repo, revision=revision).sha
    if sha is None:
        raise HubError(f"{repo} has no commit yet", next_step="name a repository that holds a checkpoint")
    return sha


def license_of(repo: str, revision: str) -> str | None:
    """The licence that the repository's card states, if it has a card that states one."""
    with _explained(repo, revision):
        card = HfApi().model_info(repo, revision=revision).card_data
    value = card.get("license") if card else None
    return value if isinstance(value, str) else None


def list_files(repo: str, revision: str) -> tuple[RemoteFile, ...]:
    """Every file of the repository at this revision, sorted by path."""
    with _explained(repo, revision):
        entries = list(HfApi().list_repo_tree(repo, recursive=True, revision=revision))
    files = (entry for entry in entries if isinstance(entry, RepoFile))
    return tuple(
        sorted(
            (RemoteFile(f.path, f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in files),
            key=lambda file: file.path,
        )
    )


def download(repo: str, revision: str, *, filename: str) -> Path:
    """One file at a full commit id, in huggingface_hub's cache.

    Raises:
        MissingFileError: the repository has no such file.
        HubError: it could not be had.
    """
    with _explained(repo, revision):
        return Path(HfApi().hf_hub_download(repo, filename, revision=revision))


def download_all(repo: str, revision: str, *, filenames: Sequence[str]) -> Path:
    """Several files at a full commit id, in parallel; the folder that holds them in huggingface_hub's cache."""
    with _explained(repo, revision):
        return Path(HfApi().snapshot_download(repo, revision=revision, allow_patterns=list(filenames)))


def header_of(repo: str, revision: str, *, filename: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every tensor of a remote safetensors file, read by range requests, not by download."""
    with _explained(repo, revision):
        metadata = HfApi().parse_safetensors_file_metadata(repo, filename, revision=revision)
    return {name: (info.dtype, tuple(info.shape)) for name, info in metadata.tensors.items()}


@contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    """Turn the client's exceptions into one sentence with what to do."""
    try:
        yield
    except GatedRepoError:
        raise HubError(
            f"{repo} is gated", next_step=f"ask for access at {constants.ENDPOINT}/{repo}, then: hf auth login"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise MissingRepositoryError(
            f"there is no repository {repo} at {constants.ENDPOINT}, or this token may not see it",
            next_step="correct the manifest, or: hf auth login",
        ) from None
    except RevisionNotFoundError:
        raise MissingRevisionError(
            f"{repo} has no revision {revision}", next_step="correct the pin, or: publish pin MANIFEST"
        ) from None
    except LocalEntryNotFoundError as error:
        raise _unreachable(error) from error
    except EntryNotFoundError as error:
        raise MissingFileError(f"{repo}@{revision[:8]}: {_first_line(error)}") from None
    except HfHubHTTPError as error:
        raise HubError(f"the Hub refused a request about {repo}: {_first_line(error)}") from error
    except (OfflineModeIsEnabled, OSError) as error:
        raise _unreachable(error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in {"httpx", "httpcore", "httpx2", "httpcore2"}:
            raise _unreachable(error) from error
        raise


def _unreachable(error: BaseException) -> HubError:
    return HubError(
        f"the Hub at {constants.ENDPOINT} cannot be reached ({type(error).__name__})",
        next_step="check the connection and HF_ENDPOINT, or give local checkpoint folders as path: in the manifest",
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
