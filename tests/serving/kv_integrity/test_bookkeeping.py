"""The plug-in on SGLang's own allocators, page table and radix tree, without a server. Everything comes from seeds.

These are slices; the whole run is in docs/concepts/kv-integrity.md with its figures and commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

InSGLang = Callable[..., list[dict[str, Any]]]
KINDS = {
    *("use_after_free", "reuse", "double_allocation", "double_free"),
    *("wrong_mapping", "swapped_pages", "missing_lock", "stale_tree"),
}


def test_random_operations_raise_no_alarm(in_sglang: InSGLang) -> None:
    for found in in_sglang("fuzz.py", "clean", "--operations", "1500", "--seed", "7"):
        assert found["operations"] == 1500
        assert found["false_alarms"] == 0, found
        assert found["leaked"] == 0, found
        assert found["prefix_hits"] > 100, "prefixes are shared"
        assert min(found["by_kind"].values()) >= 1
        assert found["requests_checked"] > 1500


def test_every_fault_is_caught_and_nobody_else_is_named(in_sglang: InSGLang) -> None:
    for found in in_sglang("fuzz.py", "faults", "--each", "5", "--seed", "11"):
        assert {one["kind"] for one in found["faults"]} == KINDS
        for one in found["faults"]:
            assert one["caught"] == one["made"] == 5, one
            assert one["bystanders_hit"] == 0, one


def test_after_a_fault_nobody_else_is_harmed_and_nothing_is_lost(in_sglang: InSGLang) -> None:
    for found in in_sglang("fuzz.py", "aftermath", "--page-size", "1", "4", "--each", "3", "--seed", "13"):
        for one in found["faults"]:
            assert one["ended"] == one["made"] == 3, one
            assert one["named_later"] == one["bad_free_lists"] == one["lost"] == one["still_suspect"] == 0, one


@pytest.fixture(scope="module")
def replayed(in_sglang: InSGLang) -> list[dict[str, Any]]:
    return in_sglang("replay.py")


@pytest.mark.parametrize(
    "bug",
    [
        *("sglang#38319", "sglang#27731", "sglang#38941", "sglang#38840", "sglang#25805", "sglang#35769"),
        *("vllm-ascend#13501", "TensorRT-LLM#15546"),
    ],
)
def test_a_public_bug_done_again_names_its_victims_only(bug: str, replayed: list[dict[str, Any]]) -> None:
    found = [one for one in replayed if one["bug"] == bug]
    assert len(found) == 2, "both ways of keeping a free list"
    for one in found:
        assert one["named"]
        assert all(one["named"]), one
        assert not any(one["hit"]), one


def test_the_triton_kernel_gives_the_answers_of_its_torch_twin(in_sglang: InSGLang) -> None:
    (found,) = in_sglang("kernels.py", "--rounds", "25", TRITON_INTERPRET="1")
    assert found["differing"] == 0
    assert 0 < found["wrong"] < found["compared"]
