"""The recipe: one YAML file that says what a conversion does, checked whole before a byte is read.

A recipe is strict (an unknown field is an error, never ignored), frozen (nobody changes it on the way) and complete
(every default is visible in ``moepress recipes show``). Its canonical JSON is part of the resume key, so two recipes that
mean the same thing press the same bytes.

    name: kimi-k2-int4
    families: [kimi_k2, deepseek_v3]
    weights: {algorithm: rtn, num_bits: 4, group_size: 32, scale: mse}
    rest:    {attention: source, shared_experts: source, dense_mlp: source, indexer: source}
    mtp:     {experts: quantize, rest: source}
    serving: {server: sglang, version: 0.5.23, layout: auto, tensor_parallel: 8}
    kv_cache: {scales: auto, headroom: 2}
    output:  {shard_size: 5GB}

Single fields are overridden on the command line by their path: ``--set weights.group_size=64``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from moepress.errors import RecipeError

GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes along a weight's input dimension; -1 is one group per row (compressed-tensors: strategy ``channel``)."""

MAX_SHARD_BYTES = 50_000_000_000
"""The Hub refuses files of 50 GB (decimal) and more; a shard has to stay below with its header."""

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?\s*$")
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``5GB`` (decimal) or ``4.5GiB`` (binary); a bare number is bytes.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text))
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 5GB or 4.5GiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def _size_text(value: int) -> str:
    for unit in ("TB", "GB", "MB", "kB"):
        if value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return f"{value}B"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_size_text, return_type=str)]


class Section(BaseModel):
    """Strict and frozen: the base of every part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Awq(Section):
    """What AWQ rescales before rounding. Without effect where the algorithm does not name it."""

    up_down: bool = Field(
        True, description="inside each expert: up's rows × s, down's columns ÷ s; touches nothing else"
    )
    norm: bool = Field(
        False,
        description="the norm before the experts ÷ s, every reader of it × s: router, shared experts (FP8 ones become "
        "BF16), all experts. s are powers of two, so nothing but the experts' rounding changes",
    )


class Weights(Section):
    """How the routed experts' matrices become integers."""

    algorithm: Literal["rtn", "gptq", "awq", "awq+gptq", "keep"] = Field(
        "rtn",
        description="rtn: round to nearest, needs no calibration; gptq: each column makes up for the errors before it; "
        "awq: up and down of each expert rescaled before rounding; awq+gptq: both; keep: experts stay as in the source, "
        "and KV scales alone are folded into the weights (for a prefill server)",
    )
    num_bits: Literal[4] = Field(4, description="bits per weight")
    group_size: Literal[32, 64, 128, -1] = Field(
        32, description="weights that share a scale, along the input; -1: the whole row"
    )
    symmetric: Literal[True] = Field(True, description="no zero points: SGLang and vLLM do not load asymmetric experts")
    scale: Literal["max", "mse"] = Field(
        "mse",
        description="max: the largest weight of a group sets its scale; mse: the scale of least squared error is searched",
    )
    signed_scales: bool = Field(
        False,
        description="a group's scale may be negative, which puts its largest positive weight on the code -8: less is lost, the "
        "files are as large. Off, because no GPU kernel has been seen taking such scales; needs scale: mse",
    )
    awq: Awq = Awq()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _signs_are_searched(self) -> Weights:
        if self.signed_scales and self.scale != "mse":
            raise ValueError(f"signed_scales needs scale: mse, which looks for the sign; scale is {self.scale}")
        return self

    @model_validator(mode="after")
    def _something_to_smooth(self) -> Weights:
        if "awq" in self.algorithm and not (self.awq.up_down or self.awq.norm):
            raise ValueError(f"algorithm is {self.algorithm}, and both awq.up_down and awq.norm are off")
        return self


class Calibration(Section):
    """The text that GPTQ and AWQ look at, and what they make of it. Without effect for rtn."""

    text: str = Field(
        "default", description="default (shipped), a .txt or .jsonl file, hub:NAME[:SUBSET][@SPLIT] of a dataset"
    )
    samples: int = Field(128, ge=1, description="samples")
    length: int = Field(512, ge=16, description="tokens a sample")
    seed: int = Field(0, description="order of documents and choice of windows")
    batch_size: int = Field(8, ge=1, description="samples a forward call; part of the result's last bits")
    precision: Literal["mixed", "float32", "bfloat16"] = Field(
        "mixed",
        description="what layers and Hessians multiply in; sums are float32 in all. mixed: float32, but factors of products "
        "are rounded to BF16 on processors that have units for it (AMX); bfloat16: activations too, for GPUs, where it is an "
        "order of magnitude quicker",
    )
    hessian: Literal["blend", "expert", "layer"] = Field(
        "blend",
        description="blend: each expert's own, shrunk towards the layer's where tokens are few; expert: its own alone; "
        "layer: one for all experts' gate and up, the fast mode",
    )
    router_weighted: bool = Field(False, description="weight tokens by the router's probability squared")
    error_aware: bool = Field(
        True, description="aim at what the source gave on its own inputs, not on the quantized prefix's"
    )
    passes: int = Field(
        3, ge=0, le=32, description="most passes of scale refit and coordinate descent, while the loss falls"
    )
    memory: Size = Field("4GiB", description="for the experts in work and their Hessians; one expert is always held")  # type: ignore[assignment]
    activations_memory: Size = Field("4GiB", description="for activations; more go to scratch files")  # type: ignore[assignment]


class Rest(Section):
    """What becomes of the other quantizable parts. Router, norms, embeddings, head and vision tower stay as in the source."""

    attention: Literal["source", "bf16"] = Field(
        "source", description="q, k, v, o projections (MLA: q_a, q_b, kv_a, kv_b, o)"
    )
    indexer: Literal["source", "bf16"] = Field("source", description="sparse-attention indexer (GLM-5, DeepSeek V3.2)")
    shared_experts: Literal["source", "bf16"] = Field("source", description="experts that every token passes")
    dense_mlp: Literal["source", "bf16"] = Field("source", description="feed-forward of the first, dense layers")


class Mtp(Section):
    """The multi-token-prediction layers that follow the last decoder layer."""

    experts: Literal["quantize", "source", "bf16"] = Field(
        "quantize", description="quantize: the same scheme as the body, which is what draft modules expect"
    )
    rest: Literal["source", "bf16"] = Field("source", description="the layer's attention, shared experts and eh_proj")


class Disaggregation(Section):
    """Prefill and decode on servers of their own. Changes no byte of the checkpoint, only `moepress serve`'s commands."""

    prefill_tensor_parallel: int | None = Field(
        None, ge=1, le=1024, description="GPUs of the prefill server; null: as many as decode"
    )
    transfer_backend: Literal["mooncake", "mooncake_tcp", "nixl"] = Field(
        "mooncake", description="what carries the KV cache across; mooncake_tcp: without RDMA"
    )
    kv_checksum: bool = Field(
        True, description="Adler-32 over each request's cached pages, made by prefill and checked by decode"
    )


class Serving(Section):
    """The server the files are made for: it decides names and layout, and what the plan refuses."""

    server: Literal["sglang", "vllm"] = "sglang"
    version: str = Field("0.5.23", pattern=r"^\d+\.\d+\.\d+$", description="exact: contracts are for one version")
    layout: Literal["auto", "bf16_rest", "linear_fp8_config", "two_groups"] = Field(
        "auto",
        description="how INT4 experts and the other linears share one quantization_config; auto asks the runtime contract",
    )
    tensor_parallel: int = Field(8, ge=1, le=1024, description="ranks the checkpoint will be split over")
    disaggregation: Disaggregation = Disaggregation()  # type: ignore[call-arg]


class KvCache(Section):
    """Scales for an FP8 KV cache, measured in the source model, so that two artifacts made from it carry the same ones."""

    scales: Literal["auto", "checkpoint", "folded", "none"] = Field(
        "auto",
        description="auto: what the server's contract says where the recipe calibrates anyway, none for rtn; checkpoint: "
        "k_scale and v_scale in the files; folded: powers of two in the weights around the cache; none",
    )
    dtype: Literal["fp8_e4m3"] = Field("fp8_e4m3", description="what the cache holds; the largest value is 448")
    headroom: float = Field(
        2.0, ge=1, le=64, description="values so many times larger than any in the calibration text still fit"
    )
    samples: int = Field(
        4, ge=1, description="samples on which errors are measured, in whole batches; the largest value is that of all"
    )


class Output(Section):
    """The files."""

    shard_size: Size = Field("5GB", description="upper bound of one shard's bytes, decimal; at least 1MB, below 50GB")  # type: ignore[assignment]

    @model_validator(mode="after")
    def _bounds(self) -> Output:
        if not 1_000_000 <= self.shard_size < MAX_SHARD_BYTES:
            raise ValueError(
                f"shard_size is {self.shard_size:,} bytes; it must be at least 1MB and below 50GB (the Hub's limit)"
            )
        return self


class Limits(Section):
    """When a finished conversion is still not good enough: the run then ends with exit code 1."""

    max_fallback_share: float = Field(
        0.01, ge=0, le=1, description="share of quantized tensors that may have used a fallback"
    )
    max_relative_error: float = Field(
        0.25, gt=0, le=1, description="largest relative error ‖W − Ŵ‖ / ‖W‖ of any one tensor"
    )


class Gates(Section):
    """What `moepress validate` asks of a checkpoint before it may be served. Changes no byte of it."""

    loads: bool = Field(True, description="every tensor is in the server, and nothing else")
    max_gib_per_gpu: float | None = Field(
        None, gt=0, description="GiB (2**30) that the weights may take on one GPU, as the server counts them"
    )
    min_decode_speedup: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]] = Field(
        {}, description="concurrent requests: decode speed over the baseline's that must be reached"
    )
    max_kl: float | None = Field(
        0.05, gt=0, description="KL(source ‖ served), nats a token: pressing, KV type and the server's kernels together"
    )
    max_serving_kl: float | None = Field(
        0.02, gt=0, description="KL(reference ‖ served), both on the pressed weights: what the server adds"
    )
    min_agreement: float = Field(
        0.98, ge=0, le=1, description="share of greedy tokens that are the reference's, or nearly tied with them"
    )
    deterministic: bool = Field(True, description="the same request gives the same tokens twice")
    max_loops: float = Field(
        0.0, ge=0, le=1, description="share of long answers that end in a loop, beyond the baseline's"
    )


class Evaluation(Section):
    """What `moepress evaluate` asks: how much worse than its source a model may be, and how sure one must be of it."""

    confidence: float = Field(0.95, ge=0.5, le=0.999, description="of the two-sided intervals that verdicts rest on")
    max_drop: float = Field(0.02, ge=0, le=1, description="largest drop of a share of right answers, absolute")
    max_tool_call_drop: float = Field(
        0.05, ge=0, le=1, description="the same for tool-call cases, of which fewer are shipped"
    )
    max_kl: float = Field(0.05, gt=0, description="largest KL(source ‖ pressed) of any domain of text, nats a token")
    max_perplexity_rise: float = Field(
        0.02, ge=0, description="largest rise of perplexity on any domain of text, relative"
    )
    min_top1_agreement: float = Field(
        0.9, ge=0, le=1, description="smallest share of tokens where both put the same token first"
    )
    max_drift_rate: float = Field(
        0.02,
        gt=0,
        description="largest rate at which greedy texts part from the source's, first divergences a token, beyond the rate at "
        "which the source parts from itself",
    )
    min_samples: int = Field(100, ge=2, description="prompts that a share needs before it is judged")
    min_windows: int = Field(
        16, ge=8, description="windows of text that a domain needs, and prompts that drift needs, before it is judged"
    )
    max_truncated_share: float = Field(
        0.05, ge=0, le=1, description="share of answers that may be cut off at their token limit before a task fails"
    )


class Recipe(Section):
    """Everything a conversion is told. See the module docstring for an example."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="lower case, for file names and the model card")
    description: str = ""
    families: tuple[str, ...] = Field(
        min_length=1, description="model families this recipe is for (see `moepress recipes families`)"
    )
    engine: Literal["moepress", "llmcompressor"] = Field(
        "moepress",
        description="who makes the experts' integers by gptq: moepress, layer by layer; or llm-compressor's oneshot, in a "
        "process of its own that holds the whole model",
    )
    weights: Weights = Weights()
    calibration: Calibration = Calibration()  # type: ignore[call-arg]
    rest: Rest = Rest()
    mtp: Mtp = Mtp()
    serving: Serving = Serving()
    kv_cache: KvCache = KvCache()  # type: ignore[call-arg]
    output: Output = Output()  # type: ignore[call-arg]
    limits: Limits = Limits()
    gates: Gates = Gates()  # type: ignore[call-arg]
    evaluation: Evaluation = Evaluation()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _kept_whole(self) -> Recipe:
        if not self.keeps_experts:
            return self
        widened = [f"rest.{part}" for part, wish in self.rest if wish == "bf16"]
        widened += [f"mtp.{part}" for part, wish in self.mtp if wish == "bf16"]
        if widened:
            raise ValueError(
                "weights.algorithm is keep, so the source's own quantization_config describes the output, and it knows no "
                f"BF16 here: {', '.join(widened)} must be source"
            )
        return self

    @property
    def calibrated(self) -> bool:
        """The algorithm needs calibration text."""
        return self.weights.algorithm not in ("rtn", "keep")

    @property
    def keeps_experts(self) -> bool:
        """Nothing is quantized: the output is the source with KV scales folded in, described as the source is."""
        return self.weights.algorithm == "keep"

    @property
    def smooths_norms(self) -> bool:
        """Norms before the experts, and all that reads them, are rescaled."""
        return "awq" in self.weights.algorithm and self.weights.awq.norm

    def canonical_json(self) -> str:
        """One spelling per meaning: sorted keys, defaults written out. Part of the resume key, so without the
        gates, bounds and deployment: whoever changes what a server must reach has not changed what is pressed."""
        kept = self.model_dump(
            mode="json", exclude={"gates": True, "evaluation": True, "serving": {"disaggregation": True}}
        )
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package, sorted."""
    folder = resources.files("moepress") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(source: str) -> tuple[str, str]:
    """The YAML text of a shipped recipe's name or of a file's path, and where it was found.

    Raises:
        RecipeError: neither a shipped name nor a readable file.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError([("(file)", str(error))], where=source, hint="moepress recipes list") from error
    if source in shipped_recipes():
        return (resources.files("moepress") / "recipes" / f"{source}.yaml").read_text(
            encoding="utf-8"
        ), f"shipped recipe {source}"
    known = ", ".join(shipped_recipes())
    raise RecipeError(
        [("(name)", f"no recipe is called {source!r}; shipped are: {known}")], hint="moepress recipes list"
    )


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a shipped name or a YAML file, with ``path=value`` overrides applied before the check.

    Raises:
        RecipeError: with every problem at once, each under its field's path.
    """
    text, where = recipe_text(source)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # also a number of ten thousand digits, or of brackets
        raise RecipeError([("(yaml)", " ".join(str(error).split()))], where=where) from error
    if not isinstance(data, dict):
        raise RecipeError([("(yaml)", f"a recipe is a mapping of fields, this is {_kind(data)}")], where=where)
    return check_recipe(data, where=where, overrides=overrides)


def check_recipe(
    data: dict[str, Any], *, where: str, problems: Iterable[tuple[str, str]] = (), overrides: Iterable[str] = ()
) -> Recipe:
    """Validates a mapping; ``problems`` already found are reported together with the new ones.

    Args:
        data: changed by `overrides`.
        overrides: ``path=value``, applied first.

    Raises:
        RecipeError: if there is any problem.
    """
    found = [*problems, *(problem for override in overrides if (problem := _apply(data, override)))]
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found += [(_path(item["loc"]), _message(item)) for item in error.errors()]
    if found:
        raise RecipeError(found, where=where)
    return recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors and other tools."""
    return Recipe.model_json_schema()


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags that run code, without silently repeated keys, and without anchors: nine short lines of them
    stand for a billion values, which an error message would write out."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "a recipe has no anchors and aliases (&a, *a)", mark)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[no-untyped-call, misc]
        return node


def _mapping_without_repeats(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(
                None, None, "a field's name must be plain text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"field {key!r} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)  # type: ignore[no-untyped-call]
    return seen


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def _apply(data: dict[str, Any], override: str) -> tuple[str, str] | None:
    """Sets one ``a.b=value`` in ``data``; returns a problem instead of raising, so that all come at once."""
    path, separator, value = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        return ("--set", f"{override!r} is not of the form section.field=value")
    node: Any = data
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return (path, f"{key!r} is not a section")
    try:
        node[keys[-1]] = yaml.load(value, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return (path, " ".join(str(error).split()))
    return None


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(recipe)"


def _message(item: Mapping[str, Any]) -> str:
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _fields_beside(item["loc"]), n=1)
        return f"no such field; did you mean {near[0]}?" if near else "no such field"
    if item["type"] == "missing":
        return "is required"
    given = repr(item["input"])
    return f"{text} (given: {given if len(given) <= 200 else given[:200] + '…'})"


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section that a path leads into."""
    section: type[BaseModel] = Recipe
    for part in location[:-1]:
        inner = section.model_fields[str(part)].annotation if str(part) in section.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        section = inner
    return list(section.model_fields)


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "empty"}.get(type(value), type(value).__name__)
