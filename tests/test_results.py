"""Results belong to one output, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from moepress.errors import MoepressError
from moepress.results import read_results, write_result


def test_a_result_is_read_back_with_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "moepress_report.json").write_text('{"shards": {"a": "1"}}')
    write_result(tmp_path, "verify", "pass", {"tensors": 3})
    fresh, stale = read_results(tmp_path)
    assert fresh["verify"]["verdict"] == "pass"
    assert fresh["verify"]["found"] == {"tensors": 3}
    assert stale == []


def test_results_of_another_conversion_are_stale(tmp_path: Path) -> None:
    (tmp_path / "moepress_report.json").write_text('{"shards": {"a": "1"}}')
    write_result(tmp_path, "verify", "pass", {})
    (tmp_path / "moepress_report.json").write_text('{"shards": {"a": "2"}}')
    assert read_results(tmp_path) == ({}, ["verify"])


def test_a_folder_without_a_conversion_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoepressError, match="not a finished conversion"):
        write_result(tmp_path, "verify", "pass", {})


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "moepress_report.json").write_text("{}")
    path = write_result(tmp_path, "verify", "pass", {})
    path.write_text('{"verdict": "pass"')
    with pytest.raises(MoepressError) as caught:
        read_results(tmp_path)
    assert str(path) in str(caught.value)
