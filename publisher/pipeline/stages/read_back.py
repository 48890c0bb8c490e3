"""Read back: what was published is what was meant, seen as a stranger sees it.

Every file of the published commit is compared with the staged one, by the Hub's own listing and by its bytes, which
are fetched into an empty cache. Then each adapter is loaded by repository id, subfolder and commit with PEFT, in one
process of their own that knows the Hub and nothing of this machine's files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from publisher.adapters.base_config import base_config
from publisher.errors import PublisherError, PushError, listed
from publisher.hub import client as hub
from publisher.hub.client import Destination
from publisher.manifest.schema import Manifest, Variant
from publisher.records.checkpoint import FileDigest
from publisher.records.extraction import Extraction
from publisher.records.filenames import EXTRACTION
from publisher.records.files import sha256_of
from publisher.records.progress import Progress
from publisher.records.publication import ReadBack

_PACKAGES = str(Path(__file__).resolve().parents[3])  # where this package is, installed or not


@dataclass(frozen=True, slots=True)
class Published:
    """A release on a Hub: its repository, its commit and the files it must hold."""

    repo: str
    commit: str
    files: tuple[FileDigest, ...]
    at: Destination


def read_back(manifest: Manifest, staged: Path, *, published: Published, progress: Progress) -> ReadBack:
    """Compare every published file with the staged one, and load every adapter as a stranger would.

    Args:
        manifest: what was published.
        staged: the staged tree.
        published: the commit, its files and its Hub.
        progress: told of each step.

    Returns:
        How many files are equal, and how many adapters load.

    Raises:
        PushError: naming each file that differs, or each thing PEFT complains about. The commit stays; the message
            says which it is.
    """
    with TemporaryDirectory(prefix="publish-readback-") as folder:
        cache = Path(folder, "hub")
        progress(f"reading back {published.repo}@{published.commit[:8]}")
        _require_same(published, cache)
        progress(f"loading {published.repo}: {', '.join(variant.path for variant in manifest.variants)}")
        _require_loads(manifest, staged, published=published, home=Path(folder))
    return ReadBack(files=len(published.files), adapters=len(manifest.variants))


def _require_same(published: Published, cache: Path) -> None:
    listing = {file.path: file for file in hub.list_files(published.repo, published.commit, at=published.at)}
    names = [file.name for file in published.files]
    folder = hub.download_all(published.repo, published.commit, filenames=names, cache=cache, at=published.at)
    problems = []
    for file in published.files:
        remote, local = listing.get(file.name), folder / file.name
        if remote is None or not local.is_file():
            problems.append(f"{file.name} is missing")
        elif remote.size != file.size or remote.sha256 not in {None, file.sha256}:
            problems.append(f"{file.name}: the Hub lists {remote.size} bytes, SHA-256 {remote.sha256}")
        elif sha256_of(local) != file.sha256:
            problems.append(f"{file.name} has other bytes than the staged file")
    _require_none(problems, published)


def _require_loads(manifest: Manifest, staged: Path, *, published: Published, home: Path) -> None:
    requests = [_request(variant, staged, published=published) for variant in manifest.variants]
    finished = _in_a_process(json.dumps(requests), _environment(published.at, home))
    try:
        problems = json.loads(finished.stdout)
    except ValueError:
        raise PushError(
            f"the process that loads the adapters of {published.repo} ended with {finished.returncode}: "
            f"{_last_line(finished.stderr)}",
            next_step=f"load them by hand at commit {published.commit}; the commit is published",
        ) from None
    _require_none(problems, published)


def _in_a_process(requests: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", __name__],  # -P: nothing is imported from the folder one happens to stand in
        input=requests,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _request(variant: Variant, staged: Path, *, published: Published) -> dict[str, Any]:
    """Return what the other process has to know of an adapter."""
    extraction = Extraction.read(staged / variant.folder / EXTRACTION)
    return {
        "path": variant.path,
        "model_class": variant.model_class,
        "modules": [module.model_dump(mode="json") for module in extraction.modules],
        "experts": [tensor.model_dump(mode="json") for tensor in extraction.experts],
        "config": str(base_config(variant)),
        "repo": published.repo,
        "subfolder": variant.folder,
        "commit": published.commit,
    }


# the embedded Hub is the only one that the other process knows, and offline mode is no reason not to reach it
_ON_THIS_MACHINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}


def _environment(at: Destination, home: Path) -> dict[str, str]:
    """Return this process's environment with the destination for a Hub, empty caches, and no trusted publishing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_OIDC")}
    token = at.token or hub.current_token()
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([_PACKAGES, *filter(None, [kept.get("PYTHONPATH")])]),
        "HF_ENDPOINT": at.address,
        "HF_HOME": str(home / "home"),
        "HF_HUB_CACHE": str(home / "loading"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({"HF_TOKEN": token} if token else {}),
        **(_ON_THIS_MACHINE if at.rehearsal else {}),
    }


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def _require_none(problems: Sequence[str], published: Published) -> None:
    if problems:
        raise PushError(
            f"{published.repo}@{published.commit[:8]} is published, but what it holds is not what was staged:\n"
            f"{listed(problems)}\n",
            expected="the same files and an adapter that PEFT loads whole",
            next_step="keep users off that commit, and report this with the lines above",
        )


def _problems(request: Mapping[str, Any]) -> list[str]:
    """Return what keeps PEFT from loading the published adapter; this runs in the other process."""
    from publisher.adapters.loading import AdapterLocation, loading_problems, quiet
    from publisher.records.extraction import ExpertTensor, ModuleExtraction

    adapter = AdapterLocation(request["repo"], subfolder=request["subfolder"], revision=request["commit"])
    modules = [ModuleExtraction.model_validate(module) for module in request["modules"]]
    experts = [ExpertTensor.model_validate(tensor) for tensor in request["experts"]]
    try:
        with quiet():
            config = Path(request["config"])
            found = loading_problems(request["model_class"], modules, config=config, adapter=adapter, experts=experts)
    except PublisherError as error:
        found = [str(error)]
    return [f"{request['path']}: {problem}" for problem in found]


def _main(requests: str) -> str:
    return json.dumps([problem for request in json.loads(requests) for problem in _problems(request)])


if __name__ == "__main__":
    sys.stdout.write(_main(sys.stdin.read()))
