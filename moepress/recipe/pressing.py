"""The parts of a recipe that decide bytes: how weights are rounded, on what text, what is left alone, and in what files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moepress.recipe.section import Section, Size

MAX_SHARD_BYTES = 50_000_000_000
"""The Hub refuses files of 50 GB (decimal) and more; a shard has to stay below with its header."""


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
        "files are as large. Off: not every kernel takes such scales (`plan` says which); needs scale: mse",
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
    batch_size: int = Field(
        8, ge=1, description="samples that the experts get together; part of the result's last bits"
    )
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
    loss: Literal["output", "kl"] = Field(
        "output",
        description="what an error costs. output: its square, every output of a matrix alike; kl: what it does to the model's "
        "predictions, from one backward pass of the source, for gptq",
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
