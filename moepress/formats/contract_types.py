"""The shape of a contract: what can be said about a server that reads our output, and how sure we are of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moepress.formats.kv_contract import KvScales
from moepress.formats.quantization_config import Layout

FAMILIES = ("deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "qwen3_moe")
MLA_FAMILIES = ("deepseek_v3", "kimi_k2", "kimi_k25")
DSA_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
GQA_FAMILIES = ("glm4_moe", "qwen3_moe")

Server = Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class LayoutSupport:
    """Whether a server takes a layout for a family.

    Attributes:
        fp8_scale_suffix: what the FP8 linears' scales have to be called; None where the layout has no FP8 linears.
        fp8_strategies: scale layouts of FP8 linears that it takes.
    """

    layout: Layout
    works: bool
    evidence: str
    fp8_scale_suffix: str | None = None
    fp8_strategies: tuple[Literal["block", "channel"], ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """Something that belongs on the server's command line, always or when the KV cache is to be FP8."""

    arguments: tuple[str, ...]
    when: Literal["always", "fp8 kv"]
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class SignedScales:
    """Whether a kernel for INT4 experts multiplies by a negative scale as by any other number.

    Attributes:
        kernel: as ``group_sizes`` names it, or a variant of it that a setting turns on.
        takes: None where its source is closed, or nobody looked.
        when: how a server comes to use it; empty for what it takes by itself.
        group_sizes: those for which it can be used.
    """

    kernel: str
    takes: bool | None
    evidence: str
    when: str = ""
    by_default: bool = True
    group_sizes: tuple[int, ...] = (-1, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Contract:
    """One server, version and family.

    Attributes:
        flags: in the order of the command line.
        group_sizes: INT4 group sizes by kernel, the default kernel first; -1 is one scale per row.
        share_multiples: by kernel, what a rank's share of moe_intermediate must be a multiple of beside the group.
        signed_scales: what its kernels do with scales below zero, in the order in which they are taken.
        symmetric_only: INT4 experts with zero points do not load.
        built_dense: ``re:`` lines of modules it builds dense whatever the config says.
        silent: what it drops or gets wrong without an error; to be checked offline, before and after.
    """

    server: Server
    version: str
    family: str
    layouts: tuple[LayoutSupport, ...]
    default_layout: Layout
    kv_scales: KvScales
    flags: tuple[LaunchFlag, ...]
    group_sizes: Mapping[str, tuple[int, ...]]
    share_multiples: Mapping[str, int]
    group_evidence: str
    signed_scales: tuple[SignedScales, ...]
    symmetric_only: bool
    symmetric_evidence: str
    act_order_evidence: str
    built_dense: tuple[str, ...]
    silent: tuple[str, ...]

    def layout(self, layout: Layout) -> LayoutSupport:
        """The row of a layout."""
        return next(row for row in self.layouts if row.layout == layout)

    def launch_arguments(self, *, fp8_kv: bool) -> tuple[str, ...]:
        """What has to be on the command line, for an FP8 KV cache or for one in 16 bits."""
        flags = [flag for flag in self.flags if flag.when == "always" or fp8_kv]
        return tuple(argument for flag in flags for argument in flag.arguments)


def layout_rows(*rows: tuple[Layout, bool, str]) -> tuple[LayoutSupport, ...]:
    """Rows from (layout, whether it works, evidence); what each layout holds is the same everywhere."""
    suffixes: dict[Layout, str | None] = {
        "bf16_rest": None,
        "linear_fp8_config": "weight_scale_inv",
        "two_groups": "weight_scale",
    }
    strategies: dict[Layout, tuple[Literal["block", "channel"], ...]] = {
        "bf16_rest": (),
        "linear_fp8_config": ("block",),
        "two_groups": ("block", "channel"),
    }
    return tuple(LayoutSupport(layout, works, why, suffixes[layout], strategies[layout]) for layout, works, why in rows)
