"""Which servers, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.commands.contestants import Model, Serving, contestants
from moepress.errors import MoepressError
from moepress.evaluate.answers import Answers
from moepress.serving.tool_parsers import tool_call_flags
from tests.evaluate.served_model import ServedModel, serve
from tests.serving.conftest import sglang_python  # noqa: F401 - a fixture


class Silent:
    def start(self, label: str, total: int, done: int = 0) -> None: ...
    def add(self, count: int) -> None: ...


def meet(source: Model, candidate: Model, serving: Serving, tmp_path: Path) -> Any:
    with (
        Answers(tmp_path) as answers,
        contestants(source, candidate, serving, answers, work=tmp_path / "work", watcher=Silent()) as met,
    ):
        return met


def test_a_baseline_that_is_no_folder_needs_a_url(tmp_path: Path) -> None:
    source, candidate = Model("source", "org/model", None, None), Model("candidate", str(tmp_path), None, None)
    with pytest.raises(MoepressError, match="org/model is no folder") as failure:
        meet(source, candidate, Serving(), tmp_path)
    assert "--baseline-url" in str(failure.value)


def test_without_sglang_urls_are_named_as_the_other_way(tmp_path: Path) -> None:
    both = [Model(role, str(tmp_path), None, None) for role in ("source", "candidate")]
    with pytest.raises(MoepressError, match="no Python with SGLang found") as failure:
        meet(both[0], both[1], Serving(sglang_python=str(tmp_path / "python")), tmp_path)
    assert "--url URL --baseline-url URL" in str(failure.value)


def test_given_servers_are_told_apart_by_weights_and_not_by_port(tmp_path: Path) -> None:
    with serve(ServedModel(torch.nn.Identity(), None)) as one, serve(ServedModel(torch.nn.Identity(), None)) as other:
        first, second, stage = meet(
            Model("source", "org/model", one.url, None),
            Model("candidate", "org/model", other.url, "tiny"),
            Serving(),
            tmp_path,
        )
        assert stage is None
        assert (first.kind, first.identity == second.identity) == ("openai", True)
        third, _, _ = meet(
            Model("source", "org/another", one.url, None),
            Model("candidate", "org/model", other.url, None),
            Serving(),
            tmp_path,
        )
        assert third.identity != first.identity


def test_a_key_comes_from_a_variable_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(ServedModel(torch.nn.Identity(), None)) as server:
        both = [Model(role, "org/model", server.url, None) for role in ("source", "candidate")]
        with pytest.raises(MoepressError, match="THE_KEY is not set"):
            meet(both[0], both[1], Serving(api_key_variable="THE_KEY"), tmp_path)
        monkeypatch.setenv("THE_KEY", "secret")
        first, *_ = meet(both[0], both[1], Serving(api_key_variable="THE_KEY"), tmp_path)
        assert first.endpoint().api_key == "secret"


def test_families_have_their_parser() -> None:
    assert tool_call_flags({"model_type": "kimi_k2"}) == ("--tool-call-parser", "kimi_k2")
    assert tool_call_flags({"model_type": "llama"}) == ()


@pytest.mark.oracle
def test_sglang_knows_the_parsers(sglang_python: Path) -> None:  # noqa: F811
    """Read from the file of the installed SGLang; nothing is imported."""
    from moepress.serving.tool_parsers import TOOL_CALL_PARSERS

    (file,) = sglang_python.parents[1].glob(
        "lib/python3*/site-packages/sglang/srt/function_call/function_call_parser.py"
    )
    text = file.read_text()
    for parser in TOOL_CALL_PARSERS.values():
        assert f'"{parser}":' in text
