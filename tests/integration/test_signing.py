"""A release is signed, its signature is kept as long as it holds, and an audit finds whatever was done to it."""

import base64
import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec
from huggingface_hub import HfApi, constants

from publisher.audits import audit
from publisher.cli import app as cli
from publisher.errors import CardError, PushError, SigningError
from publisher.hub.client import Destination
from publisher.hub.local import LocalHub
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Signer, SigstoreSigner
from publisher.pipeline.republish import card_from_hub
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.push import Target, push
from publisher.records.audit import Audit, Check
from publisher.records.files import sha256_of
from publisher.records.progress import silent
from publisher.records.publication import Signing
from publisher.release.signing import Means, _require_identity, is_signed, require_means, sign_release

pytestmark = pytest.mark.usefixtures("quick_read_back")

SIGNED = {f"{folder}{name}" for folder in ("", "small/") for name in ("adapter_config.json", "extraction.json")}
SIGNED |= {f"{folder}{name}" for folder in ("", "small/") for name in ("errors.svg", "spectrum.svg")}
SIGNED |= {"README.md", "manifest.yaml", "adapter_model.safetensors", "small/adapter_model.safetensors"}
SIGNATURE = Path("release/model.sig")
DOCUMENT = Path(__file__).parents[2] / "docs/signing.md"
MODEL_SIGNING = (sys.executable, "-m", "model_signing")


def new_key(file: Path, *, password: bytes | None = None) -> str:
    """Writes a private key; the public one."""
    key = ec.generate_private_key(ec.SECP256R1())
    lock = forms.BestAvailableEncryption(password) if password else forms.NoEncryption()
    file.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    file.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, lock))
    return key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo).decode()


def ask_for(public_key: str, manifest: Path) -> None:
    """Writes the key into the manifest."""
    indented = "".join(f"    {line}\n" for line in public_key.splitlines())
    manifest.write_text(f"{manifest.read_text()}sign:\n  key: |\n{indented}")


@pytest.fixture
def release(pico_release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A staged tree, `release`, whose manifest asks for a signature by `key.pem`; in the working folder, offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(pico_release, "release")
    (tmp_path / "pairs").symlink_to(pico_release.parents[1] / "pairs")
    Path("key.pub").write_text(new_key(Path("key.pem")))
    ask_for(Path("key.pub").read_text(), Path("release/manifest.yaml"))
    return Path("release")


def sign(key: str | None = "key.pem", *, at: Destination | None = None) -> Signing:
    means = Means(Path(key) if key else None, published_at=at, publishing=False)
    found = sign_release(manifest(), Path("release"), means=means)
    assert found is not None
    return found


def manifest() -> Manifest:
    return load_manifest(Path("release/manifest.yaml"))


def audited(target: str = "release") -> Audit:
    return audit(target, deep=False, work=Path("work"), device="cpu", progress=silent)


def signature_check(found: Audit) -> Check:
    return next(check for check in found.checks if check.name == "signature")


def left_out() -> None:
    """The manifest's own key signs, and leaves a file out."""
    SIGNATURE.unlink()
    arguments = ("--signature", "release/model.sig", "--ignore-paths", "release/README.md")
    model_signing("sign", "key", "release", "--private_key", "key.pem", *arguments).check_returncode()


def append(name: str) -> None:
    with Path("release", name).open("a") as file:
        file.write("\n")


def payload(file: Path) -> dict[str, str]:
    statement = json.loads(base64.b64decode(json.loads(file.read_text())["dsseEnvelope"]["payload"]))
    return {entry["name"]: entry["digest"] for entry in statement["predicate"]["resources"]}


# --- signing ------------------------------------------------------------------------------------------------


def test_the_signature_covers_every_file_but_itself_and_the_audit_passes(release: Path) -> None:
    assert sign().result == "signed"
    assert payload(SIGNATURE) == {name: sha256_of(release / name) for name in SIGNED}
    found = audited()
    assert found.failed == ()
    key = sha256_of(Path("key.pub"))
    assert signature_check(found).status == "passed"
    assert signature_check(found).detail == f"12 files signed by the key with SHA-256 {key}"


@pytest.mark.usefixtures("release")
def test_a_signature_that_holds_is_kept_byte_for_byte_with_the_key_and_without() -> None:
    sign()
    first = SIGNATURE.read_bytes()
    assert (sign().result, sign(None).result) == ("kept", "kept")
    assert SIGNATURE.read_bytes() == first


def test_other_files_are_signed_anew(release: Path) -> None:
    sign()
    append("README.md")
    assert sign().result == "signed"
    assert is_signed(manifest(), release)


@pytest.mark.usefixtures("release")
def test_without_the_key_a_signature_of_other_files_goes_and_it_is_said_to_be_missing() -> None:
    sign()
    append("README.md")
    found = sign(None)
    assert (found.result, found.why) == ("missing", "no private key: --signing-key FILE, or PUBLISH_SIGNING_KEY")
    assert not SIGNATURE.exists()


def test_a_push_never_goes_on_without_a_signature_that_the_manifest_asks_for(release: Path) -> None:
    sign()
    append("README.md")
    with pytest.raises(SigningError, match="no private key is named"):
        sign_release(manifest(), release, means=Means(None, None, publishing=True))


def test_a_manifest_that_no_longer_asks_for_a_signature_has_none(release: Path, pico_release: Path) -> None:
    sign()
    shutil.copy(pico_release / "manifest.yaml", release)
    assert sign_release(manifest(), release, means=Means(Path("key.pem"), None, publishing=False)) is None
    assert not SIGNATURE.exists()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (new_key, "other.pem is the private half of another key"),
        (lambda file: new_key(file, password=b"secret"), "other.pem is no private key that can be read"),
        (lambda file: file.write_text("secret"), "other.pem is no private key that can be read"),
        (lambda _: None, "other.pem cannot be read"),
    ],
    ids=["another", "encrypted", "no key", "no file"],
)
@pytest.mark.usefixtures("release")
def test_a_private_key_that_cannot_sign_for_this_manifest_is_refused(
    make: Callable[[Path], object], found: str
) -> None:
    make(Path("other.pem"))
    with pytest.raises(SigningError, match=found) as caught:
        sign("other.pem")
    assert "secret" not in str(caught.value)
    assert not SIGNATURE.exists()


# --- the audit ----------------------------------------------------------------------------------------------


def other_signature() -> None:
    """Signs the same files with another key than the manifest's."""
    SIGNATURE.unlink()
    subprocess.run(
        [*MODEL_SIGNING, "sign", "key", "release", "--private_key", "other.pem", "--signature", "release/model.sig"],
        check=True,
        capture_output=True,
    )
    assert payload(SIGNATURE).keys() == SIGNED


def reencoded() -> None:
    """The list inside the signature follows a changed file, which only the cryptography can tell."""
    append("README.md")
    bundle = json.loads(SIGNATURE.read_text())
    text = base64.b64decode(bundle["dsseEnvelope"]["payload"]).decode()
    text = text.replace(payload(SIGNATURE)["README.md"], sha256_of(Path("release/README.md")))
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(text.encode()).decode()
    SIGNATURE.write_text(json.dumps(bundle))


def two_lists() -> None:
    """Beside the signed list a forged one that has an added file: which of them a reader takes must not matter."""
    append("verification.json")
    bundle = json.loads(SIGNATURE.read_text())
    envelope = bundle["dsseEnvelope"]
    forged = json.loads(base64.b64decode(envelope["payload"]))
    added = {"name": "verification.json", "algorithm": "sha256", "digest": sha256_of(Path("release/verification.json"))}
    forged["predicate"]["resources"].append(added)
    bundle["dsseEnvelope"] = {**envelope, "payload": base64.b64encode(json.dumps(forged).encode()).decode()}
    bundle["dsse_envelope"] = envelope
    SIGNATURE.write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda: append("adapter_model.safetensors"), "adapter_model.safetensors is not as it was signed"),
        (lambda: append("README.md"), "README.md is not as it was signed"),
        (lambda: append("small/verification.json"), "small/verification.json is not signed"),
        (lambda: Path("release/small/extraction.json").unlink(), "small/extraction.json is signed and not there"),
        (SIGNATURE.unlink, "there is no model.sig; the manifest asks for one by the key with SHA-256"),
        (lambda: SIGNATURE.write_text("{}"), "model.sig is no signature of a model"),
        (other_signature, "model.sig is not a signature by the key with SHA-256"),
        (left_out, "README.md is not signed"),
        (reencoded, "model.sig is not a signature by the key with SHA-256"),
        (two_lists, "model.sig is not a signature by the key with SHA-256"),
    ],
    ids=[
        "weights",
        "card",
        "added",
        "removed",
        "unsigned",
        "damaged",
        "another key",
        "left out",
        "forged list",
        "two lists",
    ],
)
@pytest.mark.usefixtures("release")
def test_what_was_done_to_a_signed_release_is_found_and_named(tamper: Callable[[], object], named: str) -> None:
    new_key(Path("other.pem"))
    sign()
    tamper()
    check = signature_check(audited())
    assert check.status == "failed"
    assert named in check.detail


def test_a_release_that_needs_no_signature_is_not_checked_for_one(release: Path, pico_release: Path) -> None:
    shutil.copy(pico_release / "manifest.yaml", release)
    check = signature_check(audited())
    assert (check.status, check.detail) == ("not checked", "the manifest asks for no signature")
    SIGNATURE.write_text("{}")
    assert "nobody says who should have made it" in signature_check(audited()).detail


# --- what readers do by hand --------------------------------------------------------------------------------


def model_signing(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MODEL_SIGNING, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("release")
def test_a_reader_verifies_a_download_with_the_packages_own_command() -> None:
    sign()
    Path("release/.cache/huggingface").mkdir(parents=True)
    Path("release/.cache/huggingface/CACHEDIR.TAG").write_text("what `hf download --local-dir` leaves")
    Path("release/.gitattributes").write_text("*.safetensors filter=lfs\n")
    Path("key.pub").rename("release.pub")
    documented = re.search(r"^\$ model_signing (verify key .*)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented is not None
    good = model_signing(*documented[1].split())
    assert (good.returncode, good.stdout) == (0, "Verification succeeded\n")
    append("README.md")
    bad = model_signing(*documented[1].split())
    assert bad.returncode == 1
    assert "Hash mismatch" in bad.stderr
    assert "README.md" in bad.stderr


# --- on a Hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield running


@pytest.fixture
def target(release: Path, hub: LocalHub) -> Target:
    """The Hub, with the signed release published."""
    target = Target(Destination(hub.endpoint, hub.token, rehearsal=True))
    sign()
    assert push(manifest(), release, target=target).result == "committed"
    return target


def test_the_published_signature_is_kept_where_no_other_is_at_hand(release: Path, target: Target) -> None:
    published = SIGNATURE.read_bytes()
    SIGNATURE.unlink()
    assert sign(at=target.destination).result == "kept"
    assert SIGNATURE.read_bytes() == published
    assert push(manifest(), release, target=target).result == "no changes"


def test_the_published_signature_goes_before_a_newer_one_of_the_same_files(release: Path, target: Target) -> None:
    published = SIGNATURE.read_bytes()
    SIGNATURE.unlink()
    assert sign().result == "signed"
    assert SIGNATURE.read_bytes() != published
    assert sign(at=target.destination).result == "kept"
    assert push(manifest(), release, target=target).result == "no changes"


def test_a_published_signature_of_other_files_is_not_kept(release: Path, target: Target) -> None:
    append("README.md")
    assert sign(at=target.destination).result == "signed"
    assert push(manifest(), release, target=target).result == "committed"


def test_an_unsigned_release_after_a_signed_one_takes_the_signature_away(
    release: Path, pico_release: Path, target: Target, hub: LocalHub
) -> None:
    shutil.copy(pico_release / "manifest.yaml", release)
    assert sign_release(manifest(), release, means=Means(None, target.destination, publishing=False)) is None
    push(manifest(), release, target=target)
    assert "model.sig" not in HfApi(hub.endpoint, token=hub.token).list_repo_files("o/pico")


def test_a_card_alone_is_not_published_over_a_signature(release: Path, target: Target) -> None:
    with pytest.raises(CardError, match="is signed"):
        card_from_hub(release / "manifest.yaml", write=True, target=target)


# --- the whole run ------------------------------------------------------------------------------------------


@pytest.fixture
def project(pico_release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the pairs and their manifest, `pico.yaml`, which asks for a signature by `key.pem`."""
    monkeypatch.chdir(tmp_path)
    Path("pairs").symlink_to(pico_release.parents[1] / "pairs")
    shutil.copy(pico_release.parents[1] / "pico.yaml", ".")
    ask_for(new_key(Path("key.pem")), Path("pico.yaml"))
    return tmp_path


@pytest.mark.usefixtures("project")
def test_a_signed_release_is_rehearsed_twice_and_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    one_variant(Path("pico.yaml"))
    rehearsal = Run(Path("pico.yaml"), Path("dist"), device="cpu", rehearse=True, signing_key=Path("key.pem"))
    first = run(rehearsal, silent)
    Path("dist/pico/model.sig").unlink()
    second = run(replace(rehearsal, signing_key=None), silent)
    assert [(done.signature and done.signature.result, done.push and done.push.result) for done in (first, second)] == [
        ("signed", "committed"),
        ("kept", "no changes"),
    ]
    with LocalHub(Path("dist/pico.work/hub")) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        address = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        found = audited("o/pico")
    assert found.failed == ()
    assert signature_check(found).detail.startswith("8 files signed by the key with SHA-256")


def one_variant(manifest: Path) -> None:
    data = yaml.safe_load(manifest.read_text())
    del data["variants"][1]
    manifest.write_text(yaml.safe_dump(data))


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.usefixtures("project")
def test_the_command_line_names_the_key_and_a_wrong_one_is_refused_at_once(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(Path("other.pem"))
    if by == "environment":
        monkeypatch.setenv("PUBLISH_SIGNING_KEY", "other.pem")
    option = ["--signing-key", "other.pem"] if by == "option" else []
    with pytest.raises(SigningError, match=r"other\.pem is the private half of another key"):
        cli.cli(["--manifest", "pico.yaml", "--dry-run", *option], standalone_mode=False)
    assert not Path("dist").exists()


@pytest.mark.usefixtures("project")
def test_a_push_without_the_key_is_refused_before_any_stage_unless_the_tree_is_signed_already() -> None:
    told: list[str] = []
    with pytest.raises(SigningError, match="no private key is named"):
        run(Run(Path("pico.yaml"), Path("dist")), lambda what, *_: told.append(what))
    assert told == []
    dry = Run(Path("pico.yaml"), Path("dist"), device="cpu", dry_run=True, signing_key=Path("key.pem"))
    assert run(dry, silent).signature is not None
    with pytest.raises(PushError, match="local checkpoints"):  # the next check, which a real Hub brings
        run(Run(Path("pico.yaml"), Path("dist")), silent)


@pytest.mark.usefixtures("project")
def test_a_dry_run_without_the_key_says_that_the_signature_is_missing() -> None:
    done = run(Run(Path("pico.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    assert done.signature is not None
    assert done.signature.result == "missing"
    assert done.plan is not None
    assert "model.sig" not in {operation.path for operation in done.plan.operations}


# --- Sigstore, as far as it goes without the network --------------------------------------------------------

IDENTITY = "https://github.com/o/code/.github/workflows/release.yml@refs/tags/v1"
GITHUB = SigstoreSigner(identity=IDENTITY, issuer="https://token.actions.githubusercontent.com")


@pytest.fixture
def no_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sigstore's servers are behind a proxy that is not there, and nothing of theirs is cached."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.mark.usefixtures("no_way_out")
def test_outside_of_a_job_nobody_signs_through_sigstore() -> None:
    with pytest.raises(SigningError, match="a CI job signs, and this is none"):
        require_means(Signer(sigstore=GITHUB), None)


@pytest.mark.usefixtures("no_way_out")
def test_a_job_without_the_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(SigningError, match="this job gets no identity to sign with"):
        require_means(Signer(sigstore=GITHUB), None)


@pytest.mark.usefixtures("no_way_out")
def test_a_job_signs_for_the_issuer_of_the_manifest_alone(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hub.github.job({"sub": "repo:o/code"}).items():
        monkeypatch.setenv(name, value)
    issuer = "https://token.actions.local-hub.invalid"
    with pytest.raises(SigningError, match=f"this job's issuer is {issuer}"):
        require_means(Signer(sigstore=GITHUB), None)
    require_means(Signer(sigstore=SigstoreSigner(identity=IDENTITY, issuer=issuer)), None)


def test_on_github_a_job_signs_for_its_own_workflow_and_tag_alone() -> None:
    claims = {"iss": GITHUB.issuer, "job_workflow_ref": "o/code/.github/workflows/release.yml@refs/tags/v1"}
    _require_identity(claims, GITHUB)
    with pytest.raises(SigningError, match=r"release\.yml@refs/tags/v2"):
        _require_identity({**claims, "job_workflow_ref": "o/code/.github/workflows/release.yml@refs/tags/v2"}, GITHUB)


@pytest.mark.usefixtures("no_way_out")
def test_a_sigstore_signature_cannot_be_verified_without_the_network_and_the_audit_says_so(release: Path) -> None:
    sign()
    text = Path("release/manifest.yaml").read_text().partition("sign:")[0]
    text += f"sign:\n  sigstore:\n    identity: {IDENTITY}\n    issuer: {GITHUB.issuer}\n"
    Path("release/manifest.yaml").write_text(text)
    check = signature_check(audited())
    assert check.status == "not checked"
    assert "Sigstore's keys cannot be fetched" in check.detail
    found = sign_release(manifest(), release, means=Means(None, None, publishing=False))
    assert found is not None
    assert found.why == "Sigstore signs when the release is pushed to the real Hub"


@pytest.mark.usefixtures("no_way_out", "release")
def test_where_sigstore_cannot_be_reached_nothing_is_signed_and_no_token_is_told(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hub.github.job({"sub": "repo:o/code"})
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    text = Path("release/manifest.yaml").read_text().partition("sign:")[0]
    text += f"sign:\n  sigstore:\n    identity: {IDENTITY}\n    issuer: https://token.actions.local-hub.invalid\n"
    Path("release/manifest.yaml").write_text(text)
    with pytest.raises(SigningError, match="Sigstore did not sign") as caught:
        sign_release(manifest(), Path("release"), means=Means(None, None, publishing=True))
    assert job["ACTIONS_ID_TOKEN_REQUEST_TOKEN"] not in str(caught.value)
    assert "eyJ" not in str(caught.value)
    assert not SIGNATURE.exists()
