"""Scores for the Hub's leaderboards: in the Hub's form by its own reader, whole benchmarks alone, never the source's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from moepress.hub.connection import connect
from moepress.publish.card import make_card
from moepress.publish.contents import stage
from moepress.publish.eval_results import eval_results
from moepress.publish.gate import check_publishable
from moepress.publish.push import push
from moepress.report.output import read_pressed_output
from moepress.results import write_result
from tests.hub.local_hub import LocalHub
from tests.pressing import press
from tests.publish import measured
from tests.tiny_checkpoints import build

REPO = "press/tiny-kimi-int4"


def files_of(out: Path, found: dict[str, Any]) -> dict[str, bytes]:
    write_result(out, "evaluate", "fail", found)
    return eval_results(make_card(read_pressed_output(out)).facts, REPO)


def test_the_hubs_own_reader_reads_the_score(out: Path) -> None:
    """GSM8K is a benchmark there; MMLU is not. A regression is sent like everything else."""
    files = files_of(out, measured.EVALUATE)
    assert list(files) == [".eval_results/gsm8k.yaml"]
    (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/gsm8k.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 93.56)
    assert entry.source_url == f"https://huggingface.co/{REPO}"
    assert entry.notes == "INT4 experts; 5 examples, greedy, lm_eval 0.4.13; the source, asked alike, 94.39"
    assert entry.date == json.loads((out / ".moepress/results/evaluate.json").read_text())["finished"]
    assert entry.verify_token is None


def test_part_of_a_benchmark_is_no_score_of_it(out: Path) -> None:
    some = copy.deepcopy(measured.EVALUATE)
    some["rows"][0]["samples"] = 200
    assert files_of(out, some) == {}


@pytest.mark.parametrize("found", [{**measured.EVALUATE, "tasks": None}, {**measured.EVALUATE, "rows": []}])
def test_nothing_is_written_where_nothing_was_scored(out: Path, found: dict[str, Any]) -> None:
    assert files_of(out, found) == {}


def test_they_are_sent_and_the_sources_are_not(hub: LocalHub, tmp_path: Path) -> None:
    """A source brings its own scores as a side file; they belong to other weights."""
    source, out = build("kimi", tmp_path / "src").folder, tmp_path / "out"
    (source / ".eval_results").mkdir()
    (source / ".eval_results" / "hle.yaml").write_text("- dataset: {id: cais/hle, task_id: hle}\n  value: 44.9\n")
    press(source, out, "kimi", "output.shard_size=1MB", threads=1)
    assert (out / ".eval_results" / "hle.yaml").is_file(), (
        "side files travel; it is publishing that leaves this one out"
    )
    write_result(out, "evaluate", "fail", measured.EVALUATE)
    publishable = check_publishable(out)
    card = make_card(read_pressed_output(out), title="tiny", base_model="press/tiny-kimi")
    contents = stage(publishable, card.text, eval_results(card.facts, REPO))
    push(connect(), out, contents, publishable.digest, REPO, quiet=True)
    sent = hub.repositories[REPO].tree()
    assert [name for name in sent if name.startswith(".eval_results/")] == [".eval_results/gsm8k.yaml"]
    assert b"value: 93.56" in sent[".eval_results/gsm8k.yaml"].data
