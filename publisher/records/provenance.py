"""What made an artefact: this tool's version, commit and sources, and the packages that decide the bytes."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import git

from publisher import __version__
from publisher.border.installing import DISTRIBUTION
from publisher.records.closure import PACKAGE, closure
from publisher.records.extraction import Tools

_DECIDING = ("python", "torch", "safetensors")


def tools(device: str, *, packages: Mapping[str, str], code: str) -> Tools:
    """The provenance of work done by a module of this package.

    Args:
        device: `cpu`, or the accelerator's name.
        packages: versions of at least those that decide the bytes, where the work was done.
        code: the module's name.
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


@cache
def code_digest(*modules: str) -> str:
    """Digest of all sources that these modules can run: work done by other code is never taken for this one's."""
    return code_digest_in(PACKAGE, *modules)


def code_digest_in(root: Path, *modules: str) -> str:
    """Return the same of the package in another folder: SHA-256 over the names and contents of the sources."""
    return digest_of_sources(closure(*modules, root=root), root)


@cache
def whole_code() -> str:
    """Digest of all sources of the package."""
    return digest_of_sources((file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")), PACKAGE)


def digest_of_sources(files: Iterable[str], root: Path = PACKAGE) -> str:
    """Return the SHA-256 over the names and contents of these sources of the package, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\n".encode())
        digest.update(hashlib.sha256((root / file).read_bytes()).digest())
    return digest.hexdigest()


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the checkout this package runs from, or the commit pip installed it from."""
    try:
        with git.Repo(PACKAGE.parent) as repo:
            if not repo.git.ls_files("--", str(PACKAGE / "__init__.py")):
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
