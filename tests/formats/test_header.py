"""Headers: believed only when every byte is accounted for. The safetensors library is the judge of what we write."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from handwritten import entry, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import CheckpointError, FormatError, MoepressError
from moepress.formats.dtypes import DTYPES, nbytes
from moepress.formats.header import encode_header, fetch_header, file_order, parse_header, read_header

TWO = {"a": entry("F32", [1], 0, 4), "b": entry("BF16", [2, 2], 4, 12)}


def parse(raw: bytes):
    return parse_header(raw, file_bytes=len(raw), name="s.safetensors")


def refusal(raw: bytes) -> FormatError:
    with pytest.raises(FormatError) as refused:
        parse(raw)
    assert "s.safetensors" in refused.value.what
    return refused.value


# ---- what is right


def test_a_plain_header_is_read_with_absolute_positions() -> None:
    raw = shard_bytes({"__metadata__": {"format": "pt"}, **TWO}, bytes(12))
    header = parse(raw)
    assert [entry.name for entry in header.entries] == ["a", "b"]
    assert header.metadata == {"format": "pt"}
    assert header.data_start == len(raw) - 12
    second = header.entries[1]
    assert (second.dtype, second.shape, second.nbytes, second.numel) == ("BF16", (2, 2), 8, 4)
    assert (second.start, second.end) == (len(raw) - 8, len(raw))


def test_entries_come_in_file_order_whatever_the_order_in_the_json() -> None:
    raw = shard_bytes({"b": TWO["b"], "a": TWO["a"]}, bytes(12))
    assert [entry.name for entry in parse(raw).entries] == ["a", "b"]


def test_zero_size_tensors_are_kept_and_distinct() -> None:
    """ST-04, ST-05: several tensors of no bytes, at the start, between others and at the end."""
    header = {
        "none": entry("F32", [0], 0, 0),
        "also": entry("F32", [0], 0, 0),
        **TWO,
        "between": entry("BF16", [0, 16], 4, 4),
        "last": entry("I64", [3, 0], 12, 12),
    }
    found = {entry.name: entry.shape for entry in parse(shard_bytes(header, bytes(12))).entries}
    assert found == {"none": (0,), "also": (0,), "a": (1,), "b": (2, 2), "between": (0, 16), "last": (3, 0)}


def test_a_shard_without_tensors_is_a_shard() -> None:
    assert parse(shard_bytes({})).entries == ()


def test_an_fp4_header_shape_counts_values() -> None:
    """ST-07: [2, 8] in 8 bytes is right, [2, 7] is not."""
    assert parse(shard_bytes({"a": entry("F4", [2, 8], 0, 8)}, bytes(8))).entries[0].shape == (2, 8)
    assert "inside a byte" in refusal(shard_bytes({"a": entry("F4", [2, 7], 0, 7)}, bytes(7))).what


# ---- names


@pytest.mark.parametrize("ranges", [((0, 4), (4, 8)), ((0, 4), (0, 4))])
def test_a_repeated_tensor_name_is_refused_by_name(ranges) -> None:
    """ST-01: with two ranges the library speaks of an offset, with one range it accepts the file."""
    lines = ",".join('"lm_head.weight":' + json.dumps(entry("F32", [1], *r)) for r in ranges)
    error = refusal(shard_bytes("{" + lines + "}", bytes(ranges[1][1])))
    assert "same name twice" in error.what
    assert "'lm_head.weight'" in error.what


def test_a_field_given_twice_is_refused() -> None:
    line = '{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}'
    assert "same name twice" in refusal(shard_bytes(line, bytes(4))).what


@pytest.mark.parametrize(
    ("name", "message"),
    [("lm_head\0x", "control character"), ("a\n", "control character"), ("\x7f", "control character"), ("", "empty")],
)
def test_a_name_that_others_read_differently_is_refused(name: str, message: str) -> None:
    """ST-11: C readers stop at NUL and see another name."""
    assert message in refusal(shard_bytes({name: entry("F32", [1], 0, 4)}, bytes(4))).what
    with pytest.raises(FormatError, match=message):
        encode_header([(name, "F32", (1,))], {})


def test_half_a_surrogate_pair_is_no_name() -> None:
    assert "control character" in refusal(shard_bytes('{"\\ud800":' + json.dumps(entry("U8", [0], 0, 0)) + "}")).what


def test_the_reserved_name_is_refused_at_write_time() -> None:
    """ST-10: the library saves it, and nobody can read it again."""
    with pytest.raises(FormatError, match="__metadata__"):
        encode_header([("__metadata__", "F32", (1,))], {})
    with pytest.raises(FormatError, match="not an object of strings"):
        parse(shard_bytes({"__metadata__": entry("F32", [1], 0, 4)}, bytes(4)))


def test_a_name_listed_twice_is_refused_at_write_time() -> None:
    with pytest.raises(FormatError, match="listed twice"):
        encode_header([("a", "F32", (1,)), ("a", "F32", (1,))], {})


# ---- bytes that do not add up


def test_a_cut_off_shard_says_how_many_bytes_are_missing() -> None:
    """ST-02: before any work, with expected and found size, and what to do."""
    raw = shard_bytes({"a": entry("F32", [100], 0, 400)}, bytes(300))
    error = refusal(raw)
    assert "100 bytes short" in error.what
    assert f"{len(raw):,}" in error.what
    assert f"{len(raw) + 100:,}" in error.what
    assert "download" in str(error.hint)


def test_a_shard_cut_inside_its_header_says_so() -> None:
    """ST-02."""
    raw = shard_bytes(TWO, bytes(12))[:40]
    assert "ends inside its header" in refusal(raw).what


@pytest.mark.parametrize(("raw", "looks_like"), [(b"", "an empty file"), (bytes(4096), "zeros")])
def test_empty_and_zero_filled_shards_are_named(raw: bytes, looks_like: str) -> None:
    """ST-02: a 0-byte file, and one that was preallocated and never written."""
    error = refusal(raw)
    assert looks_like in error.what
    assert "download it again" in str(error.hint)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, "bytes 4..8 of the data belong to no"),
        ({"a": entry("F32", [1], 4, 8)}, 8, "a hole before 'a'"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, 8, "'a' and 'b' overlap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "overlap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [0], 2, 2)}, 4, "overlap"),
        ({"a": entry("F32", [1], 0, 4)}, 5, "1 bytes too long"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "hold 4 bytes, F32 [2] needs 8"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "hold -4 bytes"),
        ({"a": entry("F32", [1], -4, 0)}, 4, "data_offsets [-4, 0]"),
        ({"a": entry("F99", [1], 0, 4)}, 4, "tensor 'a': unknown dtype 'F99'"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "not a list of integers"),
        ({"a": entry("F32", [1.0], 0, 4)}, 4, "not a list of integers"),  # type: ignore[list-item]
        ({"a": {**entry("F32", [1], 0, 4), "extra": 1}}, 4, "instead of dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "instead of dtype, shape and data_offsets"),
        ({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0, 2, 4]}}, 4, "not [start, end]"),
        ({"a": {**entry("F32", [1], 0, 4), "dtype": ["F32"]}}, 4, "not a string"),
        ({"a": None}, 4, "has NoneType instead of"),
        ({"__metadata__": {"format": 1}}, 0, "not an object of strings"),
        ({"__metadata__": None}, 0, "not an object of strings"),
        ({"a": entry("U8", [2**62, 2**62], 0, 2**124)}, 4, "more elements"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_or_the_file_is_refused(header, data: int, message: str) -> None:
    assert message in refusal(shard_bytes(header, bytes(data))).what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":', "not JSON"),
        ('{"a":' + "[" * 100_000, "not JSON"),
        ('{"a":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,4]}}', "not JSON that can be read"),
        ('{"a":{"dtype":"F32","shape":[' + "9" * 4000 + '],"data_offsets":[0,4]}}', "does not fit 64 bits"),
        ('{"a":NaN}', "instead of dtype"),
        (b'{"\xff":1}', "not UTF-8"),
        ("{} x", "not JSON"),
    ],
)
def test_hostile_json_is_a_plain_refusal(text, message: str) -> None:
    assert message in refusal(shard_bytes(text, bytes(4))).what


def test_leading_space_is_refused_and_trailing_space_is_padding() -> None:
    assert parse(shard_bytes(json.dumps(TWO) + "      ", bytes(12))).metadata == {}
    assert "first byte" in refusal(shard_bytes("  " + json.dumps(TWO), bytes(12))).what


# ---- other files under a shard's name

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4999819336\n"
)


def test_an_lfs_pointer_is_named_with_the_real_size() -> None:
    """HB-01: a clone without LFS; the library says 'header too large'."""
    error = refusal(POINTER)
    assert "Git LFS pointer" in error.what
    assert "4,999,819,336 bytes" in error.what
    assert "git lfs pull" in str(error.hint)


def test_a_renamed_torch_file_is_named(tmp_path: Path) -> None:
    """ST-13 (a): both of torch's formats."""
    for new, looks_like in [(True, "zip archive"), (False, "Python pickle")]:
        path = tmp_path / "s.safetensors"
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=new)
        assert looks_like in refusal(path.read_bytes()).what


@pytest.mark.parametrize(
    ("raw", "looks_like"),
    [
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page"),
        (b"\n  <html>" + b" " * 600, "HTML page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML document"),
        (b'{"error":"Repository not found"}', "JSON document"),
        (b"Entry not found", "text that starts 'Entry not found'"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"\x1f\x8b\x08" + bytes(100), "gzip"),
        (b"\x93NUMPY\x01\0" + bytes(100), "numpy"),
        (bytes(257) + b"ustar" + bytes(300), "tar archive"),
        (random.Random(1).randbytes(1000), "would start with a header of"),
        (b"abc", "text that starts 'abc'"),
        (b"\x01\x02\x03", "not a safetensors file (3 bytes)"),
    ],
)
def test_other_files_are_named_for_what_they_are(raw: bytes, looks_like: str) -> None:
    """ST-13 (b): what the first eight bytes would make a huge length of."""
    assert looks_like in refusal(raw).what


def test_a_header_above_the_cap_is_refused() -> None:
    """ST-13 (c): a real header of 100,000,001 bytes, padded with spaces."""
    raw = shard_bytes("{}" + " " * 99_999_999)
    assert "the format allows 100,000,000" in refusal(raw).what


def test_a_claimed_length_is_not_believed_before_the_file_has_it() -> None:
    """Nothing is read past the file's end, and nothing is allocated for a length that it does not hold."""
    for claimed in (99_999_999, 2**40, 2**63, 2**64 - 1):
        raw = claimed.to_bytes(8, "little") + b'{"a":1}'
        asked: list[int] = []

        def read_range(start: int, end: int, raw: bytes = raw, asked: list[int] = asked) -> bytes:
            asked.append(end)
            return raw[start:end]

        tracemalloc.start()
        with pytest.raises(FormatError):
            fetch_header(read_range, file_bytes=len(raw), name="s")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert max(asked) <= len(raw)
        assert peak < 100_000


def test_a_long_header_takes_two_reads_and_a_short_one_takes_one() -> None:
    for count, reads in [(10, 1), (3000, 2)]:
        raw = encode_header([(f"model.layers.{i}.mlp.gate.weight", "U8", (0,)) for i in range(count)], {})
        asked: list[tuple[int, int]] = []

        def read_range(start: int, end: int, raw: bytes = raw, asked: list[tuple[int, int]] = asked) -> bytes:
            asked.append((start, end))
            return raw[start:end]

        assert len(fetch_header(read_range, file_bytes=len(raw), name="s").entries) == count
        assert len(asked) == reads


# ---- local files


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Permission checks do not apply to root; be nobody for the length of a test."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_local_file_is_read_and_its_errors_name_the_path(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(shard_bytes(TWO, bytes(12)))
    assert len(read_header(path).entries) == 2
    path.write_bytes(shard_bytes(TWO, bytes(11)))
    with pytest.raises(FormatError, match="1 bytes short") as short:
        read_header(path)
    assert str(path) in str(short.value)


def test_a_folder_or_nothing_in_a_shards_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("folder.safetensors", "missing.safetensors"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(tmp_path / name)


def test_a_shard_without_permission_is_refused(tmp_path: Path, unprivileged: None) -> None:
    with pytest.raises(CheckpointError, match="Permission denied"):
        read_header(Path("/etc/shadow"))


# ---- writing

NAMES = st.text('ab.0_/" \\{é漢😀', min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 6), max_size=3)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=8)


def listing(tensors) -> list[tuple[str, str, tuple[int, ...]]]:
    """Shapes made whole: a multiple of 4 where the type is narrower than a byte."""
    out = []
    for name, (dtype, shape) in tensors.items():
        if DTYPES[dtype].bits < 8:
            shape = [*shape, 4]
        out.append((name, dtype, tuple(shape)))
    return out


@pytest.mark.oracle
@settings(max_examples=60, deadline=None)
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_written_is_read_back_by_us_and_by_safetensors(tensors, metadata) -> None:
    ordered = file_order(listing(tensors))
    raw = encode_header(ordered, metadata)
    assert len(raw) % 8 == 0
    assert raw == encode_header(ordered, dict(reversed(metadata.items())))
    raw += bytes(sum(nbytes(dtype, shape) for _, dtype, shape in ordered))
    header = parse(raw)
    # Tensors of no bytes share their place with a neighbour, so only the others have an order to keep.
    solid = [(e.name, e.dtype, e.shape) for e in header.entries if e.nbytes]
    assert solid == [tensor for tensor in ordered if nbytes(tensor[1], tensor[2])]
    assert {(e.name, e.dtype, e.shape) for e in header.entries} == set(ordered)
    assert header.metadata == metadata
    theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(raw)}
    assert theirs == {name: (dtype, shape) for name, dtype, shape in ordered}


@settings(max_examples=60, deadline=None)
@given(TENSORS)
def test_every_tensor_starts_at_a_multiple_of_its_element_size(tensors) -> None:
    ordered = file_order(listing(tensors))
    assert sorted(ordered) == sorted(listing(tensors))
    raw = encode_header(ordered, {})
    size = len(raw) + sum(nbytes(dtype, shape) for _, dtype, shape in ordered)
    for found in parse_header(raw, file_bytes=size, name="s.safetensors").entries:
        assert found.start % DTYPES[found.dtype].alignment == 0


def test_an_experts_tensors_stay_together() -> None:
    """The converter streams packed words, scales and shape of one expert after another."""
    tensors = [
        (f"experts.{expert}.down_proj.{part}", dtype, shape)
        for expert in range(3)
        for part, dtype, shape in [
            ("weight_packed", "I32", (7168, 256)),
            ("weight_scale", "BF16", (7168, 64)),
            ("weight_shape", "I64", (2,)),
        ]
    ]
    assert file_order(tensors) == tensors


@pytest.mark.oracle
def test_files_of_the_safetensors_library_are_read() -> None:
    tensors = {
        "w": torch.zeros(3, 5, dtype=torch.float8_e4m3fn),
        "n": torch.zeros(5, dtype=torch.bfloat16),
        "b": torch.zeros(()),
    }
    header = parse(safetensors.torch.save(tensors, {"format": "pt"}))
    assert {(e.name, e.dtype, e.shape) for e in header.entries} == {
        ("w", "F8_E4M3", (3, 5)),
        ("n", "BF16", (5,)),
        ("b", "F32", ()),
    }


# ---- mutated headers


@pytest.mark.oracle
def test_a_mutated_header_is_read_or_refused_and_never_anything_else() -> None:
    """3,000 seeded mutations of bytes, digits and lengths. What we accept, the library reads the same way."""
    rng = random.Random(20240611)
    base = shard_bytes({"__metadata__": {"format": "pt"}, **TWO, "c": entry("F4", [2, 8], 12, 20)}, bytes(20))
    tokens = [
        b"0",
        b"-1",
        b"1e9",
        b"true",
        b"null",
        b"{",
        b"]",
        b'"',
        b"\\u0000",
        b"\xff",
        b"18446744073709551616",
        b",",
    ]
    accepted = 0
    for _ in range(3000):
        raw = bytearray(base)
        for _ in range(rng.randint(1, 2)):
            kind, at = rng.choice([0, 0, 0, 1, 2, 3, 4]), rng.randrange(len(raw))
            if kind == 0:
                raw[at] = rng.randrange(256)
            elif kind == 1:
                raw[at : at + rng.randint(1, 4)] = rng.choice(tokens)
            elif kind == 2:
                raw[at:at] = rng.choice(tokens)
            elif kind == 3:
                del raw[at:]
            else:
                raw[:8] = rng.choice([0, 1, 2, len(raw), max(0, len(raw) - 8), 2**31, 2**63]).to_bytes(8, "little")
            if not raw:
                break
        try:
            header = parse(bytes(raw))
        except MoepressError:
            continue
        accepted += 1
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(bytes(raw))}
        assert theirs == {e.name: (e.dtype, e.shape) for e in header.entries}
    assert accepted > 50  # some mutations only touch data or a letter of a name
