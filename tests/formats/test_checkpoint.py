"""Checkpoints: index, headers and disk must say one thing; everything beside the weights travels or is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from handwritten import entry, shard_bytes
from safetensors.torch import load_file, save_file

from moepress.errors import CheckpointError, FormatError, MoepressError
from moepress.formats.checkpoint import LocalFolder, open_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4999819336\n"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_checkpoint(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """A checkpoint written by the safetensors library, with its index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"model_type": "kimi_k2", "num_hidden_layers": 2})
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    total = sum(t.numel() * t.itemsize for tensors in shards.values() for t in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards; lm_head equals embed byte for byte, and is not tied."""
    embed = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    return write_checkpoint(
        tmp_path / "kimi",
        {
            FIRST: {
                "model.embed_tokens.weight": embed,
                "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn),
                "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1, 1),
            },
            SECOND: {"lm_head.weight": embed.clone(), "model.norm.weight": torch.ones(8, dtype=torch.bfloat16)},
        },
    )


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    write_json(folder / INDEX, index)


def refusal(folder: Path | str) -> MoepressError:
    with pytest.raises((CheckpointError, FormatError)) as refused:
        open_checkpoint(folder)
    return refused.value


# ---- what is right


def test_a_sharded_checkpoint_opens_with_every_tensor_in_reading_order(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["model_type"] == "kimi_k2"
    assert tuple(checkpoint.shards) == (FIRST, SECOND)
    places = [(ref.shard, ref.start) for ref in checkpoint.tensors.values()]
    assert places == sorted(places)
    assert checkpoint.total_bytes == 128 + 64 + 4 + 128 + 16
    assert checkpoint.warnings == ()
    assert checkpoint.path(FIRST) == folder / FIRST


def test_equal_and_tied_looking_tensors_keep_their_own_names(folder: Path) -> None:
    """ST-14: lm_head equals embed byte for byte; both stay, with their own bytes."""
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.tensors) == {*load_file(folder / FIRST), *load_file(folder / SECOND)}
    head, embed = checkpoint.tensors["lm_head.weight"], checkpoint.tensors["model.embed_tokens.weight"]
    assert (head.shard, embed.shard) == (SECOND, FIRST)
    assert head.nbytes == embed.nbytes == 128


def test_a_single_file_needs_no_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SECOND).unlink()
    (folder / FIRST).rename(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert tuple(checkpoint.shards) == ("model.safetensors",)
    assert checkpoint.warnings == ()


def test_shards_without_an_index_open_with_a_warning_when_their_numbers_are_complete(folder: Path) -> None:
    (folder / INDEX).unlink()
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.tensors) == 5
    assert "no model.safetensors.index.json" in checkpoint.warnings[0]


def test_six_digit_shard_names_are_names_like_any_other(folder: Path) -> None:
    """IX-06: 'model-00001-of-000163' breaks patterns that assume five digits."""
    long = {FIRST: "model-00001-of-000002.safetensors", SECOND: "model-00002-of-000002.safetensors"}
    for old, new in long.items():
        (folder / old).rename(folder / new)
    edit_index(folder, lambda i: i.update(weight_map={k: long[v] for k, v in i["weight_map"].items()}))
    assert tuple(open_checkpoint(folder).shards) == tuple(long.values())
    (folder / INDEX).unlink()
    assert tuple(open_checkpoint(folder).shards) == tuple(long.values())


def test_the_generation_config_is_read_when_there_is_one(folder: Path) -> None:
    assert open_checkpoint(folder).generation_config is None
    write_json(folder / "generation_config.json", {"temperature": 0.6})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert "generation_config.json" in checkpoint.side_files


def test_headers_can_come_from_any_place_that_answers_ranges(folder: Path) -> None:
    """The seam for the Hub: names, sizes, text, ranges; the tensors themselves are not there."""

    class Remote:
        def list_files(self) -> dict[str, int]:
            return {path.name: path.stat().st_size for path in folder.iterdir()}

        def read_text(self, name: str) -> str:
            return (folder / name).read_text()

        def read_range(self, name: str, start: int, end: int) -> bytes:
            return (folder / name).read_bytes()[start:end]

    checkpoint = open_checkpoint("moonshotai/Kimi-K2-Instruct", files=Remote())
    assert checkpoint.tensors == open_checkpoint(folder).tensors
    with pytest.raises(CheckpointError, match="only its headers"):
        checkpoint.path(FIRST)


# ---- index, headers and disk


def test_a_missing_shard_is_listed_before_any_work(folder: Path) -> None:
    """IX-01: a server answers with garbage."""
    (folder / SECOND).unlink()
    error = refusal(folder)
    assert "1 of 2 shards" in error.what
    assert SECOND in error.what


@pytest.mark.parametrize(("size", "message"), [(-100, "100 bytes short"), (None, "an empty file")])
def test_a_truncated_shard_stops_the_opening_with_its_path(folder: Path, size: int | None, message: str) -> None:
    """ST-02."""
    raw = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(raw[:size] if size else b"")
    error = refusal(folder)
    assert message in error.what
    assert str(folder / SECOND) in str(error)


def test_a_shard_that_is_an_lfs_pointer_is_named(folder: Path) -> None:
    """HB-01."""
    (folder / FIRST).write_text(POINTER)
    error = refusal(folder)
    assert "Git LFS pointer" in error.what
    assert "4,999,819,336 bytes" in error.what


def test_a_tokenizer_that_is_an_lfs_pointer_is_named(folder: Path) -> None:
    """HB-01, for the files beside the shards: they too are kept in LFS."""
    (folder / "tiktoken.model").write_text(POINTER)
    error = refusal(folder)
    assert "Git LFS pointers instead of files: tiktoken.model" in error.what


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"lm_head.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8)}, folder / FIRST)
    error = refusal(folder)
    assert "2 tensors are in two shards" in error.what
    assert f"lm_head.weight ({FIRST} and {SECOND})" in error.what


def test_tensors_that_only_the_index_knows_are_listed_up_to_five(folder: Path) -> None:
    edit_index(folder, lambda i: i["weight_map"].update({f"ghost.{n}": FIRST for n in range(7)}))
    error = refusal(folder)
    assert "7 tensors of the index are in no shard" in error.what
    assert "ghost.4" in error.what
    assert "and 2 more" in error.what
    assert "ghost.5" not in error.what


def test_tensors_that_only_a_shard_knows_are_listed(folder: Path) -> None:
    """IX-02: lines removed from the index together with nothing else."""
    edit_index(folder, lambda i: i["weight_map"].pop("model.norm.weight"))
    error = refusal(folder)
    assert f"1 tensors of the shards are not in the index: model.norm.weight ({SECOND})" in error.what


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(folder: Path) -> None:
    edit_index(folder, lambda i: i["weight_map"].update({"model.norm.weight": FIRST}))
    assert f"model.norm.weight (index: {FIRST}, found in {SECOND})" in refusal(folder).what


def test_a_shard_that_is_on_disk_but_not_in_the_index_is_a_second_checkpoint(folder: Path) -> None:
    """IX-02, IX-04: removed from the index with its shard left, or the index of another run."""
    stale = "model-00003-of-00030.safetensors"
    shutil.copy(folder / SECOND, folder / stale)
    assert stale in refusal(folder).what
    (folder / stale).rename(folder / "model.safetensors")
    assert "model.safetensors" in refusal(folder).what


def test_the_index_of_another_sharding_is_refused(folder: Path) -> None:
    """IX-04: 2 shards on disk, the index names the source's 10."""
    edit_index(
        folder,
        lambda i: i.update(
            weight_map={name: f"model-{n + 1:05}-of-00010.safetensors" for n, name in enumerate(i["weight_map"])}
        ),
    )
    assert "5 of 5 shards that the index names are not there" in refusal(folder).what


@pytest.mark.parametrize("total", [0, 999, "12", None])
def test_a_wrong_total_size_is_a_warning_and_nothing_more(folder: Path, total: Any) -> None:
    """IX-08: zero, the size of another dtype, text, absent."""

    def change(index: dict[str, Any]) -> None:
        index["metadata"] = {} if total is None else {"total_size": total}

    edit_index(folder, change)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.total_bytes == 340
    assert ["total_size" in warning for warning in checkpoint.warnings] == ([] if total is None else [True])
    edit_index(folder, lambda i: i.pop("metadata"))
    assert open_checkpoint(folder).warnings == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("<html>404</html>", "not JSON but an HTML page"),
        (POINTER, "not JSON but a Git LFS pointer"),
        ("[]", "a JSON list where an object is expected"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "a weight_map that is a list"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "the shard of 'a' is 1"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the same name twice: a"),
    ],
)
def test_an_index_that_is_none_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    error = refusal(folder)
    assert message in error.what
    assert INDEX in str(error)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "./x.safetensors", "a\\x.safetensors",
     "x.safetensors\n", "x\0.safetensors", "", "x.bin", "a//x.safetensors"],
)  # fmt: skip
def test_a_shard_name_that_leads_out_of_the_folder_is_refused(folder: Path, shard: str) -> None:
    edit_index(folder, lambda i: i["weight_map"].update({"lm_head.weight": shard}))
    assert "not a plain relative path" in refusal(folder).what


def test_shards_in_a_subfolder_are_read(folder: Path) -> None:
    (folder / "weights").mkdir()
    moved = {name: f"weights/{name}" for name in (FIRST, SECOND)}
    for old, new in moved.items():
        (folder / old).rename(folder / new)
    edit_index(folder, lambda i: i.update(weight_map={k: moved[v] for k, v in i["weight_map"].items()}))
    assert tuple(open_checkpoint(folder).shards) == tuple(moved.values())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "neither model.safetensors nor an index"),
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "lacks the numbers 2"),
        (["a.safetensors", "b.safetensors"], "2 .safetensors files and no"),
        (["model.safetensors", FIRST], "2 .safetensors files and no"),
        (["model-00001-of-00001.safetensors", "other-00001-of-00001.safetensors"], "2 .safetensors files and no"),
        (["model-1-of-00001.safetensors", "model-00001-of-00001.safetensors"], "of 1 shards 2 are here"),
    ],
)
def test_shards_without_an_index_that_prove_nothing_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    write_json(tmp_path / "config.json", {})
    for name in names:
        (tmp_path / name).write_bytes(shard_bytes({f"t.{name}": entry("U8", [1], 0, 1)}, b"\0"))
    assert message in refusal(tmp_path).what


def test_shards_that_hold_no_tensor_are_no_checkpoint(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    (tmp_path / "model.safetensors").write_bytes(shard_bytes({}))
    assert "no tensors in 1 shards" in refusal(tmp_path).what


# ---- the place itself


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no config.json"), ("{", "not JSON"), ("[1]", "a JSON list"), ("\udcff", "not UTF-8")],
)
def test_a_missing_or_broken_config_is_one_clear_error(folder: Path, text: str | None, message: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    error = refusal(folder)
    assert message in error.what
    assert str(folder) in str(error)


def test_a_gguf_folder_and_a_single_file_are_told_what_is_needed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kimi-00001-of-00002.GGUF").write_bytes(b"GGUF")
    assert "GGUF files cannot be converted" in str(refusal(tmp_path).hint)
    assert str(refusal(folder / "config.json").hint).endswith(str(folder))


def test_a_key_given_twice_in_the_config_is_a_warning(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": 1, "a": 2}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"a": 2}
    assert "'a' is there twice" in checkpoint.warnings[0]


def test_a_broken_generation_config_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json" in str(refusal(folder))


def test_a_missing_folder_and_a_hub_id_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(tmp_path / "nowhere")
    assert "no folder" in error.what
    assert "config.json" in str(error.hint)
    assert "moepress pull moonshotai/Kimi-K2-Instruct DIR" in str(refusal("moonshotai/Kimi-K2-Instruct").hint)


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    assert "is a file, not a checkpoint's folder" in refusal(folder / FIRST).what
    (folder / "link").symlink_to("gone")
    assert "a link to something that is gone" in refusal(folder / "link").what


@pytest.mark.parametrize("name", ["config.json", INDEX, SECOND])
def test_a_folder_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    error = refusal(folder)
    assert f"{name}: a folder where a file is expected" in error.what


def test_a_pipe_in_place_of_a_shard_is_refused_without_waiting_for_it(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    assert "a device, pipe or socket" in refusal(folder).what


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Permission checks do not apply to root; be nobody for the length of a test."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", INDEX, SECOND])
def test_a_file_without_permission_is_refused(folder: Path, name: str, request: pytest.FixtureRequest) -> None:
    for parent in [folder, *list(folder.parents)[:3]]:
        parent.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0 if path.name == name else 0o644)
    request.getfixturevalue("unprivileged")
    error = refusal(folder)
    assert name in error.what
    assert "Permission denied" in error.what


# ---- the Hub's cache


@pytest.fixture
def snapshot(folder: Path) -> Path:
    """The folder as a Hub cache keeps it: snapshots/REV full of links into blobs/."""
    cache = folder.parent / "models--moonshotai--Kimi-K2-Instruct"
    revision = cache / "snapshots" / "0123456789abcdef"
    revision.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (folder / "tiktoken.model").write_bytes(b"ranks")
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / f"{number:064}")
        (revision / path.name).symlink_to(f"../../blobs/{number:064}")
    return revision


def test_a_snapshot_of_links_into_blobs_is_a_checkpoint(snapshot: Path) -> None:
    checkpoint = open_checkpoint(snapshot)
    assert len(checkpoint.tensors) == 5
    assert checkpoint.side_files == ("tiktoken.model",)
    assert checkpoint.warnings == ()


def test_a_shard_whose_blob_was_removed_is_named(snapshot: Path) -> None:
    (snapshot / SECOND).resolve().unlink()
    error = refusal(snapshot)
    assert f"{SECOND}: a link to a file that is gone" in error.what
    assert "its blobs were removed" in error.what


def test_a_cache_folder_points_at_its_snapshots(snapshot: Path) -> None:
    assert "point at one of its snapshots" in str(refusal(snapshot.parent.parent).hint)


# ---- side files


def test_everything_beside_the_weights_travels(folder: Path) -> None:
    """SC-01: a copy list of known names loses the tokenizer of a Kimi."""
    wanted = ["LICENSE", "README.md", "chat_template.jinja", "docs/figures/a.png", "encoding_x.py", ".gitattributes",
              "tiktoken.model", "tokenization_x.py", "tokenizer_config.json", "vision/config.json"]  # fmt: skip
    left = [
        ".git/HEAD",
        ".cache/huggingface/x.metadata",
        ".moepress/journal.json",
        "sub/.cache/y",
        ".t.1-a.moepress-tmp",
    ]
    for name in wanted + left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.side_files) == sorted(wanted)
    assert checkpoint.warnings == ()


def test_index_and_config_never_travel(folder: Path) -> None:
    """IX-04: the right index, overwritten by a copy of the source's."""
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert open_checkpoint(folder).side_files == ()


def test_weights_in_other_formats_stay_and_are_named(folder: Path) -> None:
    others = ["pytorch_model.bin", "consolidated.00.pth", "kimi.GGUF", "original/model.safetensors", "lora.safetensors"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"w")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.side_files == ()
    assert "5 weight files are not part of the checkpoint" in checkpoint.warnings[0]
    assert "kimi.GGUF" in checkpoint.warnings[0]


def test_links_out_of_the_folder_stay_and_are_named(folder: Path) -> None:
    """A cloned repository may link to anything on this machine, and side files are published."""
    secret = folder.parent / "id_ed25519"
    secret.write_text("key")
    (folder / "notes.txt").symlink_to(secret)
    (folder / "etc").symlink_to("/etc")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "LICENSE").write_text("x")
    (folder / "COPYING").symlink_to("LICENSE")
    (folder / "loop").symlink_to("loop")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.side_files == ("COPYING", "LICENSE")
    (warning,) = checkpoint.warnings
    for name in ("etc", "gone.txt", "loop", "notes.txt"):
        assert name in warning


def test_a_shard_may_be_a_link_to_another_disk(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere.safetensors"
    (folder / SECOND).rename(elsewhere)
    (folder / SECOND).symlink_to(elsewhere)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.tensors) == 5
    assert checkpoint.warnings == ()


def test_a_file_name_that_is_not_text_is_refused(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("x")
    assert "cannot be printed" in refusal(folder).what


def test_listing_is_sorted_and_relative(folder: Path) -> None:
    (folder / "b").mkdir()
    (folder / "b" / "c.txt").write_text("four")
    listing = LocalFolder(folder).list_files()
    assert list(listing) == sorted(listing)
    assert listing["b/c.txt"] == 4
