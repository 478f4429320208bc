"""The card: a plain warning first, every figure that was measured, a sentence for every one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

from moepress.errors import MoepressError
from moepress.publish.card import make_card
from moepress.publish.metadata import card_metadata, check_metadata
from moepress.report.output import read_pressed_output
from moepress.results import write_result
from tests.publish import measured


def card_of(out: Path, **options: Any) -> str:
    return make_card(read_pressed_output(out), **options).text


def front(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_the_warning_comes_first(out: Path) -> None:
    text = card_of(out, title="tiny", base_model="press/tiny-kimi")
    body = text.split("---\n", 2)[2].lstrip()
    assert body.startswith("# tiny\n\n> [!WARNING]\n> **These weights are quantized.**")
    assert "Do not use them" in body.split("## ")[0]
    assert "[press/tiny-kimi](https://huggingface.co/press/tiny-kimi)" in body.split("## ")[0]


def test_kernels_that_read_a_negative_scale_as_something_else_are_named(out: Path) -> None:
    """Only where the recipe asked for such scales; a card is read by people with either server."""
    assert "INT8" not in card_of(out).split("## ")[0]
    report = json.loads((out / "moepress_report.json").read_text())
    report["recipe"]["weights"]["signed_scales"] = True
    (out / "moepress_report.json").write_text(json.dumps(report))
    warning = card_of(out).split("## ")[0]
    assert "with VLLM_MARLIN_INPUT_DTYPE=int8 in vllm 0.32.0: half of the scales are negative" in warning
    assert "takes for large positive ones, without an error" in warning


def test_what_was_not_run_is_said(out: Path) -> None:
    text = card_of(out)
    for sentence in (
        "**No task was scored**",
        "**Not run: tasks.**",
        "**Not run: fidelity.**",
        "**Not run: a server.**",
        "**Not seen:** no server was booted",
        "tool calls were not evaluated",
    ):
        assert sentence in text
    assert "| evaluate: tasks | not run |" in text
    assert "model-index" not in front(text)


def test_what_was_measured_is_shown(out: Path) -> None:
    write_result(out, "fidelity", "not judged", measured.FIDELITY)
    write_result(out, "evaluate", "fail", measured.EVALUATE)
    write_result(out, "validate", "pass", measured.VALIDATE)
    text = card_of(out, title="tiny", base_model="press/tiny-kimi")
    assert "**Not run" not in text
    assert (
        "| gsm8k | exact match | 1,319 | 0.9439 | 0.9356 | 99.12% | -0.0083 | -0.0158 to -0.0009 | REGRESSION |" in text
    )
    assert "| fidelity: prose | KL | 16 | – | 0.0121 | – | -0.0158 to -0.0009 | ACCEPT |" in text
    assert "Not run: arc_challenge (lm-eval is not installed)." in text
    assert "for gsm8k: they regressed" in text
    assert "| held-out prose | 8,176 | 0.01210 ± 0.00040 | 95.30% | 13.900 | 14.000 |" in text
    assert "40 of 64 parted from the source's within 256 tokens, half of them by token 87" in text
    assert "| 4 | 80.00% | 70.00% | 20 |" in text
    assert "**Seen:** a booted server reported its cache as `float8_e4m3fn`" in text
    assert "Measured on NVIDIA H200" in text
    assert "SGLang 0.5.23" in text
    assert "| 8 | 394.2 | 495.7 | 1.26 | faster |" in text
    index = front(text)["model-index"][0]["results"]
    assert index[0]["dataset"] == {"name": "GSM8K", "type": "openai/gsm8k"}
    assert index[0]["metrics"][0]["value"] == 0.9356
    assert len(index) == 2  # KL compares the two and is no score of the pressed model


def test_the_warning_says_what_a_server_showed_where_nothing_else_was_measured(out: Path) -> None:
    prose = {**measured.EVALUATE["fidelity"]["prose"], "kl_is": "lower bound"}
    code = {**prose, "kl": 0.0201, "top1_agreement": 0.94}
    write_result(out, "evaluate", "pass", {**measured.EVALUATE, "fidelity": {"prose": prose, "code": code}})
    warning = card_of(out).split("## ")[0]
    assert "on 2 kinds of text, the next-token distribution moved by at least 0.0121 to 0.0201 nats a token" in warning
    assert "94.0 to 95.3 % of the most likely tokens" in warning


def test_figures_of_a_processor_stand_beside_no_gpus(out: Path) -> None:
    write_result(out, "validate", "not judged", {**measured.VALIDATE, "smoke": True})
    text = card_of(out)
    assert "**There was no GPU**" in text
    assert "495.7" not in text
    assert ", measured:" not in text


def test_a_stale_result_is_not_shown(out: Path) -> None:
    write_result(out, "evaluate", "fail", measured.EVALUATE)
    report = json.loads((out / "moepress_report.json").read_text())
    (out / "moepress_report.json").write_text(json.dumps({**report, "again": True}))
    assert "**Not run: tasks.**" in card_of(out)


def test_no_folder_of_this_machine_is_named(out: Path, pressed: tuple[Path, Path]) -> None:
    text = card_of(out)
    assert str(out) not in text
    assert str(pressed[0]) not in text
    assert "/tmp" not in text
    assert "agree with SRC" in text
    assert "moepress convert SRC out --recipe kimi-k2" in text
    assert "moepress pull press/tiny-kimi SRC" in card_of(out, base_model="press/tiny-kimi")


def test_the_hubs_own_reader_reads_it(out: Path) -> None:
    write_result(out, "evaluate", "pass", measured.EVALUATE)
    card = ModelCard(card_of(out, title="tiny", base_model="press/tiny-kimi"))
    assert card.data.base_model == "press/tiny-kimi"
    assert isinstance(card.data.eval_results[0], EvalResult)
    assert card.data["base_model_relation"] == "quantized"


def test_the_licence_is_the_sources(out: Path) -> None:
    (out / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, zh]\ntags: [chat, moe]\n---\n# Tiny\n")
    data = front(card_of(out))
    assert data["license"] == "apache-2.0"
    assert data["language"] == ["en", "zh"]
    assert {"chat", "moe", "moepress"} <= set(data["tags"])
    assert "apache-2.0, as the source" in card_of(out)


def test_what_the_hub_would_refuse_is_made_right_or_refused_here(tmp_path: Path) -> None:
    """HB-07: datasets: [null], license: modified-mit, base_model: a path."""
    (tmp_path / "LICENSE").write_text("text")
    source = {"datasets": [None, "org/data"], "license": "modified-mit"}
    data, notes = card_metadata(
        title="t", base_model="org/base", source=source, folder=tmp_path, tags=["a"], results=[]
    )
    found = data.to_dict()
    assert found["datasets"] == ["org/data"]
    assert (found["license"], found["license_name"], found["license_link"]) == ("other", "modified-mit", "LICENSE")
    assert len(notes) == 2
    check_metadata(found)
    bad = {"datasets": [None], "license": "modified-mit", "base_model": "/models/kimi", "tags": [""]}
    with pytest.raises(MoepressError) as caught:
        check_metadata(bad)
    for field in ("datasets: None", "license: 'modified-mit'", "base_model: '/models/kimi'", "tags: ''"):
        assert field in caught.value.what


def test_a_base_model_that_is_a_path_is_refused(out: Path) -> None:
    """HB-07: before anything is sent."""
    with pytest.raises(MoepressError, match="base_model"):
        make_card(read_pressed_output(out), base_model="/models/kimi")


@pytest.mark.parametrize("text", ["---\nlicense: [\n---\n", "no front matter", ""])
def test_a_source_card_that_cannot_be_read_costs_nothing(out: Path, text: str) -> None:
    (out / "README.md").write_text(text)
    assert front(card_of(out))["license"] == "other"  # the LICENSE file is linked
