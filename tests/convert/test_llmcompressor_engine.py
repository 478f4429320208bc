"""`engine: llmcompressor`: its integers in our files, through our plan, receipts and verify; and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moepress.calibration.text import CalibrationSet, token_digest
from moepress.convert.journal import Journal
from moepress.convert.llmcompressor.engine import LlmCompressorEngine, check_engine, engine_need
from moepress.convert.plan import make_plan
from moepress.convert.watcher import Silent
from moepress.errors import ConvertError, PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.verify.run import verify
from tests.pressing import press, recipe_for
from tests.tiny_checkpoints import build

ENGINE = ("engine=llmcompressor", "weights.algorithm=gptq", "calibration.samples=4", "calibration.length=48")


@pytest.mark.slow
@pytest.mark.oracle
def test_block_fp8_goes_through_a_bf16_copy_and_comes_out_verified(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", mtp=0, layers=2)
    result = press(source.folder, tmp_path / "out", "kimi", *ENGINE, threads=1)
    assert verify(tmp_path / "out", source.folder).problems == ()
    state = tmp_path / "out" / ".moepress"
    records = [json.loads(path.read_text())["weights"] for path in (state / "receipts").glob("*.json")]
    experts = [record for weights in records for record in weights.values() if record["action"] == "quantize"]
    assert len(experts) == result.report["quantized"]["weights"] > 0
    assert all(record["engine"].startswith("llmcompressor 0.") and record["tokens"] == 192 for record in experts)
    assert not (state / "llmcompressor").exists(), "the BF16 copy and the process's results are gone"
    with_ours = press(source.folder, tmp_path / "rtn", "kimi", "mtp.experts=source")
    assert result.report["kept"] == with_ours.report["kept"]


@pytest.mark.slow
def test_a_process_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    """transformers cannot find a weight: the BF16 copy was damaged before the process came to it."""
    source = build("kimi", tmp_path / "src", mtp=0, layers=2, published="bf16")
    damaged = {**json.loads((source.folder / "config.json").read_text()), "hidden_act": "no such thing"}
    checkpoint = open_checkpoint(source.folder)
    plan = make_plan(checkpoint, recipe_for("kimi", *ENGINE), calibration="0" * 64)
    (source.folder / "config.json").write_text(json.dumps(damaged))
    journal = Journal(tmp_path / "out", plan)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    samples = CalibrationSet(ids, 1, "", token_digest(ids))
    with journal.open(), pytest.raises(ConvertError, match="no such thing") as caught:
        LlmCompressorEngine(checkpoint, plan, journal, samples, Silent(), 1).run()
    assert str(caught.value.where).endswith("llmcompressor.log")


@pytest.mark.parametrize(
    ("family", "mtp", "override", "message"),
    [
        ("kimi", 0, "weights.algorithm=awq", "llm-compressor is used for gptq"),
        ("glm4", 1, "mtp.experts=quantize", "does not run MTP layers, and 24 of their weights"),
    ],
)
def test_what_it_cannot_do_is_refused(family: str, mtp: int, override: str, message: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src", mtp=mtp)
    with pytest.raises(PlanRefused, match=message):
        press(source.folder, tmp_path / "out", family, *ENGINE, override)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", mtp=0)
    checkpoint = open_checkpoint(source.folder)
    plan = make_plan(checkpoint, recipe_for("kimi", *ENGINE))
    need = check_engine(checkpoint, plan)
    assert need.decoded == 2 * plan.total_parameters < need.memory
    large = make_plan(checkpoint, recipe_for("kimi", *ENGINE, "calibration.samples=1000000000"))
    wanted = engine_need(checkpoint, large).memory
    assert wanted - need.memory == 4 * 48 * 256 * (1_000_000_000 - 4), "activations, twice, in BF16"
    with pytest.raises(PlanRefused, match=rf"about {wanted:,} bytes, [\d,]+ are free here"):
        check_engine(checkpoint, large)
