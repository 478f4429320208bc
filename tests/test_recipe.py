"""Recipes: strict, complete, every problem at once, overrides by path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moepress.errors import RecipeError
from moepress.recipe import load_recipe, parse_size, recipe_schema, shipped_recipes


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def problems(error: pytest.ExceptionInfo[RecipeError]) -> dict[str, str]:
    return dict(error.value.problems)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid_and_has_its_file_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description


def test_shipped_recipes_cover_the_families_of_the_mission() -> None:
    covered = {family for name in shipped_recipes() for family in load_recipe(name).families}
    assert {"deepseek_v3", "deepseek_v32", "kimi_k25", "glm4_moe", "glm_moe_dsa", "qwen3_moe"} <= covered


def problems_of(path: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    return problems(error)


def test_all_problems_are_reported_at_once_with_their_paths(tmp_path: Path) -> None:
    path = write(tmp_path, "name: Bad Name\nweights: {group_size: 48, wrong: 1}\noutput: {shard_size: 60GB}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, ["rest.attention=int8", "no-equals-sign"])
    found = problems(error)
    assert {"name", "families", "weights.group_size", "weights.wrong", "output", "rest.attention", "--set"} <= set(
        found
    )
    assert found["weights.wrong"].startswith("no such field; weights has algorithm, num_bits, group_size")
    for written, meant in (
        ("weights.groupsize", "weights.group_size"),
        ("group_size", "weights.group_size"),
        ("weights.calibration", "calibration"),
        ("weights.samples", "calibration.samples or kv_cache.samples"),
    ):
        assert problems_of(path, f"{written}=32")[written] == f"no such field; did you mean {meant}?"
    assert "48" in found["weights.group_size"]


def test_an_override_reaches_the_field_and_keeps_the_rest() -> None:
    recipe = load_recipe("kimi-k2", ["weights.group_size=64", "output.shard_size=200MB"])
    assert recipe.weights.group_size == 64
    assert recipe.output.shard_size == 200_000_000
    assert recipe.rest == load_recipe("kimi-k2").rest


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "just text",
        "",
        "a: [1,\n",
        "name: x\nname: y\n",
        "? [a, b]\n: 1\n",
        "!!python/object/apply:os.system ['true']",
    ],
)
def test_what_is_no_recipe_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, text))
    assert str(tmp_path) in str(error.value)


def test_a_repeated_field_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'weights' is given twice"):
        load_recipe(write(tmp_path, "name: a\nfamilies: [x]\nweights: {group_size: 32}\nweights: {group_size: 64}\n"))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(RecipeError, match="kimi-k2"):
        load_recipe("kimi-k3")


def test_the_router_cannot_be_named_as_a_target(tmp_path: Path) -> None:
    """AC-01: router, norms, embeddings and head are never targets; a recipe cannot even say it."""
    with pytest.raises(RecipeError) as error:
        load_recipe(
            write(tmp_path, "name: a\nfamilies: [deepseek_v3]\nrest: {router: int4, lm_head: int4, norm: bf16}\n")
        )
    assert {"rest.router", "rest.lm_head", "rest.norm"} <= set(problems(error))


def test_asymmetric_experts_are_refused() -> None:
    """I4-06: servers do not load zero points for experts."""
    with pytest.raises(RecipeError) as error:
        load_recipe("kimi-k2", ["weights.symmetric=false"])
    assert "weights.symmetric" in problems(error)


def test_shards_stay_below_the_limit_of_the_hub() -> None:
    """HB-06: 50 GB, decimal; 47 GiB would be above it."""
    assert parse_size("47GiB") > 50_000_000_000
    with pytest.raises(RecipeError, match="below 50GB"):
        load_recipe("kimi-k2", ["output.shard_size=47GiB"])
    assert load_recipe("kimi-k2").output.shard_size == 5_000_000_000


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("4.5 GiB", 4831838208), ("1000000", 10**6), (7, 7)])
def test_sizes_are_decimal_or_binary_as_written(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5 gigs", "-1GB", "", "GB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size", ["5GB", "4GiB", "1500MB", "768MiB", "1B"])
def test_a_recipe_writes_sizes_as_people_do(size: str) -> None:
    shown = load_recipe("kimi-k2", [f"calibration.memory={size}"]).model_dump(mode="json")
    assert shown["calibration"]["memory"] == size


def test_canonical_json_ignores_spelling_and_sees_meaning(tmp_path: Path) -> None:
    a = write(tmp_path, "name: a\nfamilies: [deepseek_v3]\n")
    first = load_recipe(a).canonical_json()
    (tmp_path / "b.yaml").write_text("families:\n  - deepseek_v3\nname: a\nweights:\n  group_size: 32\n")
    assert load_recipe(str(tmp_path / "b.yaml")).canonical_json() == first
    assert load_recipe(a, ["weights.group_size=64"]).canonical_json() != first


def test_the_schema_is_json_and_names_every_section() -> None:
    schema = json.loads(json.dumps(recipe_schema()))
    assert {"weights", "rest", "mtp", "serving", "output", "limits"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_a_folder_called_like_a_shipped_recipe_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`convert SRC prefill --recipe prefill`, and afterwards `validate prefill --recipe prefill`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefill").mkdir()
    assert load_recipe("prefill").keeps_experts
    (tmp_path / "mine").mkdir()
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe("mine")
