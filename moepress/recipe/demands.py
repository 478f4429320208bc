"""The parts of a recipe that come after the files: the server they are made for, and what is asked of them there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moepress.recipe.section import Section


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
