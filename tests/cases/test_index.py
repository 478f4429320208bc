"""IX: the index is ours alone, and a folder that lost tensors is not called whole because its index lost them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moepress.verify.run import verify
from tests.cases.rewritten import INDEX, rewrite_json
from tests.pressing import press
from tests.tiny_checkpoints import build


@pytest.mark.parametrize("family", ["kimi", "glm4", "kimi_k25"])
def test_a_shard_that_index_and_folder_have_both_forgotten_is_missed(family: str, tmp_path: Path) -> None:
    """IX-02: no source at hand, index, folder and total_size agree: config.json still announces the weights."""
    source = build(family, tmp_path / "src")
    out = tmp_path / "out"
    press(source.folder, out, family)
    assert verify(out).problems == ()
    gone = max(json.loads((out / INDEX).read_text())["weight_map"].values())
    raw = (out / gone).read_bytes()

    def forget(index: dict[str, Any]) -> None:
        index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != gone}
        index["metadata"]["total_size"] -= len(raw) - 8 - int.from_bytes(raw[:8], "little")

    rewrite_json(out / INDEX, forget)
    (out / gone).unlink()
    alone = "\n".join(verify(out).problems)
    assert "config.json announces it, no shard holds it" in alone
    assert verify(out, source.folder).problems


@pytest.mark.parametrize("shards", [1, 7])
def test_another_number_of_shards_than_the_sources(shards: int, tmp_path: Path) -> None:
    """IX-04: the index names our files and none of the source's, whose index never travels."""
    source = build("kimi", tmp_path / "src", shards=shards)
    result = press(source.folder, tmp_path / "out", "kimi")
    names = set(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].values())
    assert names == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(names) == len(result.plan.shards) != shards
    assert not {f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)} & names


@pytest.mark.parametrize("total", [0, 10**15, None])
def test_a_wrong_total_size_of_the_source_reaches_neither_plan_nor_output(total: int | None, tmp_path: Path) -> None:
    """IX-08: zero, another dtype's total, or absent: a warning, and the same bytes come out."""
    source = build("kimi", tmp_path / "src")
    right = press(source.folder, tmp_path / "right", "kimi").plan
    rewrite_json(
        source.folder / INDEX,
        lambda index: index.update({"metadata": {"total_size": total}} if total is not None else {"metadata": {}}),
    )
    plan = press(source.folder, tmp_path / "out", "kimi").plan
    assert (plan.source_bytes, plan.output_bytes) == (right.source_bytes, right.output_bytes)
    assert (tmp_path / "out" / INDEX).read_bytes() == (tmp_path / "right" / INDEX).read_bytes()
    assert any("total_size" in warning for warning in plan.warnings) == (total is not None)


def test_six_digits_in_the_sources_names_give_five_in_ours(tmp_path: Path) -> None:
    """IX-06: 'model-00001-of-000002' is read by its index; we write five digits on both sides."""
    source = build("deepseek_v32", tmp_path / "src")
    assert all("-of-0000" in path.name for path in source.folder.glob("*.safetensors"))
    press(source.folder, tmp_path / "out", "deepseek_v32")
    for path in (tmp_path / "out").glob("*.safetensors"):
        number, count = path.stem.removeprefix("model-").split("-of-")
        assert (len(number), len(count)) == (5, 5)
