"""What fuzzing found, by name; and a short seeded part of every campaign (`fuzz`), within its bounds of time and memory."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz import small
from fuzz.texts import BOMB
from moepress.convert.receipts import PUBLISHED_RECEIPTS, published_receipts, weight_records
from moepress.convert.run import convert
from moepress.errors import CheckpointError, ConvertError, FormatError, MoepressError, RecipeError
from moepress.formats.architecture import expected_weights
from moepress.formats.header import parse_header
from moepress.formats.module_patterns import module_pattern
from moepress.formats.source_quantization import parse_source_quantization
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.formats.handwritten import shard_bytes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "cases"), [("headers", 5000), ("texts", 500), ("tokenizers", 200), ("checkpoints", 60)]
)
def test_a_short_seeded_part_of_each_campaign_finds_nothing(campaign: str, cases: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", campaign, "--cases", str(cases), "--seed", "20261130"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases:,} cases" in done.stdout


def test_metadata_with_half_a_character_is_refused_as_by_other_readers() -> None:
    raw = shard_bytes('{"__metadata__": {"format": "\\ud800"}}')
    with pytest.raises(FormatError, match="half a character"):
        parse_header(raw, file_bytes=len(raw), name="model.safetensors")


def test_a_half_character_in_the_configuration_is_carried_as_the_escape_it_was(tmp_path: Path) -> None:
    """JSON can hold it, UTF-8 cannot: the finishing files could not be written, after all the work."""
    folder = source(tmp_path / "src")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:-1] + ', "note": "\\ud800"}')
    convert(folder, tmp_path / "out", load_recipe("kimi-k2", ["serving.tensor_parallel=1"]), threads=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"
    assert verify(tmp_path / "out", folder, threads=1).problems == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("hidden_size", [64]),
        ("hidden_size", 64.5),
        ("moe_layer_freq", [1, 1]),
        ("moe_intermediate_size", {"a": 1}),
        ("n_routed_experts", 10**30),
        ("n_shared_experts", float("inf")),
        ("vocab_size", -1),
        ("q_lora_rank", "F4"),
        ("architectures", [{"a": 1}]),
        ("architectures", "DeepseekV3ForCausalLM"),
        ("mlp_layer_types", ["dense"]),
        ("mlp_layer_types", 7),
        ("vision_config", "none"),
        ("vision_config", {"vt_hidden_size": "x"}),
        ("vision_config", {"merge_kernel_size": 2}),
    ],
)
def test_a_field_of_the_configuration_that_is_no_number_it_can_be_is_named(field: str, value: Any) -> None:
    config = {**small.build("kimi").config, field: value}
    with pytest.raises(CheckpointError) as error:
        expected_weights(config)
    assert field in str(error.value)


def test_a_configuration_of_more_weights_than_any_model_has_is_refused_before_they_are_listed() -> None:
    config = {**small.build("kimi").config, "num_hidden_layers": 4000, "n_routed_experts": 60_000}
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"more than 1,000,000 weights"):
        expected_weights(config)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "line",
    [
        r"re:(a+)+$",
        r"re:(([a-z.0-9_]+)+)+!$",
        r"re:(?:a|.{1,9}){40}b",
        "re:[",
        "re:" + "(" * 300,
        "re:" + ".*" * 9,
        "re:" + "x" * 5000,
    ],
)
def test_a_pattern_that_is_none_or_may_take_for_ever_is_refused(line: str) -> None:
    with pytest.raises(CheckpointError, match="is not a pattern that can be used"):
        module_pattern(line)


@pytest.mark.parametrize(
    "line",
    [
        r"re:.*self_attn.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:(?:.*\.)?lm_head$",
        r"re:.*\.layers\.\d+\.mlp\.experts\.\d+\.(?:gate|up)_proj$",
    ],
)
def test_patterns_that_publishers_write_are_read(line: str) -> None:
    assert module_pattern(line)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("kimi", ("weight_block_size",), "²x32"),
        ("kimi", ("weight_block_size",), "9" * 5000 + "x32"),
        ("kimi", ("kv_cache_scheme",), 7),
        ("glm4", ("linear_fp8_config",), "x"),
        ("glm4", ("config_groups", "group_0", "input_activations"), "x"),
        ("packed", ("config_groups", "group_0", "weights", "group_size"), True),
        ("packed", ("ignore",), {"a": 1}),
    ],
)
def test_a_part_of_a_quantization_config_of_the_wrong_type_is_named(
    kind: str, path: tuple[str, ...], value: Any
) -> None:
    config = small.build(kind).config
    node = config["quantization_config"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(CheckpointError) as error:
        parse_source_quantization(config)
    assert "quantization_config" in str(error.value)


@pytest.mark.parametrize(
    "text",
    [BOMB.decode(), "weights: {num_bits: " + "9" * 10_000 + "}", "[" * 5000],
    ids=["anchors", "digits", "brackets"],
)
def test_a_recipe_that_grows_when_it_is_read_is_refused(text: str, tmp_path: Path) -> None:
    """Nine lines of anchors stand for a billion values, which an error message would write out."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert len(str(error.value)) < 20_000


@pytest.mark.parametrize(
    "receipt", [{}, {"weights": []}, {"weights": {"a": 1}}, {"weights": {"a": {"action": "quantize"}}}]
)
def test_a_receipt_without_what_everybody_reads_is_refused(receipt: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / ".moepress" / "receipts"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(receipt))
    with pytest.raises(ConvertError) as error:
        weight_records(tmp_path)
    assert "a.json" in str(error.value)


def test_published_receipts_that_unpack_without_end_are_refused(tmp_path: Path) -> None:
    """gzip announces a thousand times its own size; no more than a bound is ever unpacked."""
    block = gzip.compress(b" " * (1 << 24), 9)
    (tmp_path / PUBLISHED_RECEIPTS).write_bytes(block * 30)
    with pytest.raises(ConvertError, match="more than 200,000,000 bytes"):
        published_receipts(tmp_path)


def source(folder: Path, kind: str = "packed", **more: bytes) -> Path:
    for name, raw in (small.build(kind).whole() | more).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return folder


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "moepress_report.json", "model-00001-of-00001.safetensors"]
)
def test_verify_does_not_wait_for_a_pipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe("kimi-k2", ["serving.tensor_parallel=1"])
    convert(source(tmp_path / "src"), tmp_path / "out", recipe, threads=1)
    (tmp_path / "out" / name).unlink()
    os.mkfifo(tmp_path / "out" / name)
    problems = verify(tmp_path / "out", tmp_path / "src", threads=1).problems
    assert any(problem.startswith(f"{name}: is no regular file") for problem in problems)


class Marks:
    """Pickled, it makes a file when it is read back."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """Pickles under the usual names and Python beside the weights: carried, or left behind, and never read as code."""
    mark = tmp_path / "ran"
    code = f"import os\nos.mkdir({str(mark)!r})\n".encode()
    files = {
        f"{name}.py": code for name in ("modeling_kimi", "configuration_kimi", "tokenization_kimi", "sitecustomize")
    }
    files |= {
        name: pickle.dumps(Marks(mark)) for name in ("training_args.bin", "pytorch_model.bin", "scheduler.pt", "x.ckpt")
    }
    folder = source(tmp_path / "src", **files)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_kimi.Config", "AutoModelForCausalLM": "modeling_kimi.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "out", load_recipe("kimi-k2", ["serving.tensor_parallel=1"]), threads=1)
    assert verify(tmp_path / "out", folder, threads=1).problems == ()
    assert not mark.exists()
    assert (tmp_path / "out" / "modeling_kimi.py").read_bytes() == code


def test_nothing_in_the_package_reads_pickles() -> None:
    reads = re.compile(
        r"torch\.load\(|pickle\.loads?\(|np\.load\(.*allow_pickle=True|yaml\.unsafe_load|yaml\.load\([^)]*\)$"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "moepress").rglob("*.py")
        for line in path.read_text().splitlines()
        if reads.search(line) and "Loader=_StrictLoader" not in line and "ray.get(cloudpickle.loads(given))" not in line
    ]  # the exception: a reference that the run itself handed to its worker, as Ray sends all arguments
    assert not found


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/tmp/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", "x\x00.safetensors"],
)
def test_an_index_cannot_lead_outside_its_folder(shard: str, tmp_path: Path) -> None:
    folder = source(tmp_path / "src")
    index = json.loads((folder / small.INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], shard)
    (folder / small.INDEX).write_text(json.dumps(index))
    with pytest.raises(MoepressError, match="not a plain relative path"):
        convert(folder, tmp_path / "out", load_recipe("kimi-k2", ["serving.tensor_parallel=1"]), threads=1)
    assert not (tmp_path / "out").exists()
