"""What the guard does with a wrong request, asked one thing at a time on SGLang's own requests (`sglang_side/guard.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]


@pytest.fixture(scope="module")
def answers(in_sglang: Callable[..., list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {answer["name"]: answer for answer in in_sglang("guard.py")}


def test_a_wrong_request_reads_the_padding_row_and_writes_the_padding_page(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["decode_is_pointed_at_the_padding_row"]
    assert found["bad_row"] != 0
    assert found["rows"] == [0, found["good"][0]]
    assert found["slots"] == [0, found["good"][1]]
    assert found["table_unchanged"]


def test_a_wrong_prefill_writes_nothing_and_its_own_pages_are_marked(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["prefill_writes_nothing_and_leaves_a_mark"]
    assert found["wrong"] == [True, False]
    assert found["slots"] == [0] * 6 + found["good_slots"]
    assert found["marks"] == [1, 1]
    assert found["marks_elsewhere"] == 0
    assert answers["a_request_that_reads_marked_pages_is_named"]["named"] == [True, False]


def test_an_ended_request_shows_what_it_had_before_and_its_neighbour_goes_on(
    answers: dict[str, dict[str, Any]],
) -> None:
    found = answers["what_an_ended_request_looks_like"]
    assert found["ended"] == found["is"]
    assert found["finish"]["status_code"] == 500
    assert found["finish"]["err_type"] == "KVIntegrityError"
    assert found["appended"] == 1, "SGLang appends the token of the forward"
    assert found["visible_is_what_was_before"], "and does not send it"
    assert found["good_goes_on"]
    assert found["lost"] == 0, "it gave back its own page, not the one its row named"
    status = found["status"]
    assert (status["active"], status["checks"], status["aborted"]) == (True, 1, 1)
    assert status["violations"] == {"page_mismatch": 1}


def test_observe_counts_once_and_changes_nothing(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["observing_changes_nothing"]
    assert found["ended"] == []
    assert found["rows"]
    assert found["finish"]
    assert not found["suspect"]
    assert found["violations"] == {"page_mismatch": 1}


def test_a_chunked_prompt_is_ended_before_its_next_chunk(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["a_chunked_prompt_is_ended_between_its_chunks"]
    assert found["pending"]
    assert found["reason"] == "KVIntegrityError"
    assert found["kept_out_of_the_tree"]


def test_what_is_not_covered_is_refused_by_name_all_at_once(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["what_is_refused"]
    assert found["covered"] == []
    everything = "\n".join(found["everything"])
    for name in (
        *("unified memory", "recurrent state", "LMCache", "device npu", "disaggregation", "speculative decoding"),
        *("PD multiplexing", "diffusion", "embedding", "encoder-decoder"),
    ):
        assert name in everything, name
    assert found["hisparse"] == ["hisparse: logical pages that move between device and host"]
    assert found["page_interleave"] == ["page_interleave: pages sharded over ranks"]
    assert found["unheard_of"] == ["allocator TomorrowsAllocator: unknown"]
    assert "Beam search" in found["beam"]


def test_the_self_check_names_a_missing_target_and_another_signature(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["what_the_self_check_says"]
    assert found["in_place"] == []
    assert found["problems"] == []
    assert "alloc_extend takes (self prefix_lens prefix_lens_cpu" in found["changed"][0]
    assert "no_such_method is not there" in found["gone"][0]
    assert "no_such_module" in found["gone"][1]


def test_ranks_of_a_group_decide_alike(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["ranks_decide_alike"]["wrong"] == [[True, False], [True, False]], "the fault is in rank 1 only"
