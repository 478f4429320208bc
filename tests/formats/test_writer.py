"""Writing: whole or not at all, the same bytes every time, in a few buffers; safetensors reads every file."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moepress.errors import CheckpointError, ConvertError, FormatError
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.dtypes import DTYPES
from moepress.formats.hashed_stream import BUFFER_BYTES
from moepress.formats.header import read_header
from moepress.formats.reader import TensorReader
from moepress.formats.tensor_bytes import byte_view, bytes_of, header_dtype, header_shape, torch_dtype
from moepress.formats.writer import ShardWriter, atomic_write_json, atomic_write_text, copy_file, write_index

TORCH_DTYPES = [dtype.name for dtype in DTYPES.values() if dtype.torch_name]
PT = {"format": "pt"}


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = torch_dtype(dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (size,), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


def listing(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, header_dtype(tensor), header_shape(tensor)) for name, tensor in tensors.items()]


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> ShardWriter:
    with ShardWriter(path, listing(tensors), PT) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])
    return writer


def attempt(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], *steps: Callable[[ShardWriter], None]) -> None:
    """A writer that takes these steps, for the steps that it refuses."""
    with ShardWriter(path, tensors, {}) as writer:
        for step in steps:
            step(writer)


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what is written


@pytest.mark.oracle
def test_safetensors_reads_the_same_tensors_for_every_dtype(tmp_path: Path) -> None:
    """ST-08: FP8, FP4, E8M0 and BF16 never pass through a numpy type. ST-04, ST-05: empty tensors stay."""
    tensors = {f"all.{dtype}": random_tensor(dtype, (5, 6)) for dtype in TORCH_DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 16), "also_empty": torch.empty(3, 0)}
    path = tmp_path / "s.safetensors"
    written = write_shard(path, tensors)
    with safe_open(path, "pt") as theirs:
        assert set(theirs.keys()) == set(tensors)
        assert theirs.metadata() == PT
        for name, tensor in tensors.items():
            found = theirs.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert np.array_equal(byte_view(found), byte_view(tensor))
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.file_bytes == path.stat().st_size == read_header(path).file_bytes
    assert only(tmp_path) == ["s.safetensors"]


def test_every_dtype_of_the_format_passes_through_as_bytes(tmp_path: Path) -> None:
    """ST-08: also those that torch lacks (F6)."""
    tensors = [(name, name, (2, 4)) for name in DTYPES]
    data = {name: os.urandom(8 * dtype.bits // 8) for name, dtype in DTYPES.items()}
    with ShardWriter(tmp_path / "s.safetensors", tensors, {}) as writer:
        for name in writer.order:
            writer.write(name, data[name])
    raw = (tmp_path / "s.safetensors").read_bytes()
    assert {e.name: raw[e.start : e.end] for e in read_header(tmp_path / "s.safetensors").entries} == data


def test_the_same_tensors_give_the_same_file(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, 3), "a": torch.zeros(5, dtype=torch.bfloat16), "c": torch.ones(7, dtype=torch.int8)}
    digests = {write_shard(tmp_path / f"{n}.safetensors", tensors).sha256 for n in range(3)}
    assert len(digests) == 1


def test_a_copied_shard_keeps_every_byte(tmp_path: Path) -> None:
    """ST-14: per-name copy of a library-written shard; tensors that are equal or were views stay apart."""
    embed = torch.randn(40, 8)
    save_file({"embed": embed, "lm_head": embed.clone(), "z": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    refs = checkpoint.tensors
    with (
        TensorReader(checkpoint) as reader,
        ShardWriter(tmp_path / "copy", [(r.name, r.dtype, r.shape) for r in refs.values()], PT) as writer,
    ):
        for name in writer.order:
            for chunk in reader.chunks(refs[name], 100):
                writer.write_chunk(name, chunk)
    with safe_open(tmp_path / "copy", "pt") as theirs:
        assert set(theirs.keys()) == set(refs)
        assert torch.equal(theirs.get_tensor("lm_head"), embed)


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6, dtype=torch.int32).reshape(2, 3),
        torch.arange(6, dtype=torch.int32).reshape(3, 2).T.contiguous().reshape(2, 3),
        torch.arange(12, dtype=torch.int32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(12, dtype=np.int32).reshape(2, 6)[:, ::2],
        np.arange(24, dtype=np.uint8),
        np.arange(24, dtype=np.uint8).tobytes(),
        bytearray(24),
        memoryview(np.arange(6, dtype=np.int32)),
    ],
)
def test_tensors_arrays_and_buffers_are_taken_as_they_are(tmp_path: Path, data) -> None:
    with ShardWriter(tmp_path / "s", [("w", "I32", (2, 3))], {}) as writer:
        writer.write("w", data)
    expected = data.contiguous().numpy().tobytes() if isinstance(data, torch.Tensor) else np.asarray(data).tobytes()
    assert (tmp_path / "s").read_bytes()[-24:] == expected


def test_small_and_large_writes_mix_across_buffers(tmp_path: Path) -> None:
    """A large tensor, and one in pieces below and above the gathering limit, between thousands of 16-byte tensors."""
    big = np.random.default_rng(0).integers(0, 256, 2 * BUFFER_BYTES + 4096, dtype=np.uint8)
    tensors = [(f"shape.{n}", "I64", (2,)) for n in range(2000)]
    tensors[1000:1000] = [("big", "U8", big.shape), ("whole", "U8", big.shape)]
    step = 999_983
    with ShardWriter(tmp_path / "s", tensors, {}) as writer:
        for n, name in enumerate(writer.order):
            if name == "big":
                for at in range(0, big.size, 2 * step):
                    writer.write_chunk(name, big[at : at + step // 2])
                    writer.write_chunk(name, big[at + step // 2 : at + 2 * step])
            elif name == "whole":
                writer.write(name, big)
            else:
                writer.write(name, np.array([n, n], dtype=np.int64))
    raw = (tmp_path / "s").read_bytes()
    found = {entry.name: raw[entry.start : entry.end] for entry in read_header(tmp_path / "s").entries}
    assert found["big"] == found["whole"] == big.tobytes()
    assert found["shape.0"] == bytes(16)
    assert found["shape.1999"] == np.array([2001, 2001]).tobytes()
    assert writer.sha256 == hashlib.sha256(raw).hexdigest()


def test_the_callers_memory_is_free_when_write_returns(tmp_path: Path) -> None:
    buffer = np.zeros(1 << 20, dtype=np.uint8)
    with ShardWriter(tmp_path / "s", [("w", "U8", (8 << 20,))], {}) as writer:
        for value in range(8):
            buffer[:] = value
            writer.write_chunk("w", buffer)
    data = np.frombuffer((tmp_path / "s").read_bytes()[-(8 << 20) :], dtype=np.uint8).reshape(8, -1)
    assert np.array_equal(data, np.repeat(np.arange(8, dtype=np.uint8)[:, None], 1 << 20, axis=1))


def test_memory_is_one_buffer_whatever_the_tensor(tmp_path: Path) -> None:
    chunk = np.zeros(1 << 20, dtype=np.uint8)
    tracemalloc.start()
    with ShardWriter(tmp_path / "s", [("w", "U8", (64 << 20,))], {}) as writer:
        for _ in range(64):
            writer.write_chunk("w", chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BUFFER_BYTES + (1 << 20)


def test_several_writers_run_side_by_side(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(300, 400) for n in range(4)}
    with ThreadPoolExecutor(6) as pool:
        written = list(pool.map(lambda n: write_shard(tmp_path / f"{n}.safetensors", tensors), range(12)))
    assert len({writer.sha256 for writer in written}) == 1
    assert len(only(tmp_path)) == 12


# ---- what is refused


def test_a_missing_tensor_is_refused_at_the_end_and_nothing_stays(tmp_path: Path) -> None:
    tensors: list[tuple[str, str, tuple[int, ...]]] = [(f"t{n}", "F32", (2,)) for n in range(8)]
    with pytest.raises(FormatError, match=r"7 tensors were not written: t1, t2, t3, t4, t5 and 2 more"):
        attempt(tmp_path / "s", tensors, lambda w: w.write("t0", torch.zeros(2)))
    with pytest.raises(FormatError, match=r"1 tensors were not written: t0; of the first 4 bytes came"):
        attempt(tmp_path / "s", tensors[:1], lambda w: w.write_chunk("t0", bytes(4)))
    assert only(tmp_path) == []


def test_writes_out_of_turn_are_refused_by_name(tmp_path: Path) -> None:
    two = [("a", "F32", (2,)), ("b", "F32", (2,))]
    path, zeros = tmp_path / "s", torch.zeros(2)
    with pytest.raises(FormatError, match="'b' is written out of order; due is 'a'"):
        attempt(path, two, lambda w: w.write("b", zeros))
    with pytest.raises(FormatError, match="'c' is not one of this shard's"):
        attempt(path, two, lambda w: w.write("c", zeros))
    with pytest.raises(FormatError, match="'a' is written out of order; due is nothing more"):
        attempt(path, two[:1], lambda w: w.write("a", zeros), lambda w: w.write("a", zeros))
    with pytest.raises(FormatError, match="was begun in parts"):
        attempt(path, two, lambda w: w.write_chunk("a", bytes(4)), lambda w: w.write("a", zeros))
    assert only(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), r"BF16 \[2, 3\] was given, the header says F32 \[2, 3\]"),
        (torch.zeros(3, 2), r"F32 \[3, 2\] was given"),
        (torch.zeros(2, 3, dtype=torch.complex128), "no dtype for torch.complex128"),
        (np.zeros((2, 3)), r"F64 \[2, 3\] was given"),
        (np.zeros((2, 3), dtype=">f4"), "byte-swapped float32"),
        (np.zeros(6, dtype=np.float32), r"F32 \[6\] was given"),
        (bytes(23), r"23 bytes came, F32 \[2, 3\] has 24"),
        (bytes(25), r"25 bytes came, F32 \[2, 3\] has 24"),
        (b"", r"0 bytes came"),
    ],
)
def test_data_that_is_not_what_the_header_says_is_refused(tmp_path: Path, data, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        attempt(tmp_path / "s", [("w", "F32", (2, 3))], lambda w: w.write("w", data))
    assert only(tmp_path) == []


def test_parts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    parts = [lambda w, size=size: w.write_chunk("w", bytes(size)) for size in (20, 8)]
    with pytest.raises(FormatError, match=r"8 bytes came after 20, F32 \[2, 3\] has 24"):
        attempt(tmp_path / "s", [("w", "F32", (2, 3))], *parts)


def test_names_that_nobody_can_read_again_are_refused_before_a_file_exists(tmp_path: Path) -> None:
    """ST-10, ST-11."""
    for name in ("__metadata__", "", "a\0b"):
        with pytest.raises(FormatError):
            ShardWriter(tmp_path / "s", [(name, "F32", (1,))], {})
    assert only(tmp_path) == []


def test_an_error_of_the_callers_passes_unchanged_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"before")

    def fail(writer: ShardWriter) -> None:
        writer.write_chunk("w", bytes(10 << 20))
        raise error

    for error in (ValueError("mine"), FileNotFoundError(2, "mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            attempt(tmp_path / "s", [("w", "F32", (1 << 22,))], fail)
        assert raised.value is error
    assert only(tmp_path) == ["s"]
    assert (tmp_path / "s").read_bytes() == b"before"


# ---- files


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    """The library writes 0600, which a server under another user cannot read."""
    old = os.umask(0o027)
    try:
        write_shard(tmp_path / "s.safetensors", {"a": torch.ones(1)})
        atomic_write_text(tmp_path / "t.txt", "x")
        source = tmp_path / "source.sh"
        source.write_text("x")
        source.chmod(0o777)
        copy_file(source, tmp_path / "copy.sh")
    finally:
        os.umask(old)
    for name in ("s.safetensors", "t.txt", "copy.sh"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_mapped_under_the_final_name_stays_as_it_was(tmp_path: Path) -> None:
    """CL-06: saving over a file that is still mapped as a source."""
    path = tmp_path / "s"
    path.write_bytes(b"before" * 1000)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        write_shard(path, {"a": torch.ones(1)})
        assert mapped[:6] == b"before"
    assert read_header(path).entries[0].name == "a"


def test_two_writers_of_one_name_never_share_a_temporary_file(tmp_path: Path) -> None:
    """CL-06, HB-04: the last to finish wins, with a whole file."""
    first = ShardWriter(tmp_path / "s", [("a", "F32", (2,))], {})
    second = ShardWriter(tmp_path / "s", [("b", "F32", (2,))], {})
    with first:
        with second:
            assert len(only(tmp_path)) == 2
            first.write("a", torch.zeros(2))
            second.write("b", torch.ones(2))
        assert read_header(tmp_path / "s").entries[0].name == "b"
    assert read_header(tmp_path / "s").entries[0].name == "a"
    assert only(tmp_path) == ["s"]


def test_a_killed_writer_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    """kill -9 in the middle: the temporary file that stays is none of the checkpoint's files."""
    code = """
import sys, time
from pathlib import Path
from moepress.formats.writer import ShardWriter
with ShardWriter(Path(sys.argv[1]) / "model.safetensors", [("w", "U8", (64 << 20,))], {}) as writer:
    writer.write_chunk("w", bytes(40 << 20))
    print("half", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "model.safetensors").exists()
    (left,) = only(tmp_path)
    assert left.startswith(".model.safetensors.")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).side_files == ()


# ---- disks that are full


def test_a_write_that_the_system_refuses_is_one_error_and_nothing_stays(tmp_path: Path) -> None:
    """HB-11, with the limit on file size as the disk: the refusal comes from the writing thread, in the middle."""
    code = """
import resource, sys
from pathlib import Path
from moepress.errors import ConvertError
from moepress.formats.writer import ShardWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
try:
    with ShardWriter(Path(sys.argv[1]) / "s", [("w", "U8", (100 << 20,))], {}) as writer:
        for _ in range(100):
            writer.write_chunk("w", bytes(1 << 20))
except ConvertError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "s: cannot be written: File too large" in done.stdout
    assert only(tmp_path) == []


TMPFS = ["unshare", "--map-root-user", "--mount", "sh", "-c"]


@pytest.fixture
def tmpfs(tmp_path: Path) -> str:
    """The command that makes ``tmp_path`` a disk of 2 MB, for the commands after it."""
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*TMPFS, mount], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs in a namespace of its own")
    return mount


@pytest.mark.parametrize(
    ("declared", "taken", "message"),
    [(4 << 20, 0, "are left in"), (1500 << 10, 1 << 20, "the disk is full")],
)
def test_a_full_disk_is_one_error_and_nothing_stays(tmp_path, tmpfs, declared: int, taken: int, message: str) -> None:
    """HB-11: found before the work when the size alone says so, else at the write that does not fit."""
    code = f"""
import os, sys
from pathlib import Path
from moepress.errors import ConvertError
from moepress.formats.writer import ShardWriter
folder = Path({str(tmp_path)!r})
try:
    with ShardWriter(folder / "s", [("w", "U8", ({declared},))], {{}}) as writer:
        (folder / "other").write_bytes(bytes({taken}))
        writer.write("w", bytes({declared}))
except ConvertError as error:
    print(error)
print(os.listdir(folder))
"""
    command = f"{tmpfs} && exec {sys.executable} -c '{code.replace(chr(39), chr(34))}'"
    done = subprocess.run([*TMPFS, command], capture_output=True, text=True, check=True)
    assert message in done.stdout
    assert "run the same command again" in done.stdout
    assert done.stdout.splitlines()[-1] == ("['other']" if taken else "[]")


def test_a_folder_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="No such file or directory"):
        write_shard(tmp_path / "gone" / "s", {"a": torch.ones(1)})
    with pytest.raises(ConvertError, match="No such file or directory"):
        atomic_write_text(tmp_path / "gone" / "t", "x")


def test_a_folder_in_the_files_place_is_one_error_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "s" / "x").mkdir(parents=True)
    with pytest.raises(ConvertError, match="s: cannot be written: Is a directory"):
        write_shard(tmp_path / "s", {"a": torch.ones(1)})
    assert only(tmp_path) == ["s"]


# ---- text, JSON, copies, the index


def test_json_is_sorted_readable_and_ends_with_a_newline(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "a.json", {"b": [1, 2.5], "a": {"é": None}})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text.startswith('{\n  "a": {\n    "é": null')
    assert text.endswith("}\n")
    atomic_write_json(tmp_path / "b.json", {"a": {"é": None}, "b": [1, 2.5]})
    assert (tmp_path / "b.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_has_no_word_for_is_refused_with_its_place(tmp_path: Path, value: float) -> None:
    with pytest.raises(FormatError, match=rf"r\.json\.units\[1\]\.error = {value}"):
        atomic_write_json(tmp_path / "r.json", {"a": 1, "units": [{}, {"error": value}]})
    assert only(tmp_path) == []


def test_text_replaces_a_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("before")
    with path.open() as before:
        atomic_write_text(path, "after\n")
        assert before.read() == "before"
    assert path.read_text() == "after\n"


def test_a_copy_is_the_content_and_its_digest(tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    (tmp_path / "blob").write_bytes(data)
    (tmp_path / "tiktoken.model").symlink_to("blob")
    digest = copy_file(tmp_path / "tiktoken.model", tmp_path / "out" / "sub" / "tiktoken.model")
    assert digest == hashlib.sha256(data).hexdigest()
    copied = tmp_path / "out" / "sub" / "tiktoken.model"
    assert not copied.is_symlink()
    assert copied.read_bytes() == data
    assert only(copied.parent) == ["tiktoken.model"]


def test_a_file_is_not_copied_onto_itself(tmp_path: Path) -> None:
    """CL-06: also through a link."""
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    for target in ("a", "b"):
        with pytest.raises(CheckpointError, match="copied onto itself"):
            copy_file(tmp_path / "a", tmp_path / target)
    assert (tmp_path / "a").read_text() == "x"


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    for name, message in [("folder", "a folder"), ("link", "is gone"), ("pipe", "a device, pipe"), ("none", "missing")]:
        with pytest.raises(CheckpointError, match=message):
            copy_file(tmp_path / name, tmp_path / "copy")
    (tmp_path / "a").write_text("x")
    with pytest.raises(ConvertError, match="cannot be written"):
        copy_file(tmp_path / "a", tmp_path / "a" / "b")
    assert not (tmp_path / "copy").exists()


def test_the_index_is_sorted_counts_parameters_and_opens(tmp_path: Path) -> None:
    """IX-08: total_size is bytes, total_parameters is what the packed words stand for."""
    shards = {
        "model-00001-of-00002.safetensors": {"z": torch.ones(2)},
        "model-00002-of-00002.safetensors": {"a": torch.ones(3)},
    }
    for name, tensors in shards.items():
        write_shard(tmp_path / name, tensors)
    atomic_write_json(tmp_path / "config.json", {})
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    write_index(tmp_path / "model.safetensors.index.json", weight_map, 20, 5)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 5, "total_size": 20}
    assert list(index["weight_map"]) == ["a", "z"]
    assert open_checkpoint(tmp_path).warnings == ()
    with pytest.raises(FormatError, match="not a plain relative path"):
        write_index(tmp_path / "i.json", {"a": "../x.safetensors"}, 1, 1)


def test_nothing_of_a_write_is_left_to_later(tmp_path: Path) -> None:
    """A writer's threads end with its block."""
    before = threading.active_count()
    write_shard(tmp_path / "s", {"a": torch.ones(1 << 20)})
    assert threading.active_count() == before


def test_bytes_are_written_while_another_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is being imported is in sys.modules, without its names."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert bytes_of(np.arange(4, dtype=np.uint8), dtype="U8", shape=(4,)).tolist() == [0, 1, 2, 3]
