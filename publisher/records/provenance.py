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
    """Return the provenance of work done by a module of this package.

    Args:
        device: `cpu`, or the accelerator's name.
        packages: versions of at least those that decide the bytes, where the work was done.
        code: name of the module, with dots.

    Returns:
        Version, commit and sources of this tool, and the versions of those packages.
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
    """Return the digest of all sources that these modules can run, so that no other code's work passes for theirs."""
    return code_digest_in(PACKAGE, *modules)


def code_digest_in(root: Path, *modules: str) -> str:
    """Return the SHA-256 over names and contents of the sources that these modules can run, in another folder."""
    return digest_of_sources(closure(*modules, root=root), root)


@cache
def whole_code() -> str:
    """Return the digest of all sources of the package."""
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
    """Return commit and dirtiness of the checkout this package runs from, or the commit pip installed it from."""
    try:
        with git.Repo(PACKAGE.parent) as repo:
            if not repo.git.ls_files("--", str(PACKAGE / "__init__.py")):
                return _installed_commit(), None
            return repo.head.commit.hexsha, repo.is_dirty(untracked_files=False)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError, git.GitCommandError, ValueError):
        return _installed_commit(), None


def _installed_commit() -> str | None:
    """Return the commit of a `pip install git+https://...` (PEP 610); None for a wheel."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(text).get("vcs_info", {}).get("commit_id") if text else None
    return commit if isinstance(commit, str) else None
