"""doctor: measures, does not assume, leaves nothing behind, and says what to mend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moepress import doctor
from tests.test_cli import moepress


def test_every_check_of_this_machine_ends_with_a_verdict(tmp_path: Path) -> None:
    done = moepress("doctor", "--offline", "--folder", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"packages", "processors", "memory", "rounding", "GPUs", "SGLang", "Ray", "tokenizers"} <= set(checks)
    assert checks["packages"]["status"] == "good"
    assert all(check["mend"] for check in checks.values() if check["status"] != "good")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refused)
    check = doctor.check_disk(tmp_path)
    assert check.status == "bad"
    assert "Permission denied" in check.found


def test_a_full_disk_is_bad_before_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000)  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    check = doctor.check_disk(tmp_path / "not" / "yet")
    assert (check.status, check.name) == ("bad", f"disk of {tmp_path}")


def test_one_bad_thing_means_that_conversions_cannot_work() -> None:
    good, bad = doctor.Check("a", "good", ""), doctor.Check("b", "bad", "", "mend it")
    assert doctor.Diagnosis((good, doctor.Check("c", "note", "", "x"))).can_convert
    assert not doctor.Diagnosis((good, bad)).can_convert


def test_without_a_token_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    check = doctor.check_hub()
    assert (check.status, check.mend) == ("note", "hf auth login")
