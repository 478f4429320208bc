"""Rows and explanations from given measurements; against real servers: test_validate.py."""

from __future__ import annotations

from moepress.serving.validation.figures import Figure
from moepress.serving.validation.headroom import Headroom, SideMemory

GIB = 2**30


def side(
    weights: float, parameters: dict[str, int], *, tokens: int = 100_000, planned: int | None = 101_000
) -> SideMemory:
    return SideMemory(
        weights=Figure(weights, "GiB"),
        parameters=parameters,
        kv_pool=Figure(10.0, "GiB"),
        kv_tokens=Figure(tokens, "tokens"),
        free=None,
        kv_dtype="float8_e4m3fn",
        predicted={"routed_expert": 45 * GIB, "attention": 5 * GIB},
        predicted_absorbed=GIB // 2,
        predicted_token=100_000,
        predicted_tokens=planned,
    )


def test_what_is_as_predicted_is_said_to_be() -> None:
    lines = Headroom(8, 8, side(51.0, {"routed_expert": 45 * GIB, "attention": 5 * GIB}), None).explained()
    assert lines[0] == "every component is within 1% of what plan predicts"
    assert lines[1] == "beside the parameters the server holds 1.00 GiB, of which kv_b_proj's absorbed copy 512.00 MiB"
    assert "107,374 B of KV cache, 100,000 B predicted" in lines[2]
    assert lines[3] == "100,000 tokens fit, 101,000 predicted"


def test_a_component_that_was_loaded_otherwise_has_a_name() -> None:
    """Attention in BF16 where FP8 was planned: the sum alone would not say where."""
    headroom = Headroom(8, 8, side(56.0, {"routed_expert": 45 * GIB, "attention": 10 * GIB}), None)
    assert headroom.explained()[0] == "attention: 10.00 GiB loaded, 5.00 GiB predicted"
    rows = headroom.rows()
    assert rows[0] == ("routed_expert", 45 * GIB, None, 45 * GIB)
    assert rows[1] == ("attention", 10 * GIB, None, 5 * GIB)


def test_the_baseline_stands_beside_it() -> None:
    mine = side(51.0, {"routed_expert": 45 * GIB, "attention": 5 * GIB}, planned=None)
    theirs = side(88.0, {"routed_expert": 80 * GIB, "attention": 5 * GIB})
    headroom = Headroom(8, 8, mine, theirs)
    assert headroom.rows()[0] == ("routed_expert", 45 * GIB, 80 * GIB, 45 * GIB)
    data = headroom.as_json()
    assert data["baseline"]["weights"] == {"value": 88.0, "unit": "GiB"}
    assert data["candidate"]["predicted"]["kv_tokens"] is None
    assert any("limited by --max-total-tokens" in line for line in data["explained"])
