"""A signed output: its copy passes, every change of a signed file does not, and what nobody signed is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from moepress.cli import app
from moepress.errors import MoepressError
from moepress.publish.contents import stage
from moepress.publish.gate import check_publishable
from moepress.publish.signing import check_signature, sign_output
from moepress.results import SIGNATURE_NAME
from tests.pressing import press
from tests.tiny_checkpoints import build


def make_key(path: Path, password: bytes | None = None) -> Path:
    """A P-256 key pair: PATH and PATH.pub."""
    key = ec.generate_private_key(ec.SECP256R1())
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, hidden))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_name(f"{path.name}.pub").write_bytes(key.public_key().public_bytes(pem, public))
    return path


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A converted tiny Kimi with a signature, and its public key."""
    folder = tmp_path_factory.mktemp("signed")
    source = build("kimi", folder / "src").folder
    (source / "README.md").write_text("of the source, which the card replaces\n")
    press(source, folder / "out", "kimi", "kv_cache.scales=none", threads=1)
    key = make_key(folder / "key.pem")
    sign_output(folder / "out", key)
    return folder / "out", key.with_name("key.pem.pub")


def test_every_changed_lost_or_swapped_file_is_seen(signed: tuple[Path, Path], tmp_path: Path) -> None:
    out, public = signed
    check = check_signature(out, public)
    assert check.problems == ()
    assert set(check.signed) >= {
        "config.json",
        "model.safetensors.index.json",
        "moepress_report.json",
        "tokenizer.json",
    }
    shards = [name for name in check.signed if name.endswith(".safetensors")]
    assert shards == sorted(path.name for path in out.glob("*.safetensors"))
    for name in check.signed:
        for change in ("a byte", "gone"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(out, copy)
            if change == "gone":
                (copy / name).unlink()
            else:
                data = bytearray((copy / name).read_bytes())
                data[-1] ^= 1
                (copy / name).write_bytes(data)
            problems = check_signature(copy, public).problems
            assert problems, f"{name}: {change}"
            assert name in problems[0]


def test_another_key_and_a_forged_list_do_not_pass(signed: tuple[Path, Path], tmp_path: Path) -> None:
    out, _ = signed
    other = make_key(tmp_path / "other.pem")
    assert check_signature(out, other.with_name("other.pem.pub")).problems
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    bundle = json.loads((copy / SIGNATURE_NAME).read_text())
    bundle["dsseEnvelope"]["payload"] = bundle["dsseEnvelope"]["payload"][:-8] + "AAAAAAA="
    (copy / SIGNATURE_NAME).write_text(json.dumps(bundle))
    with pytest.raises(MoepressError, match="not a signature"):
        check_signature(copy, signed[1])


def test_what_nobody_signed_is_named(signed: tuple[Path, Path], tmp_path: Path) -> None:
    out, public = signed
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "extra.bin").write_bytes(b"x")
    check = check_signature(copy, public)
    assert check.problems == ()
    assert check.unsigned == ("README.md", "extra.bin")


def test_publish_sends_the_signature(signed: tuple[Path, Path]) -> None:
    out, _ = signed
    contents = stage(check_publishable(out), "---\n---\n# card\n")
    assert SIGNATURE_NAME in contents.files


def test_the_commands_sign_check_and_refuse(signed: tuple[Path, Path], tmp_path: Path) -> None:
    """Also by the library's own command line, which needs no moepress."""
    out, public = signed
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / SIGNATURE_NAME).unlink()
    with pytest.raises(MoepressError, match=r"no model\.sig"):
        check_signature(copy, public)
    key = make_key(tmp_path / "mine.pem", b"a secret")
    runner = CliRunner()
    with pytest.raises(MoepressError, match="cannot be signed"):
        sign_output(copy, key, password="another")
    assert not list(copy.glob(".model.sig*"))
    done = runner.invoke(
        app, ["sign", str(copy), "--key", str(key), "--key-password-env", "SECRET"], env={"SECRET": "a secret"}
    )
    assert done.exit_code == 0, done.output
    mine = f"{key}.pub"
    assert runner.invoke(app, ["verify", str(copy), "--signed-by", mine]).exit_code == 0
    theirs = [sys.executable, "-m", "model_signing", "verify", "key", str(copy), "--public_key", mine]
    theirs += ["--signature", str(copy / SIGNATURE_NAME), "--ignore_unsigned_files"]
    assert subprocess.run(theirs, capture_output=True, check=False).returncode == 0
    wrong = runner.invoke(app, ["verify", str(copy), "--signed-by", str(public)])
    assert wrong.exit_code == 1, wrong.output
    with pytest.raises(MoepressError, match="not a finished conversion"):
        sign_output(tmp_path, key)
