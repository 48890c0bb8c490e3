"""What made an artefact: this tool's version, commit and sources, and the packages that decide the bytes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import git

from publisher import __version__
from publisher.installing import DISTRIBUTION
from publisher.records import Tools

_PACKAGE = Path(__file__).resolve().parent
_DECIDING = ("python", "torch", "safetensors")


def tools(device: str, *, packages: Mapping[str, str], code: Sequence[str]) -> Tools:
    """The provenance of work done by these source files.

    Args:
        device: `cpu`, or the accelerator's name.
        packages: versions of at least those that decide the bytes, where the work was done.
        code: the source files.
    """
    commit, dirty = _checkout()
    return Tools(
        publisher=__version__,
        commit=commit,
        dirty=dirty,
        code=code_digest(code),
        device=device,
        packages={name: packages[name] for name in _DECIDING},
    )


def code_digest(files: Sequence[str]) -> str:
    """Digest of these sources of the package: work done by other code is never taken for this one's."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\n".encode())
        digest.update(hashlib.sha256((_PACKAGE / file).read_bytes()).digest())
    return digest.hexdigest()


@cache
def whole_code() -> str:
    """Digest of all sources of the package."""
    return code_digest([file.relative_to(_PACKAGE).as_posix() for file in _PACKAGE.rglob("*.py")])


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the checkout this package runs from, or the commit pip installed it from."""
    try:
        with git.Repo(_PACKAGE.parent) as repo:
            if not repo.git.ls_files("--", str(_PACKAGE / "__init__.py")):
                return _installed_commit(), None
            return repo.head.commit.hexsha, repo.is_dirty(untracked_files=False)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError, git.GitCommandError, ValueError):
        return _installed_commit(), None


def _installed_commit() -> str | None:
    """The commit of a `pip install git+https://...` (PEP 610); None for a wheel."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(text).get("vcs_info", {}).get("commit_id") if text else None
    return commit if isinstance(commit, str) else None
