"""A worker without Ray: what it says about where it lives, and that its answers depend on the question alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moepress.calibration.statistics import PooledMoments, finished_pool, pooled_moments
from moepress.cluster.messages import SentInputs, receive, receive_dense, routed_where_it_lies, send
from moepress.cluster.ray_executor import _few_each, _several_each
from moepress.cluster.shard_worker import WorkerStart, probe_file
from moepress.cluster.worker import Worker
from moepress.convert.calibrated.expert_block import LayerInputs
from moepress.convert.plan import make_plan
from moepress.formats.checkpoint import open_checkpoint
from moepress.quantize.hessian import panels
from moepress.quantize.products import products_in
from tests.pressing import recipe_for
from tests.tiny_checkpoints import build


@pytest.fixture
def start(tmp_path: Path) -> WorkerStart:
    source = build("kimi", tmp_path / "src")
    checkpoint = open_checkpoint(source.folder)
    out = tmp_path / "out"
    out.mkdir()
    return WorkerStart(checkpoint, make_plan(checkpoint, recipe_for("kimi")), out, threads=1)


def test_a_worker_that_does_not_see_the_output_says_so(start: WorkerStart) -> None:
    worker = Worker(0, start)
    assert "does not see the output folder" in worker.place("a word").problem
    probe_file(start.out).parent.mkdir()
    probe_file(start.out).write_text("a word")
    assert worker.place("a word").problem == ""
    assert "does not see the output folder" in worker.place("another run's word").problem
    assert worker.place(None).problem == ""


def test_a_worker_that_does_not_see_the_source_says_so(start: WorkerStart, tmp_path: Path) -> None:
    gone = dataclasses.replace(start.checkpoint, folder=tmp_path / "elsewhere", location=str(tmp_path / "elsewhere"))
    worker = Worker(0, dataclasses.replace(start, checkpoint=gone))
    assert "does not see the source" in worker.place(None).problem


def test_batches_may_be_asked_in_any_order(start: WorkerStart) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, start.checkpoint.config["hidden_size"], generator=generator)
    real = torch.ones(2, 8, dtype=torch.bool)
    first, second = Worker(0, start), Worker(1, start)
    batches = [(send(hidden[i : i + 2]), send(real), None) for i in (0, 2)]
    forwards = first.dense(1, batches)
    second.dense(2, batches[:1])
    backwards = [second.dense(1, [batch])[0] for batch in reversed(batches)][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        a, b = receive_dense(one), receive_dense(other)
        assert torch.equal(a.hidden, b.hidden)
        assert a.routed is not None
        assert b.routed is not None
        assert all(torch.equal(p, q) for p, q in zip(a.routed, b.routed, strict=True))


def test_a_worker_with_threads_gives_what_one_without_does(start: WorkerStart) -> None:
    """Batches and panels that are asked for together are computed side by side, one thread each."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, start.checkpoint.config["hidden_size"], generator=generator)
    real = torch.ones(2, 8, dtype=torch.bool)
    batches = [(send(hidden[i : i + 2]), send(real), None) for i in (0, 2, 4)]
    tokens = tuple(
        send(part) for part in (hidden.flatten(0, 1), torch.zeros(48, 1, dtype=torch.int32), torch.ones(48, 1))
    )
    before = torch.get_num_threads()
    try:
        alone, several = Worker(0, start), Worker(1, dataclasses.replace(start, threads=3))
        for one, other in zip(alone.dense(1, batches), several.dense(1, batches), strict=True):
            assert torch.equal(receive_dense(one).hidden, receive_dense(other).hidden)
        for panels in ([0], []):
            found = [worker.pooled(1, panels, *tokens, *tokens)[0] for worker in (alone, several)]
            assert torch.equal(receive(found[0]), receive(found[1]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.bool, torch.int64])
def test_tensors_travel_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 5, 2) * 9).to(dtype)
    sent = send(tensor.transpose(0, 1))
    sent.bits.setflags(write=False)
    back = receive(sent)
    assert back.dtype == dtype
    assert torch.equal(back, tensor.transpose(0, 1))
    back.zero_()  # owned: shared memory would end the process here


def test_blocks_are_cut_so_that_every_worker_has_several() -> None:
    blocks = _several_each([range(0, 40), range(40, 64)], 4)
    assert [e for block in blocks for e in block] == list(range(64))
    assert len(blocks) >= 2 * 4
    assert all(block.stop <= 40 or block.start >= 40 for block in blocks)


def test_outputs_are_asked_for_in_as_few_runs_as_their_size_allows() -> None:
    batches = [(at, at + 8) for at in range(0, 512, 8)]
    for outputs, runs in ((1 << 20, 8), (25 << 30, 16)):
        cut = _few_each(batches, 8, outputs)
        assert [batch for run in cut for batch in run] == batches
        assert len(cut) == runs
    assert _few_each(batches[:3], 8, 1 << 20) == [[batch] for batch in batches[:3]]


def test_second_moments_in_panels_are_those_made_at_once(start: WorkerStart) -> None:
    """Two panels and a rest: C = 1,100."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(300, 1100, generator=generator) for _ in range(2))
    expert, weight = torch.zeros(300, 1, dtype=torch.int32), torch.ones(300, 1)
    ours = (send(x), send(expert), send(weight))
    source = (send(y), send(expert), send(weight))
    routed = routed_where_it_lies(ours, num_experts=4, norm=None)
    theirs = routed_where_it_lies(source, num_experts=4, norm=None)
    with products_in(start.plan.recipe.calibration.precision):
        whole = pooled_moments(routed, source=theirs)
    gram = torch.zeros(1100, 1100)
    for panel in panels(1100):
        rows = receive(Worker(panel, start).pooled(0, [panel], *ours)[0])
        gram[panel : panel + len(rows), panel:] = rows
    cross = receive(Worker(0, start).pooled(0, [], *ours, *source)[0])
    parts = finished_pool(300, gram, cross)
    assert torch.equal(parts.gram, whole.gram)
    assert whole.cross is not None
    assert torch.equal(cross, whole.cross)


def test_where_nothing_is_calibrated_neither_torch_nor_transformers_is_imported() -> None:
    """Their import takes longer than a worker takes to round a gigabyte."""
    code = (
        "import sys; import moepress.cluster.shard_worker, moepress.cluster.ray_executor, moepress.cluster.ray_start;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_layers_inputs_arrive_whole() -> None:
    """All that is small travels: moments, the norm's factors, what errors of the outputs cost."""
    generator = torch.Generator().manual_seed(1)
    x, gram, cross, fisher = (torch.randn(8, 8, generator=generator) for _ in range(4))
    expert, weight = torch.zeros(8, 2, dtype=torch.int32), torch.rand(8, 2, generator=generator)
    for own, norm in ((fisher, torch.full((8,), 2.0)), (None, None)):
        tokens = [send(part) for part in (x, expert, weight)]
        routed = routed_where_it_lies(tokens, num_experts=4, norm=None if norm is None else send(norm))
        inputs = LayerInputs(routed, None, PooledMoments(8, gram, cross), own)
        there = SentInputs.of(inputs).with_tokens(tokens, (), "cpu")
        assert there.source is None
        assert (there.fisher is None) == (own is None)
        if own is not None:
            assert there.fisher is not None
            assert torch.equal(there.fisher, own)
        assert torch.equal(there.pooled.gram, gram)
        assert there.pooled.cross is not None
        assert torch.equal(there.pooled.cross, cross)
        assert torch.equal(there.ours.inputs(0, 8), x if norm is None else x / 2)
