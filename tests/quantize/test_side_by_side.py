"""Problems side by side, each with one BLAS thread; and the one switch for products that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from moepress.quantize.products import exact_products, products_in
from moepress.quantize.side_by_side import at_most, in_windows, one_blas_thread, side_by_side, width, width_on


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    with at_most(3):
        yield


def switch() -> str:
    said: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return said


@pytest.mark.parametrize("threads", [None, 1, 2, 8])
def test_results_come_in_the_order_of_the_problems(threads: int | None) -> None:
    assert side_by_side(lambda n: n * n, range(20), threads) == [n * n for n in range(20)]
    assert side_by_side(lambda n: n, [], threads) == []


def test_every_problem_sees_one_thread_and_torch_has_its_own_back_afterwards() -> None:
    assert set(side_by_side(lambda _: torch.get_num_threads(), range(9))) == {1}
    assert side_by_side(lambda _: torch.get_num_threads(), [0]) == [1]
    assert torch.get_num_threads() == 3
    with one_blas_thread():
        assert torch.get_num_threads() == 1
        assert width() == 3, "so many problems, with one thread each"
    with at_most(2):
        assert width() == 2
    assert width() == 3


def test_every_problem_has_the_grad_mode_of_its_caller() -> None:
    """torch's is the thread's own, and a new thread's is on."""
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert side_by_side(lambda _: torch.is_grad_enabled(), range(4)) == [mode] * 4


def test_problems_inside_a_problem_wait_for_each_other() -> None:
    """Threads of threads would be more than there are processors."""

    def outer(_: int) -> tuple[int, set[str]]:
        return width(), set(side_by_side(lambda _: threading.current_thread().name, range(4)))

    for inside, names in side_by_side(outer, range(3)):
        assert inside == 1
        assert len(names) == 1


def test_a_device_computes_one_problem_after_the_other() -> None:
    assert width_on("cuda:0") == 1
    assert width_on(torch.device("cpu")) == 3


def test_the_first_problems_error_is_raised_and_threads_are_given_back() -> None:
    def fails(n: int) -> int:
        if n in (2, 5):
            raise ValueError(f"problem {n}")
        return n

    with pytest.raises(ValueError, match="problem 2"):
        side_by_side(fails, range(8))
    assert torch.get_num_threads() == 3


def test_windows_hold_as_many_as_run_at_once() -> None:
    assert [list(some) for some in in_windows(range(7))] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(some) for some in in_windows(range(3), 2)] == [[0, 1], [2]]


def test_products_switched_in_threads_are_as_before_when_the_last_is_done() -> None:
    before = switch()
    meet = threading.Barrier(3)

    def one(_: int) -> str:
        with products_in("mixed"):
            meet.wait(10)
            return switch()

    assert side_by_side(one, range(3)) == ["bf16"] * 3
    assert switch() == before
    with products_in("mixed"):
        assert side_by_side(one, range(3)) == ["bf16"] * 3
        assert switch() == "bf16"
        with exact_products():
            assert switch() == "ieee"
        assert switch() == "bf16"
    assert switch() == before


def test_two_kinds_of_products_at_once_are_a_mistake_that_is_told() -> None:
    """The switch is the process's: one thread would silently compute with the other's."""

    def other(_: int) -> None:
        with exact_products():
            pass

    with products_in("mixed"), pytest.raises(RuntimeError, match="while another thread multiplies"):
        side_by_side(other, range(2), 2)
