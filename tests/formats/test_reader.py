"""Reading: the same bytes as safetensors for every dtype, from several threads, in bounded memory."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handwritten import entry, shard_bytes
from safetensors import safe_open
from safetensors.torch import save_file

from moepress.errors import CheckpointError, FormatError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.dtypes import DTYPES
from moepress.formats.reader import PIECE_BYTES, TensorReader
from moepress.formats.tensor_bytes import byte_view, torch_dtype

TORCH_DTYPES = [dtype.name for dtype in DTYPES.values() if dtype.torch_name]


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern, also those that are NaN; BOOL only true and false."""
    kind = torch_dtype(dtype)
    generator = torch.Generator().manual_seed(len(dtype) + sum(shape))
    size = torch.Size(shape).numel() * kind.itemsize
    raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).reshape(shape)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One tensor of every dtype that torch holds, one that takes several pieces, and the corners; two shards."""
    folder = tmp_path_factory.mktemp("checkpoint")
    first = {f"all.{dtype}": random_tensor(dtype, (6, 10)) for dtype in TORCH_DTYPES}
    first |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 16, dtype=torch.bfloat16), "one": torch.ones(1)}
    second = {"large": random_tensor("U8", (2 * PIECE_BYTES + 12345,)), "fused": random_tensor("BF16", (4, 6, 8))}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text("{}")
    return open_checkpoint(folder)


@pytest.fixture
def reader(checkpoint: Checkpoint) -> Iterator[TensorReader]:
    with TensorReader(checkpoint) as opened:
        yield opened


class Late(Checkpoint):
    """Its second shard is on its way until `arrived` is set."""

    arrived = threading.Event()
    asked = threading.Event()

    def path(self, name: str) -> Path:
        if name.startswith("model-00002"):
            self.asked.set()
            assert self.arrived.wait(30)
        return super().path(name)


def test_who_waits_for_a_shard_on_its_way_holds_up_nobody_else(checkpoint: Checkpoint) -> None:
    late = Late(**{field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)})
    with TensorReader(late) as reader, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.tensor, late.tensors["fused"])
        try:
            assert late.asked.wait(30)
            assert float(reader.tensor(late.tensors["scalar"])) == 2.5
            reader.read_ahead(late.tensors["scalar"])
            assert not waiting.done()
        finally:
            late.arrived.set()
        assert waiting.result().shape == (4, 6, 8)


@pytest.mark.oracle
def test_every_tensor_equals_what_safetensors_reads(checkpoint: Checkpoint, reader: TensorReader) -> None:
    """ST-04, ST-08: every dtype, a scalar and an empty tensor, bit for bit."""
    for ref in checkpoint.tensors.values():
        with safe_open(checkpoint.path(ref.shard), "pt") as theirs:
            expected = theirs.get_tensor(ref.name)
        found = reader.tensor(ref)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(byte_view(found), byte_view(expected))
        assert np.array_equal(reader.bytes(ref), byte_view(expected))


def test_a_tensor_is_owned_by_the_caller(checkpoint: Checkpoint, reader: TensorReader) -> None:
    ref = checkpoint.tensors["one"]
    reader.tensor(ref).zero_()
    assert reader.tensor(ref).item() == 1


@pytest.mark.parametrize("offset", [0, 1, PIECE_BYTES - 3, PIECE_BYTES + 7])
@pytest.mark.parametrize("length", [0, 1, 4096, PIECE_BYTES + 5000])
def test_any_range_of_a_tensor_lands_in_the_callers_memory(checkpoint, reader, offset: int, length: int) -> None:
    whole = reader.bytes(checkpoint.tensors["large"])
    out = np.full(length + 2, 7, dtype=np.uint8)
    reader.read_into(checkpoint.tensors["large"], out[1 : 1 + length], offset=offset)
    assert np.array_equal(out[1:-1], whole[offset : offset + length])
    assert (out[0], out[-1]) == (7, 7)


def test_a_matrix_or_a_memoryview_can_be_filled(checkpoint: Checkpoint, reader: TensorReader) -> None:
    ref = checkpoint.tensors["all.BF16"]
    matrix, view = np.empty((6, 20), dtype=np.uint8), bytearray(120)
    reader.read_into(ref, matrix)
    reader.read_into(ref, memoryview(view))
    assert matrix.tobytes() == bytes(view) == reader.bytes(ref).tobytes()


@pytest.mark.parametrize(("offset", "length"), [(0, 121), (120, 1), (-1, 5), (500, 1)])
def test_a_range_beyond_the_tensor_is_refused(checkpoint, reader, offset: int, length: int) -> None:
    with pytest.raises(FormatError, match=r"all\.BF16: bytes .* of a tensor of 120"):
        reader.read_into(checkpoint.tensors["all.BF16"], np.empty(length, dtype=np.uint8), offset=offset)


@pytest.mark.parametrize("name", [f"all.{dtype}" for dtype in TORCH_DTYPES] + ["fused"])
def test_a_band_of_rows_equals_the_slice(checkpoint: Checkpoint, reader: TensorReader, name: str) -> None:
    ref = checkpoint.tensors[name]
    whole = reader.tensor(ref)
    for r0, r1 in [(0, 2), (1, 4), (3, 3), (0, ref.shape[0])]:
        band = reader.rows(ref, r0, r1)
        assert band.shape == whole[r0:r1].shape
        assert band.dtype == whole.dtype
        assert np.array_equal(byte_view(band), byte_view(whole[r0:r1]))


@pytest.mark.parametrize(
    ("name", "r0", "r1"), [("all.F32", 0, 7), ("all.F32", -1, 2), ("all.F32", 3, 2), ("scalar", 0, 1)]
)
def test_rows_that_a_tensor_does_not_have_are_refused(checkpoint, reader, name: str, r0: int, r1: int) -> None:
    with pytest.raises(FormatError, match=f"{name}: rows {r0}..{r1}"):
        reader.rows(checkpoint.tensors[name], r0, r1)


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20, PIECE_BYTES + 1, 1 << 30])
def test_chunks_are_the_tensor_in_order(checkpoint: Checkpoint, reader: TensorReader, chunk_bytes: int) -> None:
    ref = checkpoint.tensors["large" if chunk_bytes > 4096 else "fused"]
    parts = [chunk.copy() for chunk in reader.chunks(ref, chunk_bytes)]
    assert all(part.nbytes == chunk_bytes for part in parts[:-1])
    assert np.array_equal(np.concatenate(parts), reader.bytes(ref))
    assert list(reader.chunks(checkpoint.tensors["empty"])) == []


def test_chunks_take_two_buffers_and_can_be_left_early(checkpoint: Checkpoint, reader: TensorReader) -> None:
    ref = checkpoint.tensors["large"]
    tracemalloc.start()
    for count, _ in enumerate(reader.chunks(ref, 1 << 20)):
        if count == 5:
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * (1 << 20)


def test_many_threads_read_many_tensors_through_one_descriptor_per_shard(checkpoint: Checkpoint) -> None:
    with TensorReader(checkpoint, threads=3) as reader, ThreadPoolExecutor(8) as callers:
        refs = list(checkpoint.tensors.values())
        expected = [reader.bytes(ref) for ref in refs]
        before = open_descriptors()
        found = list(callers.map(reader.bytes, refs * 20))
        assert open_descriptors() == before
    assert all(np.array_equal(part, expected[i % len(refs)]) for i, part in enumerate(found))


def test_closing_gives_the_descriptors_back(checkpoint: Checkpoint) -> None:
    before = open_descriptors()
    with TensorReader(checkpoint) as reader:
        for ref in checkpoint.tensors.values():
            reader.bytes(ref)
        assert open_descriptors() == before + 2
    assert open_descriptors() == before
    with pytest.raises(CheckpointError, match="the reader is closed"):
        reader.bytes(checkpoint.tensors["one"])


def test_an_f6_tensor_is_bytes_and_no_torch_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(shard_bytes({"w": entry("F6_E2M3", [2, 4], 0, 6)}, b"abcdef"))
    checkpoint = open_checkpoint(tmp_path)
    with TensorReader(checkpoint) as reader:
        assert reader.bytes(checkpoint.tensors["w"]).tobytes() == b"abcdef"
        with pytest.raises(FormatError, match="w: this torch has no type for F6_E2M3"):
            reader.tensor(checkpoint.tensors["w"])


# ---- a folder that changes underneath


@pytest.fixture
def fragile(tmp_path: Path) -> Checkpoint:
    save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return open_checkpoint(tmp_path)


def test_a_shard_that_was_replaced_is_refused_at_its_first_tensor(fragile: Checkpoint) -> None:
    save_file({"a": torch.zeros(10)}, fragile.path("model.safetensors"))
    with TensorReader(fragile) as reader, pytest.raises(CheckpointError, match="changed since its header was read"):
        reader.tensor(fragile.tensors["a"])


def test_a_shard_that_shrinks_while_it_is_read_is_an_error_and_no_crash(fragile: Checkpoint) -> None:
    with TensorReader(fragile) as reader:
        reader.tensor(fragile.tensors["a"])
        os.truncate(fragile.path("model.safetensors"), 4500)
        with pytest.raises(CheckpointError, match="inside b"):
            reader.tensor(fragile.tensors["b"])


def test_a_shard_that_disappears_is_an_error(fragile: Checkpoint) -> None:
    fragile.path("model.safetensors").unlink()
    with TensorReader(fragile) as reader, pytest.raises(CheckpointError, match="missing"):
        reader.tensor(fragile.tensors["a"])


def test_headers_without_tensors_say_how_to_get_them(fragile: Checkpoint) -> None:
    headers_only = replace(fragile, folder=None)
    with TensorReader(headers_only) as reader, pytest.raises(CheckpointError, match="only its headers are here"):
        reader.tensor(fragile.tensors["a"])
