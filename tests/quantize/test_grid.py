"""The grid's own facts, and that every bad grid or shape is refused with the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from moepress.errors import QuantizeError
from moepress.quantize.decision import Fallback, Kept, Quantized
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import ZERO_GROUP_SCALE, Grid, dequantize, usable_scales


@pytest.mark.parametrize(("bits", "qmin", "qmax", "half"), [(3, -4, 3, 3.5), (4, -8, 7, 7.5), (8, -128, 127, 127.5)])
def test_range(bits: int, qmin: int, qmax: int, half: float) -> None:
    grid = Grid(bits)
    assert (grid.qmin, grid.qmax, grid.half_range) == (qmin, qmax, half)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (9, 32), (4, 16), (4, 0), (4, -2)])
def test_bad_grid_is_refused(bits: int, group: int) -> None:
    with pytest.raises(QuantizeError):
        Grid(bits, group)


def test_groups_must_fill_the_columns() -> None:
    assert Grid(4, 32).groups(96) == 3
    assert Grid(4, -1).groups(1408) == 1
    with pytest.raises(QuantizeError, match="96 columns cannot be cut into groups of 128") as failure:
        Grid(4, 128).groups(96)
    assert "32, -1" in str(failure.value)


def test_dequantize_is_exact_in_float32() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2).reshape(1, 32)
    scales = torch.tensor([[0.0123]]).bfloat16()
    assert torch.equal(dequantize(codes, scales).double(), codes.double() * scales.double())


def test_usable_scales_replaces_zero_and_subnormal() -> None:
    scales = usable_scales(torch.tensor([0.0, 1e-39, 2.0**-126, 0.5]))
    assert scales.tolist() == [ZERO_GROUP_SCALE, ZERO_GROUP_SCALE, 2.0**-126, 0.5]


def test_fidelity_adds_up() -> None:
    whole = Fidelity(1.0, 100.0, 0.5) + Fidelity(3.0, 300.0, 0.25)
    assert whole == Fidelity(4.0, 400.0, 0.5)
    assert math.isclose(whole.relative_error, 0.1)
    assert math.isclose(whole.sqnr_db, 20.0)


def test_fidelity_of_nothing_and_of_an_exact_result() -> None:
    assert Fidelity().relative_error == 0.0
    assert Fidelity(0.0, 5.0).sqnr_db == math.inf
    assert Fidelity(0.0, 5.0).as_json()["sqnr_db"] is None
    assert Fidelity(1.0, 0.0).relative_error == math.inf


def test_decisions_say_what_and_why() -> None:
    assert Kept("norm: a vector").as_json() == {"decision": "kept", "reason": "norm: a vector"}
    done = Quantized("gptq", Grid(4, 128), Fidelity(1.0, 100.0, 0.1), (("dampening_frac", 0.01),)).as_json()
    assert (done["decision"], done["group_size"], done["dampening_frac"]) == ("quantized", 128, 0.01)
    plain = Fallback("gptq", "rtn", "no positive definite Hessian at 1.0", Grid(), Fidelity()).as_json()
    assert (plain["decision"], plain["asked"], plain["method"]) == ("fallback", "gptq", "rtn")
