"""Signing: one signature over the whole release, in the format of the OpenSSF's model-signing package.

`model.sig` lies in the root and lists every other file of the release with its SHA-256. The manifest says who must
have signed: the holder of a key, or an identity that Sigstore vouches for. A signature that holds is kept, the
published one before all, since a new one has other bytes each time and would make a commit of nothing.

It refuses a private key that is not the manifest's, and an identity that is not. Through Sigstore only a CI job signs,
and only for the real Hub: its signatures are entered in a public log for good.
"""

import base64
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from publisher.border.causes import first_line
from publisher.border.installing import install_command
from publisher.errors import HubError, PushError, SigningError, UncheckableSignatureError, listed
from publisher.hub import client as hub
from publisher.hub.client import Destination
from publisher.manifest.schema import Manifest, Signer, SigstoreSigner
from publisher.records.filenames import SIGNATURE
from publisher.records.files import atomic, sha256_of
from publisher.records.publication import Signing
from publisher.release.commitplan import head_of, staged_files

if TYPE_CHECKING:
    from model_signing.verifying import Config as Verifying

KEY_VARIABLE = "PUBLISH_SIGNING_KEY"
_SIGNATURE_SIZE = 20_000  # bytes, about: for the message of a full disk
_GITHUB = "https://token.actions.githubusercontent.com"


def describe(signer: Signer) -> str:
    """Return who must have signed, in words; a key goes by the SHA-256 of its PEM file."""
    if signer.sigstore is not None:
        return f"{signer.sigstore.identity} ({signer.sigstore.issuer})"
    return f"the key with SHA-256 {hashlib.sha256((signer.key or '').encode()).hexdigest()}"


# --- before any long stage ----------------------------------------------------------------------------------


def require_means(signer: Signer, private_key: Path | None) -> None:
    """Raise an error if what it takes to sign is not at hand.

    Raises:
        SigningError: no private key or another than the manifest's; no identity or another.
        UncheckableSignatureError: the package is not installed.
    """
    _require_package()
    if signer.sigstore is not None:
        _identity_token(signer.sigstore)
    elif private_key is None:
        raise SigningError(
            "the manifest asks for a signature, and no private key is named",
            expected=f"the private half of {describe(signer)}",
            next_step=f"--signing-key FILE, or {KEY_VARIABLE}=FILE",
        )
    elif _public_half(private_key) != signer.key:
        raise SigningError(
            f"{private_key} is the private half of another key",
            expected=f"that of {describe(signer)}",
            next_step=f"name the right file, or write this into sign.key: openssl pkey -in {private_key} -pubout",
        )


def _require_package() -> None:
    try:
        import model_signing  # noqa: F401 - whether it can be had is the question
    except ImportError as error:
        raise UncheckableSignatureError(
            f"signatures need the package model-signing, which cannot be used here ({error})",
            next_step=install_command("sign"),
        ) from None


def _public_half(private_key: Path) -> str:
    from cryptography.hazmat.primitives import serialization as forms

    try:
        key = forms.load_pem_private_key(private_key.read_bytes(), None)
    except OSError as error:
        raise SigningError(f"{private_key} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError):  # TypeError: encrypted; neither text is repeated, for what it may hold
        raise SigningError(
            f"{private_key} is no private key that can be read", expected="an unencrypted one in PEM (docs/signing.md)"
        ) from None
    public = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    return public.decode()


def _identity_token(signer: SigstoreSigner) -> str:
    """Return the CI job's own token for Sigstore, once it says of itself what the manifest wants."""
    from sigstore.oidc import IdentityError, detect_credential

    try:
        token: str | None = detect_credential()
    except IdentityError as error:
        raise SigningError(f"this job gets no identity to sign with: {first_line(error)}", expected=_JOB) from None
    if token is None:
        raise SigningError(
            "through Sigstore a CI job signs, and this is none",
            expected=_JOB,
            next_step="let the release workflow push, or sign with a key (docs/signing.md)",
        )
    _require_identity(_claims(token), signer)
    return token


_JOB = "a job that may ask for an ID token (on GitHub: permissions: id-token: write)"


def _claims(token: str) -> dict[str, Any]:
    """Return what the token says, unverified: to verify it is Sigstore's part."""
    body = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return claims


def _require_identity(claims: dict[str, Any], signer: SigstoreSigner) -> None:
    """Raise an error if the job is not who the manifest says must sign.

    On GitHub the identity is that of the workflow, which the token names; of other issuers only the issuer is compared
    here, and the finished signature tells the rest.
    """
    found = {"issuer": claims.get("iss")}
    if found["issuer"] == _GITHUB:
        found["identity"] = f"https://github.com/{claims.get('job_workflow_ref')}"
    for field, value in found.items():
        if value != getattr(signer, field):
            raise SigningError(
                f"this job's {field} is {value}",
                expected=f"{getattr(signer, field)}, as the manifest says",
                next_step=f"correct sign.sigstore.{field} in the manifest, or sign where it holds",
            )


# --- the signature of a staged tree -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Means:
    """What a run may sign with, and where an earlier release may be.

    Attributes:
        private_key: PEM file; absent where none was named.
        published_at: the Hub whose signature is kept where it holds; absent for none.
        publishing: whether the real Hub is written to, so that Sigstore may be asked.
    """

    private_key: Path | None
    published_at: Destination | None
    publishing: bool


def sign_release(manifest: Manifest, staged: Path, *, means: Means) -> Signing | None:
    """Sign the staged tree, or keep a signature that holds; where it may not be signed here, leave none.

    Args:
        manifest: the release's; it says who must sign.
        staged: the staged tree.
        means: what may be signed with, and where an earlier release may be.

    Returns:
        What became of the signature; None where the manifest asks for none.

    Raises:
        PushError: the staged tree is not the release, whole and nothing else.
        SigningError: the means are not the manifest's, or Sigstore did not sign.
        HubError: the repository that is written to cannot be read.
    """
    file, signer = staged / SIGNATURE, manifest.sign
    if signer is None:
        file.unlink(missing_ok=True)
        return None
    names = {entry.name for entry in staged_files(manifest, staged)} - {SIGNATURE}
    if _kept(manifest, staged, signer=signer, names=names, means=means):
        return Signing(result="kept", signer=describe(signer), why=None)
    obstacle = _obstacle(signer, means)
    if obstacle is not None and not means.publishing:
        file.unlink(missing_ok=True)  # of other files than these
        return Signing(result="missing", signer=describe(signer), why=obstacle)
    _sign(staged, signer, names=names, means=means)
    return Signing(result="signed", signer=describe(signer), why=None)


def is_signed(manifest: Manifest, staged: Path) -> bool:
    """Return whether the staged tree is a whole release with a signature that holds, made here or elsewhere."""
    if manifest.sign is None or not (staged / SIGNATURE).is_file():
        return False
    try:
        names = {entry.name for entry in staged_files(manifest, staged)} - {SIGNATURE}
        verify(manifest.sign, staged, names=names)
    except (PushError, SigningError):
        return False
    return True


def _kept(manifest: Manifest, staged: Path, *, signer: Signer, names: Collection[str], means: Means) -> bool:
    with TemporaryDirectory(prefix="publish-signature-") as folder:
        for candidate in (_published(manifest, Path(folder), means), staged / SIGNATURE):
            if candidate is None or not candidate.is_file():
                continue
            try:
                verify(signer, staged, names=names, signature=candidate)
            except SigningError:
                continue
            if candidate.parent != staged:
                content = candidate.read_bytes()
                with atomic(staged / SIGNATURE, size=len(content)) as partial:
                    partial.write_bytes(content)
            return True
    return False


def _published(manifest: Manifest, folder: Path, means: Means) -> Path | None:
    """Fetch the head's signature into `folder` and return its path; None where there is none."""
    at = means.published_at
    if at is None:
        return None
    try:
        head = head_of(manifest.repo, at)
        if head is None or SIGNATURE not in {file.path for file in hub.list_files(manifest.repo, head, at=at)}:
            return None
        return hub.download_all(manifest.repo, head, filenames=[SIGNATURE], cache=folder, at=at) / SIGNATURE
    except HubError:
        if means.publishing:
            raise
        return None  # a dry run goes on without the Hub


def _obstacle(signer: Signer, means: Means) -> str | None:
    if signer.sigstore is not None:
        return "Sigstore signs when the release is pushed to the real Hub"
    return None if means.private_key is not None else f"no private key: --signing-key FILE, or {KEY_VARIABLE}"


def _sign(staged: Path, signer: Signer, *, names: Collection[str], means: Means) -> None:
    require_means(signer, means.private_key)
    from model_signing import hashing, signing

    config = signing.Config().set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    with atomic(staged / SIGNATURE, size=_SIGNATURE_SIZE) as partial:
        if signer.sigstore is None:
            config.use_elliptic_key_signer(private_key=means.private_key or "").sign(staged, partial)
        else:
            token = _identity_token(signer.sigstore)
            try:
                config.use_sigstore_signer(identity_token=token).sign(staged, partial)
            except Exception as error:  # noqa: BLE001 - whatever its clients raise, it is not signed
                raise SigningError(f"Sigstore did not sign: {first_line(error)}", next_step="try again") from None
        verify(signer, staged, names=names, signature=partial)


# --- verifying ----------------------------------------------------------------------------------------------


def verify(signer: Signer, folder: Path, *, names: Collection[str], signature: Path | None = None) -> None:
    """Verify that the signature is the signer's and covers just these files.

    Args:
        signer: who must have signed.
        folder: where the files are.
        names: all files that must be signed, relative to `folder`; no other may be.
        signature: the signature; `model.sig` in the folder unless another file is named.

    Raises:
        SigningError: what speaks against it, naming files.
        UncheckableSignatureError: the package is not installed, or Sigstore's keys cannot be fetched.
    """
    file = signature or folder / SIGNATURE
    signed = _signed_files(file)
    _require_none(_other_names(signed, names))  # the package itself lets a signer leave files out
    with _verifier(signer, ignoring=_besides(folder, names)) as verifier:
        try:
            verifier.verify(folder, file)
        except Exception as error:  # noqa: BLE001 - a file of any origin may make it stumble anywhere
            _require_none(
                [f"{n} is not as it was signed" for n in sorted(signed) if sha256_of(folder / n) != signed[n]]
            )
            raise SigningError(f"{SIGNATURE} is not a signature by {describe(signer)}: {first_line(error)}") from None


def _besides(folder: Path, names: Collection[str]) -> Iterator[str]:
    """Yield what else is in the folder: a whole subfolder where it holds no file of the release."""
    tops = {name.partition("/")[0] for name in names}
    for top in folder.iterdir():
        if top.name not in tops:
            yield top.name
        elif top.is_dir():
            inside = (path.relative_to(folder).as_posix() for path in top.rglob("*") if path.is_file())
            yield from (name for name in inside if name not in names)


def _other_names(signed: Collection[str], names: Collection[str]) -> list[str]:
    lost, more = sorted(set(signed) - set(names)), sorted(set(names) - set(signed))
    return [*(f"{name} is signed and not there" for name in lost), *(f"{name} is not signed" for name in more)]


def _signed_files(file: Path) -> dict[str, str]:
    """Return the SHA-256 of each file as the signature lists it; whether the signature holds is not asked here."""
    try:
        payload = base64.b64decode(json.loads(file.read_bytes())["dsseEnvelope"]["payload"])
        return {str(entry["name"]): str(entry["digest"]) for entry in json.loads(payload)["predicate"]["resources"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SigningError(f"{SIGNATURE} is no signature of a model ({type(error).__name__})") from None


def _require_none(problems: list[str]) -> None:
    if len(problems) == 1:
        raise SigningError(problems[0])
    if problems:
        raise SigningError(f"{SIGNATURE} is not of these files:\n{listed(problems)}\n")


@contextmanager
def _verifier(signer: Signer, *, ignoring: Iterable[str]) -> Iterator["Verifying"]:
    """Yield a verifier for this signer; it follows links, since the Hub's cache consists of them."""
    _require_package()
    from model_signing import hashing, verifying

    files = hashing.Config().set_ignored_paths(paths=ignoring).set_allow_symlinks(allow_symlinks=True)
    config = verifying.Config().set_hashing_config(files)
    if signer.sigstore is not None:
        yield _sigstore_verifier(config, signer.sigstore)
        return
    with TemporaryDirectory(prefix="publish-key-") as folder:
        key = Path(folder, "key.pub")
        key.write_text(signer.key or "", encoding="ascii")
        yield config.use_elliptic_key_verifier(public_key=os.fspath(key))


def _sigstore_verifier(config: "Verifying", signer: SigstoreSigner) -> "Verifying":
    from sigstore.errors import Error

    try:
        return config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer)
    except Error as error:
        raise UncheckableSignatureError(
            f"Sigstore's keys cannot be fetched, so its signature cannot be verified here: {first_line(error)}",
            next_step="try again with access to the network",
        ) from None
