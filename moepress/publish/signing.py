"""A signature over an output's files, so that a copy of it can be told from a changed one without having its source.

    OUT/model.sig    a Sigstore bundle of the OpenSSF Model Signing format, made by the model-signing library:
                     {file name: SHA-256} of everything that `convert` wrote, under an elliptic-curve key (P-256, P-384, P-521)

What is signed is what is published as it lies here: shards, index, config, side files, report. The card, the receipts and
scores are written at publication and stay outside; a check names them. Anybody can check the bundle with the library's
own command: ``model_signing verify key OUT --signature OUT/model.sig --public_key KEY.pub --ignore_unsigned_files``.

A key, and no identity from the network: what signs a conversion is a machine in a rack, not a person at a browser.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.convert.journal import read_json
from moepress.errors import MoepressError
from moepress.formats.shard_index import INDEX_NAME
from moepress.formats.side_files import CONFIG_NAME
from moepress.publish.contents import NOT_SENT
from moepress.results import REPORT_NAME, SIGNATURE_NAME, output_digest


@dataclass(frozen=True)
class SignatureCheck:
    """What a signature says about a folder.

    Attributes:
        problems: in words; empty when every signed file is there with its bytes.
        signed: names of the files it covers.
        unsigned: files of the folder that it says nothing about.
    """

    problems: tuple[str, ...]
    signed: tuple[str, ...]
    unsigned: tuple[str, ...]


def sign_output(out: Path, key: Path, *, password: str | None = None) -> Path:
    """Signs a finished conversion; returns the signature's path. Reads every byte once.

    Args:
        out: the folder that `convert` wrote.
        key: a private elliptic-curve key, PEM.
        password: of the key, if it has one.

    Raises:
        MoepressError: not a finished conversion, no library, or no key.
    """
    output_digest(out)
    names = _names(out)
    library = _library()
    target = out / SIGNATURE_NAME
    unfinished = target.with_name(f".{SIGNATURE_NAME}.{os.getpid()}")
    config = library.signing.Config().set_hashing_config(_hashing(library, out, names))
    try:
        # the library says str, and hands it to a reader of keys that takes bytes
        secret: Any = None if password is None else password.encode()
        config.use_elliptic_key_signer(private_key=key, password=secret).sign(out, unfinished)
        unfinished.replace(target)
    except (OSError, ValueError, TypeError) as error:
        raise MoepressError(
            f"the folder cannot be signed with this key: {error}",
            where=str(key),
            hint="openssl ecparam -name prime256v1 -genkey -noout -out KEY makes one",
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def check_signature(folder: Path, public_key: Path) -> SignatureCheck:
    """Holds a folder, here or downloaded, against the signature in it.

    Args:
        public_key: of whoever is said to have signed it, PEM; got another way than the folder.

    Raises:
        MoepressError: no signature, no key, or no library.
    """
    signature = folder / SIGNATURE_NAME
    if not signature.is_file():
        raise MoepressError(f"no {SIGNATURE_NAME}", where=str(folder), hint=f"moepress sign {folder} --key KEY")
    library = _library()
    try:
        config = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError, TypeError) as error:
        raise MoepressError(
            f"not a public key: {error}", where=str(public_key), hint="openssl ec -in KEY -pubout"
        ) from error
    signed = _signed_names(signature)
    unsigned = tuple(sorted(_files(folder) - set(signed) - {SIGNATURE_NAME}))
    config.set_hashing_config(_hashing(library, folder, signed)).set_ignore_unsigned_files(True)
    try:
        config.verify(folder, signature)
    except ValueError as error:
        return SignatureCheck((_words(error),), signed, unsigned)
    return SignatureCheck((), signed, unsigned)


def _names(out: Path) -> tuple[str, ...]:
    report = read_json(out / REPORT_NAME)
    side = [name for name in report["side_files"] if name not in NOT_SENT]
    return tuple(sorted({*report["shards"], *side, CONFIG_NAME, INDEX_NAME, REPORT_NAME}))


def _files(folder: Path) -> set[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith(".")}


def _hashing(library: Any, folder: Path, names: tuple[str, ...]) -> Any:
    """Files alone, and only those named."""
    others = [folder / name for name in _files(folder) - set(names)]
    hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
    return library.hashing.Config().set_ignored_paths(paths=[*others, *hidden], ignore_git_paths=True)


def _signed_names(signature: Path) -> tuple[str, ...]:
    """Names in the bundle; what they are worth is the library's to say."""
    import base64

    try:
        envelope = json.loads(signature.read_text(encoding="utf-8"))["dsseEnvelope"]
        statement = json.loads(base64.b64decode(envelope["payload"]))
        return tuple(sorted(str(resource["name"]) for resource in statement["predicate"]["resources"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoepressError(
            f"not a signature that can be read: {error!r}", where=str(signature), hint="download it again"
        ) from error


def _words(error: ValueError) -> str:
    """The library's message, with digests as people write them."""
    return f"signature: {' '.join(str(error).split())[:600]}"


def _library() -> Any:
    if importlib.util.find_spec("model_signing") is None:
        raise MoepressError(
            "signing needs the library model-signing, which is not installed",
            where="moepress sign",
            hint="pip install 'moepress[sign]'",
        )
    import model_signing

    return model_signing
