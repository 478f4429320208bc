"""Calibrated conversions end to end: every family, every algorithm, resumed at any layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moepress.calibration.text import text_digest
from moepress.cli import app
from moepress.convert.calibrated.samples import calibration_samples
from moepress.errors import CheckpointError, PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_tensors
from tests.pressing import StopAfter, press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build

pytestmark = pytest.mark.slow

SMALL = ("calibration.samples=4", "calibration.length=48", "output.shard_size=1MB")
CALIBRATED = ["kimi", "glm4", "glm5", "deepseek_v32", "qwen3_moe"]


def records(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path in (out / ".moepress" / "receipts").glob("*.json"):
        found |= json.loads(path.read_text())["weights"]
    return found


@pytest.mark.parametrize("family", CALIBRATED)
def test_gptq_presses_every_family_with_its_mtp_layer(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    result = press(source.folder, tmp_path / "out", family, "weights.algorithm=gptq", *SMALL)
    assert verify(tmp_path / "out", source.folder).problems == ()
    experts = {name: record for name, record in records(tmp_path / "out").items() if record["action"] == "quantize"}
    assert len(experts) == result.report["quantized"]["weights"]
    for name, record in experts.items():
        assert record["method"] == "gptq", name
        assert {"tokens", "shrinkage", "dampening_frac", "loss", "target_change"} <= set(record), name


def test_experts_without_a_single_token_are_quantized_and_say_so(tmp_path: Path) -> None:
    """GQ-04, GQ-06: rare experts came out unquantized or NaN elsewhere; here they are quantized by what their layer saw."""
    source = build("kimi", tmp_path / "src", experts=64)
    press(
        source.folder,
        tmp_path / "out",
        "kimi",
        "weights.algorithm=gptq",
        "calibration.samples=1",
        "calibration.length=16",
    )
    unseen = [r for r in records(tmp_path / "out").values() if r["action"] == "quantize" and r["tokens"] == 0]
    assert unseen
    assert all(record["shrinkage"] == 1.0 and record["decision"] == "quantized" for record in unseen)
    assert verify(tmp_path / "out", source.folder).problems == ()


def test_a_layer_that_nothing_reaches_falls_back_and_says_so_to_the_end(tmp_path: Path) -> None:
    """GQ-02: a norm of zeros gives its experts nothing to be calibrated by; the receipt, the report and the screen tell."""
    source = build("kimi", tmp_path / "src", mtp=0)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.post_attention_layernorm.weight"
        tensors[name] = torch.zeros_like(tensors[name])

    rewrite_tensors(source, silence)
    options = ["weights.algorithm=gptq", "serving.tensor_parallel=1", *SMALL]
    words = [word for option in options for word in ("--set", option)]
    done = CliRunner().invoke(
        app, ["convert", str(source.folder), str(tmp_path / "out"), "--recipe", "kimi-k2", *words]
    )
    assert done.exit_code == 1, "more fallbacks than limits.max_fallback_share"
    fallen = {name: r for name, r in records(tmp_path / "out").items() if r.get("decision") == "fallback"}
    assert sum(not name.endswith("down_proj.weight") for name in fallen) == 8 * 2, "their Hessian is the layer's, zero"
    assert all(r["tokens"] for n, r in fallen.items() if n.endswith("down_proj.weight")), (
        "an unseen one's is the identity"
    )
    assert all(r["method"] == "rtn" and "mean diagonal is 0" in str(r["reason"]) for r in fallen.values())
    assert {"tokens", "shrinkage", "sqnr_db"} <= set(next(iter(fallen.values())))
    report = json.loads((tmp_path / "out" / "moepress_report.json").read_text())
    assert set(report["fallbacks"]) == set(fallen)
    assert {"tokens", "shrinkage", "sqnr_db"} <= set(report["quantized"]["worst"][0])
    for said in ("least exact", "blend λ", "fallback", "layer 1, expert 7, up_proj"):
        assert said in done.stdout
    assert verify(tmp_path / "out", source.folder).problems == ()


@pytest.mark.parametrize("algorithm", ["awq", "awq+gptq"])
def test_awq_factors_cancel_between_up_and_down(algorithm: str, tmp_path: Path) -> None:
    """AW-03: layer 0 dense, the others MoE: pairs are found per expert, and no layernorm or router takes part."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", f"weights.algorithm={algorithm}", *SMALL)
    assert verify(tmp_path / "out", source.folder).problems == ()
    alphas = {
        record.get("awq_alpha") for record in records(tmp_path / "out").values() if record["action"] == "quantize"
    }
    assert None not in alphas
    assert all("tokens" in r for r in records(tmp_path / "out").values() if r["action"] == "quantize")
    assert max(alphas) > 0  # type: ignore[type-var]


@pytest.mark.parametrize("mode", ["expert", "layer"])
def test_other_hessians(mode: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", "weights.algorithm=gptq", f"calibration.hessian={mode}", *SMALL)
    assert verify(tmp_path / "out", source.folder).problems == ()


@pytest.mark.parametrize("units", [1, 3, 5])
def test_resumed_after_any_unit_the_bytes_are_those_of_one_run(units: int, tmp_path: Path) -> None:
    """Finished layers are run with the integers already written, so what comes after them does not change."""
    source = build("kimi", tmp_path / "src")
    options = ("weights.algorithm=gptq", *SMALL)
    press(source.folder, tmp_path / "whole", "kimi", *options)
    with pytest.raises(KeyboardInterrupt):
        press(source.folder, tmp_path / "out", "kimi", *options, watcher=StopAfter(units))
    press(source.folder, tmp_path / "out", "kimi", *options)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert not (tmp_path / "out" / ".moepress" / "scratch").exists()


def test_blocks_of_one_expert_give_the_bytes_of_one_block(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    options = ("weights.algorithm=gptq", "calibration.samples=4", "calibration.length=48")
    press(source.folder, tmp_path / "one", "kimi", *options)
    press(source.folder, tmp_path / "many", "kimi", *options, "calibration.memory=1MB")
    one, many = shard_bytes(tmp_path / "one"), shard_bytes(tmp_path / "many")
    assert {n: b for n, b in one.items() if n.endswith(".safetensors")} == {
        n: b for n, b in many.items() if n.endswith(".safetensors")
    }


def test_other_calibration_text_is_another_conversion(tmp_path: Path) -> None:
    """CL-04: a resumed run must not mix two calibration sets."""
    source = build("kimi", tmp_path / "src")
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 400)
    options = ("weights.algorithm=gptq", f"calibration.text={text}", "calibration.samples=2", "calibration.length=32")
    with pytest.raises(KeyboardInterrupt):
        press(source.folder, tmp_path / "out", "kimi", *options, watcher=StopAfter(1))
    text.write_text("h g f e d c b a " * 400)
    with pytest.raises(PlanRefused, match="calibration"):
        press(source.folder, tmp_path / "out", "kimi", *options)


def test_too_little_text_is_refused_before_work(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    text = tmp_path / "text.txt"
    text.write_text("too short")
    with pytest.raises(PlanRefused, match="too little text"):
        press(source.folder, tmp_path / "out", "kimi", "weights.algorithm=gptq", f"calibration.text={text}")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_tokenizer_is_refused_before_work(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json"):
        (source.folder / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="tokenizer"):
        press(source.folder, tmp_path / "out", "kimi", "weights.algorithm=gptq")
    assert not (tmp_path / "out").exists()


def test_conversations_of_a_dataset_go_through_the_models_template(tmp_path: Path) -> None:
    """`hub:` on a folder of data files, as the Hub gives it: the same conversion as from the file itself."""
    source = build("kimi", tmp_path / "src", mtp=0, layers=2)
    (source.folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"messages": [{"role": "user", "content": f"question {i} " * 9}]} for i in range(12)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("weights.algorithm=awq", "calibration.samples=2", "calibration.length=16")
    result = press(source.folder, tmp_path / "out", "kimi", *options, f"calibration.text=hub:{data}")
    samples = calibration_samples(
        open_checkpoint(source.folder), recipe_for("kimi", *options, f"calibration.text=hub:{data}")
    )
    assert result.report["calibration_sha256"] == samples.token_sha256
    rendered = [f"<user>{row['messages'][0]['content']}" for row in rows[: samples.documents]]
    assert samples.text_sha256 == text_digest(rendered)
    assert verify(tmp_path / "out", source.folder).problems == ()
