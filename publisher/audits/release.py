"""The release as a whole: where it is, which files it is made of, its manifest and its card."""

import difflib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from publisher import __version__
from publisher.audits.checks import UncheckedError, checked, needed, require_none
from publisher.audits.meaning import compared, other_renderer
from publisher.audits.versions import read_or_newer
from publisher.border.files import entries, read_text
from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.border.yaml_text import parse_yaml
from publisher.checkpoints.files import read_json
from publisher.errors import (
    AuditError,
    FetchError,
    ManifestError,
    PublisherError,
    UncheckableSignatureError,
    listed,
    shown,
)
from publisher.hub import client as hub
from publisher.hub.client import RemoteFile
from publisher.manifest.fields import AUTHORS_WORDS
from publisher.manifest.reading import read_manifest
from publisher.manifest.schema import Manifest, Variant
from publisher.records import filenames
from publisher.records.audit import Check
from publisher.records.extraction import Extraction
from publisher.records.files import packaged_folder, sha256_of
from publisher.records.loaders import LoaderVerdict
from publisher.records.progress import Progress
from publisher.records.verification import Verification
from publisher.release import signing
from publisher.release.card import check_card, render_card
from publisher.release.commitplan import holds_bytes
from publisher.release.evidence import VariantEvidence, load_loaders, load_verification

_BESIDES = re.compile(r"(\.gitattributes|\.gitignore|(LICENSE|NOTICE)[\w.-]*|[\w./-]+\.(md|png|jpe?g|gif|svg|webp))")
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?\n)---[ \t]*(?:\r?\n|$)", re.DOTALL)  # as the Hub finds it
_NOT_OURS = frozenset({".git", ".cache"})  # what git and `hf download --local-dir` keep beside the files
_DIFF_LINES = 24


@dataclass(frozen=True, slots=True)
class Release:
    """What was published, on this machine.

    Attributes:
        name: the repository, or the folder as it was given.
        revision: the full commit id; none for a folder.
        folder: where the files are: links to those that may be read, and nothing else, for a local folder.
        names: every file of the repository that may be read, whether it is here or not.
        refused: what is not read of the names that a release has, by path, and why.
        remote: what the Hub says of each file; none for a folder.
        manifest: the one published; none where it is missing or wrong.
    """

    name: str
    revision: str | None
    folder: Path
    names: frozenset[str]
    refused: Mapping[str, str]
    remote: tuple[RemoteFile, ...] | None
    manifest: Manifest | None

    @property
    def is_ours(self) -> bool:
        """Whether this tool made it: another would leave neither a manifest nor an extraction.json."""
        return any(PurePosixPath(n).name in {filenames.MANIFEST, filenames.EXTRACTION} for n in self.names)

    def adapter_folders(self) -> tuple[tuple[str, Path], ...]:
        """Return path (`/` or `flash/`) and folder of each adapter: the manifest's, or wherever files of one are."""
        if self.manifest is not None:
            return tuple((variant.path, self.folder / variant.folder) for variant in self.manifest.variants)
        places = filter(None, map(filenames.placed, self.names))
        parents = {folder for folder, name in places if name in filenames.PER_VARIANT}
        return tuple((f"{p}/" if p.name else "/", self.folder / p) for p in sorted(parents))

    def variant(self, path: str) -> Variant | None:
        """Return the manifest's entry for this path; None where there is none."""
        variants = self.manifest.variants if self.manifest is not None else ()
        return next((variant for variant in variants if variant.path == path), None)


# --- where it is --------------------------------------------------------------------------------------------


def open_release(target: str, progress: Progress, *, scratch: Path) -> Release:
    """Find the release at `target`: a folder where there is one of that name, else a repository of the Hub.

    Args:
        target: a folder, `owner/name` or `owner/name@revision`.
        progress: told what is fetched.
        scratch: a folder in which a local folder's files are seen: by a link to each that may be read.

    Returns:
        The release, its files on this machine.

    Raises:
        ManifestError: neither a folder nor a repository id.
        HubError: the repository cannot be had.
        FetchError: no file there belongs to an adapter.
    """
    if Path(target).is_dir():
        return _local(target, scratch)
    repo, _, revision = target.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ManifestError(f"'{target}' is neither a folder here nor a repository id", expected="owner/name@revision")
    return _downloaded(repo, revision or "main", progress)


def _local(target: str, scratch: Path) -> Release:
    """Return a folder as a release. Links, FIFOs and devices in it are not opened: another may have put them there."""
    folder = Path(target)
    found = {path.relative_to(folder).as_posix(): (path, kind) for path, kind in entries(folder)}
    found = {name: entry for name, entry in found.items() if name.partition("/")[0] not in _NOT_OURS}
    refused = {name: why for name, (path, kind) in found.items() if (why := _refusal(name, kind, path.lstat().st_size))}
    names = frozenset(name for name in found if name not in refused)
    _require_adapter(frozenset(found), target)
    scratch.mkdir(parents=True, exist_ok=True)
    view = Path(tempfile.mkdtemp(prefix="view-", dir=scratch))
    for name in filter(_is_artefact, names):
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to(found[name][0].absolute())
    return Release(target, None, view, names, refused=refused, remote=None, manifest=_manifest(view))


def _refusal(name: str, kind: str, size: int) -> str:
    """Return why a file is not read; empty where it is, or where no check would read it."""
    try:
        repository_path(name)
    except ValueError as error:
        return f"is not read: {error}"
    if not _is_artefact(name):
        return ""
    if kind != "a file":
        return f"is {kind}, and is not read"
    limit = _limit(name)
    return f"has {size:,} bytes, and is not read: at most {limit:,} are" if size > limit else ""


def _limit(name: str) -> int:
    """Return the most bytes that an artefact may have; weights are read in pieces."""
    suffix = PurePosixPath(name).suffix
    if suffix in {".safetensors", ".gguf"}:
        return LIMITS.adapter_bytes
    return LIMITS.json_bytes if suffix in {".json", ".sig"} else LIMITS.text_bytes


def _downloaded(repo: str, revision: str, progress: Progress) -> Release:
    commit = hub.resolve_revision(repo, revision)
    remote = hub.list_files(repo, commit)
    refused = {file.path: why for file in remote if (why := _refusal(file.path, "a file", file.size))}
    names = frozenset(file.path for file in remote if file.path not in refused)
    _require_adapter(names, f"{repo}@{commit[:8]}")
    progress(f"fetching {repo}@{commit[:8]}")
    wanted = sorted(name for name in names if _is_artefact(name))
    folder = hub.download_all(repo, commit, filenames=wanted)
    return Release(repo, commit, folder, names, refused=refused, remote=remote, manifest=_manifest(folder))


def _is_artefact(name: str) -> bool:
    return filenames.placed(name) is not None


def _require_adapter(names: frozenset[str], where: str) -> None:
    if not any(PurePosixPath(name).name in {filenames.MANIFEST, *filenames.PER_VARIANT} for name in names):
        raise FetchError(
            f"{where} holds no adapter", expected=f"{filenames.ADAPTER_CONFIG} and {filenames.ADAPTER} in some folder"
        )


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(folder / filenames.MANIFEST, templates=False)[0]


# --- its checks ---------------------------------------------------------------------------------------------


def release_checks(release: Release) -> Iterator[Check]:
    """Yield the checks that concern the repository as a whole."""
    claims = {
        "files": files,
        "download": download,
        "manifest": manifest_holds,
        "repository": repository,
        "signature": signature,
    }
    for name, claim in {**claims, "card": card if release.is_ours else card_header}.items():
        yield checked(name, partial(claim, release), folder=release.folder)


def files(release: Release) -> str:
    """Check that every file of the release is there, and none that a loader could take for a part of it."""
    if not release.is_ours:
        pickled = sorted(n for n in release.names if n.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
        seen = f"; pickled files, which are not opened: {', '.join(pickled)}" if pickled else ""
        require_none([f"{name} {why}" for name, why in sorted(release.refused.items())])
        raise UncheckedError(f"no {filenames.MANIFEST} says which files belong to the release{seen}")
    required, others = _required(release), release.names - _own_files(release)
    besides = {name for name in others if _BESIDES.fullmatch(name) and not _within(name, _folders(release))}
    problems = [f"{name} is missing" for name in sorted(required - release.names)]
    problems += [f"{name} is no part of the release" for name in sorted(others - besides)]
    problems += [f"{name} {why}" for name, why in sorted(release.refused.items())]
    require_none(problems)
    told = f"; not part of it: {', '.join(sorted(besides))}" if besides else ""
    return f"{len(release.names - others)} files of the release{told}"


def _folders(release: Release) -> list[str]:
    return [folder.relative_to(release.folder).as_posix() for _, folder in release.adapter_folders()]


def _required(release: Release) -> set[str]:
    per_variant = (_join(folder, name) for folder in _folders(release) for name in filenames.PER_VARIANT)
    return {*filenames.PER_REPOSITORY, *per_variant}


def _own_files(release: Release) -> frozenset[str]:
    """Return the files that are there and part of the release."""
    per_variant = (_join(folder, name) for folder in _folders(release) for name in filenames.OPTIONAL_PER_VARIANT)
    return release.names & {*_required(release), *filenames.OPTIONAL_PER_REPOSITORY, *per_variant}


def _within(name: str, folders: list[str]) -> bool:
    """Return whether a file is inside a variant's subfolder; the root holds whatever else a repository has."""
    return any(folder != "." and name.startswith(f"{folder}/") for folder in folders)


def _join(folder: str, name: str) -> str:
    return (PurePosixPath(folder) / name).as_posix()


def download(release: Release) -> str:
    """Check that the bytes here are those that the Hub lists: by SHA-256 for LFS and Xet, else by git blob."""
    if release.remote is None:
        raise UncheckedError("a local folder: what the Hub holds was not asked")
    here = [file for file in release.remote if _is_artefact(file.path) and file.path in release.names]
    require_none([f"{file.path} differs from what the Hub lists" for file in here if not _same(release, file)])
    return f"{len(here)} files hold the bytes that the Hub lists"


def _same(release: Release, file: RemoteFile) -> bool:
    path = release.folder / file.path
    return path.is_file() and path.stat().st_size == file.size and holds_bytes(file, sha256_of(path), local=path)


def manifest_holds(release: Release) -> str:
    """Check that manifest.yaml is one, and pins what it names."""
    if not release.is_ours:
        raise UncheckedError(f"there is no {filenames.MANIFEST}")
    if filenames.MANIFEST not in release.names:
        raise AuditError(f"there is no {filenames.MANIFEST}")
    manifest, problems = read_manifest(release.folder / filenames.MANIFEST, templates=False)
    if manifest is None:
        raise AuditError("\n".join(str(problem) for problem in problems))
    if manifest.is_local:
        return "no problems; it names local folders, which nobody else can fetch"
    return "no problems; every checkpoint at a full commit id"


def repository(release: Release) -> str:
    """Check that the repository is the one that the manifest was made for."""
    if release.revision is None:
        raise UncheckedError("a local folder, of no repository")
    manifest = needed(release.manifest, filenames.MANIFEST)
    if manifest.repo != release.name:
        raise AuditError(f"the manifest is that of {manifest.repo}: {release.name} is a copy of it")
    return f"{release.name} at {release.revision}"


# --- the signature ------------------------------------------------------------------------------------------


def signature(release: Release) -> str:
    """Check that who must sign by the manifest did sign, and just these files."""
    manifest, there = needed(release.manifest, filenames.MANIFEST), filenames.SIGNATURE in release.names
    if manifest.sign is None:
        found = f"; of the {filenames.SIGNATURE} that is there, nobody says who should have made it" if there else ""
        raise UncheckedError(f"the manifest asks for no signature{found}")
    signer = signing.describe(manifest.sign)
    if not there:
        raise AuditError(f"there is no {filenames.SIGNATURE}; the manifest asks for one by {signer}")
    names = _own_files(release) - {filenames.SIGNATURE}
    try:
        signing.verify(manifest.sign, release.folder, names=names)
    except UncheckableSignatureError as error:
        raise UncheckedError(error.found) from None
    return f"{len(names)} files signed by {signer}"


# --- the card -----------------------------------------------------------------------------------------------


def card(release: Release) -> str:
    """Check that README.md is what manifest and artefacts give: byte for byte, or by meaning for another version.

    Raises:
        UncheckedError: a card of another version says the same, but its code is another.
    """
    manifest, readme = needed(release.manifest, filenames.MANIFEST), release.folder / filenames.CARD
    for template in (manifest.card.template, manifest.card.usage):
        # one from the repository would be code from the repository
        if not (packaged_folder("templates") / template).is_file():
            raise UncheckedError(f"the template {template} does not come with this tool")
    evidence = tuple(_evidence(variant, release.folder / variant.folder) for variant in manifest.variants)
    text = render_card(manifest, evidence, beside=packaged_folder("templates"))
    if not readme.is_file():
        raise AuditError(f"there is no {filenames.CARD}")
    words = f"the author's own words: {', '.join(AUTHORS_WORDS)}"
    if readme.read_bytes() == text.encode():
        return f"README.md is what the artefacts give, byte for byte; {words}"
    if made_by := other_renderer(readme, {item.extraction.tools.publisher for item in evidence}):
        return f"{_by_meaning(readme, text, made_by=made_by)}; {words}"
    raise AuditError(_stale(text, readme))


def _by_meaning(readme: Path, text: str, *, made_by: str) -> str:
    try:
        there = readme.read_bytes().decode()
    except UnicodeDecodeError:
        raise AuditError("README.md is not UTF-8") from None
    found = compared(there, text)
    if found.problems:
        more = [f"… {len(found.problems) - _DIFF_LINES} more"] if len(found.problems) > _DIFF_LINES else []
        raise AuditError(
            f"README.md, rendered by {made_by}, says what the artefacts do not give:\n"
            f"{listed([*found.problems[:_DIFF_LINES], *more])}"
        )
    told = found.remark(made_by, __version__)
    if found.code:
        raise UncheckedError(
            f"{told}\nits code is not this version's: read it before you run it:\n{listed(found.code[:_DIFF_LINES])}"
        )
    return told


def _evidence(variant: Variant, folder: Path) -> VariantEvidence:
    """Return the evidence as it is: whether it is the manifest's is asked by another check."""
    try:
        extraction = read_or_newer(folder / filenames.EXTRACTION, Extraction.read)
    except FetchError as error:
        raise UncheckedError(error.found) from None
    verification = _verification(variant, extraction, folder)
    loaders = _loaders(extraction, folder / filenames.LOADERS)
    return VariantEvidence(variant=variant, extraction=extraction, verification=verification, loaders=loaders)


def _verification(variant: Variant, extraction: Extraction, folder: Path) -> Verification | None:
    try:
        return load_verification(variant, extraction, file=folder / filenames.VERIFICATION)
    except PublisherError:  # of another adapter: a card may not say a word of it
        return None


def _loaders(extraction: Extraction, file: Path) -> tuple[LoaderVerdict, ...]:
    try:
        return load_loaders(extraction, file)
    except PublisherError:  # of another adapter: a card may not say a word of it
        return ()


def _stale(text: str, readme: Path) -> str:
    there = read_text(readme)
    figures = _other_figures(there, text)
    diff = check_card(text, readme).splitlines() or ["the bytes differ, not the text: line ends or encoding"]
    more = [f"… {len(diff) - _DIFF_LINES} more lines"] if len(diff) > _DIFF_LINES else []
    head = (
        f"README.md states other figures:\n{listed(figures)}" if figures else "README.md is not what the artefacts give"
    )
    return "\n".join([head, *diff[:_DIFF_LINES], *more])


_FIGURE = re.compile(r"\d[\d.,]*")


def _other_figures(there: str, text: str) -> list[str]:
    """Return what stands there and what should, where only numbers differ."""
    lines = there.splitlines(), text.splitlines()
    found = []
    for tag, start, end, other_start, other_end in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if tag == "replace" and end - start == other_end - other_start:
            pairs = zip(lines[0][start:end], lines[1][other_start:other_end], strict=True)
            found += [f"line {n}: {d}" for n, pair in enumerate(pairs, start + 1) if (d := _figures_of(*pair))]
    return found


def _figures_of(there: str, line: str) -> str:
    if _FIGURE.sub("#", there) != _FIGURE.sub("#", line):
        return ""
    pairs = zip(_FIGURE.findall(there), _FIGURE.findall(line), strict=True)
    return ", ".join(f"{found} instead of {expected}" for found, expected in pairs if found != expected)


def card_header(release: Release) -> str:
    """Check what the Hub reads of a card by another tool: the base model and the library."""
    readme = release.folder / filenames.CARD
    if not readme.is_file():
        raise UncheckedError(f"there is no {filenames.CARD}")
    data = _header(readme)
    bases = data.get("base_model")
    named = set(bases) if isinstance(bases, list) else {bases}
    problems = [f"base_model is {shown(bases)}; the adapters' is {base}" for base in sorted(_bases(release) - named)]
    if data.get("library_name") != "peft":
        problems.append(f"library_name is {shown(data.get('library_name'))}; expected 'peft'")
    require_none(problems)
    return f"base model {shown(bases)}, library peft"


def _header(readme: Path) -> dict[str, Any]:
    try:
        header = _FRONT_MATTER.match(read_text(readme))
        data = parse_yaml(header[1]) if header else None
    except (OSError, ValueError) as error:
        raise AuditError(f"README.md has no header that can be read: {error}") from error
    if not isinstance(data, dict):
        raise AuditError("README.md has no header: a mapping in YAML between two lines of ---")
    return data


def _bases(release: Release) -> set[str]:
    configs = [folder / filenames.ADAPTER_CONFIG for _, folder in release.adapter_folders()]
    named = (read_json(config).get("base_model_name_or_path") for config in configs if config.is_file())
    return {name for name in named if isinstance(name, str) and name}
