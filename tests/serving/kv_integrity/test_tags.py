"""Tags, records and the check in plain torch, without SGLang: duplicates, parity, what is seen and what is not."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moepress.serving import kv_integrity
from moepress.serving.kv_integrity import SITE

PAGE = 4


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SITE))
    package = import_module("moepress_kv_integrity")
    for part in ("tags", "rows", "verify", "reporting"):
        import_module(f"moepress_kv_integrity.{part}")
    yield package
    for name in [name for name in sys.modules if name.startswith("moepress_kv_integrity")]:
        del sys.modules[name]


class Pool:
    """Two requests on a pool of 20 pages: row 1 has pages 3, 7, 5 (10 tokens), row 2 has pages 9, 2 (8 tokens)."""

    def __init__(self, plugin: ModuleType) -> None:
        self.plugin = plugin
        self.tags = plugin.tags.PageTags(20, PAGE, "cpu")
        self.record = plugin.rows.RowRecord(3, 24, self.tags)
        self.table = torch.zeros(3, 24, dtype=torch.int32)
        for row, pages, length in ((1, (3, 7, 5), 10), (2, (9, 2), 8)):
            slots = slots_of(*pages)[:length]
            self.tags.allocated(slots)
            self.table[row, :length] = slots.to(torch.int32)
            self.record.given_extend(row, 0, slots)

    def wrong(self) -> list[bool]:
        rows, lengths = torch.tensor([1, 2]), torch.tensor([10, 8])
        report = self.plugin.verify.verify_torch(self.table, rows, lengths, self.record, 10)
        return [column >= 0 for column in report[:, 0].tolist()]


def slots_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, page * PAGE + PAGE) for page in pages])


@pytest.fixture
def pool(plugin: ModuleType) -> Pool:
    made = Pool(plugin)
    assert made.wrong() == [False, False]
    return made


def test_a_page_given_back_in_one_list_twice_is_free_once_and_broken(pool: Pool) -> None:
    pool.tags.freed(torch.tensor([7, 7]))
    assert int(pool.tags.generation[7]) == 2
    assert int(pool.tags.poison[7]) == pool.plugin.tags.BROKEN
    assert pool.tags.events.tolist() == [0, 2, 0, 0]
    assert pool.wrong() == [True, False]


def test_a_page_handed_out_twice_in_one_list_serves_nobody(pool: Pool) -> None:
    pool.tags.allocated(torch.cat([slots_of(11), slots_of(11)]))
    assert int(pool.tags.generation[11]) % 2 == 0
    assert int(pool.tags.poison[11]) == pool.plugin.tags.BROKEN


def test_a_page_handed_out_while_in_use_expires_the_first_record(pool: Pool) -> None:
    pool.tags.allocated(slots_of(9))
    assert int(pool.tags.generation[9]) % 2 == 1
    assert pool.wrong() == [False, True]
    assert pool.tags.events.tolist() == [1, 0, 0, 0]


def test_decode_slots_inside_a_page_begin_nothing(pool: Pool) -> None:
    before = pool.tags.generation.clone()
    pool.tags.allocated(torch.tensor([5 * PAGE + 2, 2 * PAGE + 3]))
    assert torch.equal(pool.tags.generation, before)
    assert not pool.tags.poison.any()


def test_the_tree_takes_over_only_what_the_record_vouches_for(pool: Pool) -> None:
    held = pool.tags.adopted(torch.tensor([3, 9]), torch.tensor([1, 0], dtype=torch.int32))
    assert held.tolist() == [1, 0], "page 9 was not in the request's record: nobody vouches for it"
    pool.record.given_prefix(0, 8, slots_of(3, 9))
    report = pool.plugin.verify.verify_torch(pool.table, torch.tensor([0]), torch.tensor([1]), pool.record, 8)
    assert report[0, 0] == 0, "row 0 of the table does not name page 3"


def test_a_row_that_moves_to_the_trees_pages_is_right_afterwards(pool: Pool) -> None:
    pool.record.moved_to_tree(2, 0, slots_of(9))
    pool.record.given_prefix(1, PAGE, slots_of(9))
    pool.table[1, :PAGE] = slots_of(9).to(torch.int32)
    pool.record.moved_to_tree(1, 0, slots_of(9))
    assert pool.wrong() == [False, False]
    pool.tags.disowned(torch.tensor([9]))
    pool.tags.freed(torch.tensor([9]))
    assert pool.wrong() == [True, True]
    assert not pool.tags.events.any(), "the tree gave up its own page"


def test_pages_freed_under_the_tree_and_pages_that_the_tree_lost(pool: Pool) -> None:
    pool.record.moved_to_tree(2, 0, slots_of(9))
    pool.tags.freed(torch.tensor([9]))
    assert pool.tags.events.tolist() == [0, 0, 1, 0]
    pool.tags.disowned(torch.tensor([9]))
    assert pool.tags.events.tolist() == [0, 0, 1, 1]


def test_a_prefix_that_nobody_saw_the_tree_name_is_never_right(pool: Pool) -> None:
    pool.record.given_prefix(1, 8, None)
    assert pool.wrong() == [True, False]


def test_a_chunk_that_goes_on_in_another_page_is_never_right(pool: Pool) -> None:
    pool.record.given_extend(1, 10, torch.tensor([2 * PAGE + 2, 2 * PAGE + 3]))
    assert pool.wrong() == [True, False]


def test_an_ended_request_proves_its_own_pages_only(pool: Pool) -> None:
    pool.table[1, :PAGE] = slots_of(9).to(torch.int32)  # the row names a page of row 2
    assert pool.record.proven(1, 0, 10).tolist() == [3, 5, 7]
    pool.tags.freed(torch.tensor([7]))
    pool.tags.allocated(slots_of(7))
    assert pool.record.proven(1, 0, 10).tolist() == [3, 5], "7 is somebody else's by now"


def test_a_reset_forgets_everything(pool: Pool) -> None:
    pool.tags.freed(torch.tensor([3, 3]))
    pool.tags.cleared()
    assert not (pool.tags.generation & 1).any()
    assert not pool.tags.poison.any()
    assert pool.wrong() == [True, True], "old records fit nothing"


@pytest.mark.parametrize(("position", "seen"), [(0, True), (4, True), (9, True), (1, False), (6, False)])
def test_which_slots_of_a_row_are_looked_at(position: int, seen: bool, pool: Pool) -> None:
    """The first of every page and the newest; docs/concepts/kv-integrity.md says so."""
    pool.table[1, position] += 1
    assert pool.wrong() == [seen, False]


def test_one_rank_of_a_group_writes_the_line_and_all_count(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.LOG_VARIABLE, str(tmp_path / "lines"))
    for writes in (True, False):
        watch = SimpleNamespace(counters=plugin.reporting.Counters("enforce", 4), mode="enforce", writes=writes)
        plugin.reporting.violation(watch, "page_mismatch", request="r", position=8)
        assert watch.counters.violations == {"page_mismatch": 1}
    (line,) = (tmp_path / "lines").read_text().splitlines()
    assert json.loads(line).keys() == {"time", "mode", "kind", "request", "position"}


def test_bytes_read_are_twenty_a_page(plugin: ModuleType) -> None:
    assert plugin.verify.bytes_read([128 * 1024] * 64, 64) == 64 * (2048 * 20 + 4)


def test_the_plugin_imports_nothing_of_moepress() -> None:
    allowed = {"torch", "triton", "sglang", "prometheus_client", "moepress_kv_integrity", *sys.stdlib_module_names}
    for file in (SITE / "moepress_kv_integrity").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            assert {name.partition(".")[0] for name in names} <= allowed, f"{file.name}: {names}"


def test_both_sides_name_the_same_variables(plugin: ModuleType) -> None:
    for name in ("MODE_VARIABLE", "LOG_VARIABLE", "STATUS_KEY", "MODES"):
        assert getattr(kv_integrity, name) == getattr(plugin, name)


def test_a_mode_that_is_none_ends_the_process(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.MODE_VARIABLE, "on")
    with pytest.raises(SystemExit, match="'on' is none of off, observe, enforce, strict"):
        plugin.register()
    monkeypatch.setenv(plugin.MODE_VARIABLE, "off")
    monkeypatch.setenv(plugin.FAULTS_VARIABLE, "somewhere")
    with pytest.raises(SystemExit, match="FAULTS is set"):
        plugin.register()


def test_another_sglang_ends_the_process(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("sglang")
    other.__version__ = "0.5.24"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", other)
    monkeypatch.setenv(plugin.MODE_VARIABLE, "enforce")
    with pytest.raises(SystemExit, match=r"made for sglang 0\.5\.23, this is 0\.5\.24"):
        plugin.register()
