"""Which of transformers' classes run a family's decoder, as data.

moepress has no modelling code: attention, norms, routers, indexers and shared experts run as transformers' own decoder
layer. What differs between families is what its layer wants to be given and what it gives back:

    family        attention  cache sees                    mask       layer returns
    deepseek_v3   MLA        latent c_kv, rotated k_pe     causal     hidden
    kimi_k25      as deepseek_v3 (its text model)
    deepseek_v32  MLA + DSA  expanded K and V              always     hidden
    glm_moe_dsa   MLA + DSA  expanded K and V              always     hidden, top-k indices
    glm4_moe      GQA        rotated K, V                  causal     hidden
    qwen3_moe     GQA        rotated K, V                  causal     hidden
    minimax_m2    GQA        rotated K, V                  causal     hidden

'always': sparse attention scores keys against the mask, so it needs one even where plain attention would use its
built-in causal path. GLM's 'shared' layers have no indexer and take the top-k indices of the last layer that has one.

`kimi_k2` is DeepSeek V3 under another name that transformers does not know. MTP layers are the same decoder layer at
index num_hidden_layers, past the end of the per-layer lists of the configuration; `mtp_config` makes the lists longer.

Written against transformers 5.17 (models/*/modeling_*.py, ``Model.forward`` of each family).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moepress.calibration.attention import register
from moepress.errors import CheckpointError
from moepress.formats.families import Family, text_config

CacheView = Literal["latent", "expanded", "key_value"]
"""What ``past_key_values.update`` is called with: (c_kv, k_pe), (K, V) expanded from the latent, or (K, V)."""


@dataclass(frozen=True)
class DecoderClasses:
    """How transformers names and calls the decoder of a family.

    Attributes:
        model_type: transformers' own; also the package under ``transformers.models``.
        prefix: what its class names begin with.
        cache: see `CacheView`.
        always_mask: sparse attention, which needs a mask even when it is plainly causal.
        carries_topk: the layer takes ``prev_topk_indices`` and returns (hidden, indices).
        sliding: uses the configuration's ``sliding_window`` when there is one.
        renamed: (beginning in transformers' layer, beginning as published) where they differ.
    """

    model_type: str
    prefix: str
    cache: CacheView
    always_mask: bool = False
    carries_topk: bool = False
    sliding: bool = False
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> ModuleType:
        """transformers' modelling module, imported on first use."""
        return importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")

    @property
    def layer(self) -> type[torch.nn.Module]:
        return self._class("DecoderLayer")

    @property
    def norm(self) -> type[torch.nn.Module]:
        return self._class("RMSNorm")

    @property
    def rotary(self) -> type[torch.nn.Module]:
        return self._class("RotaryEmbedding")

    @property
    def kept_in_float32(self) -> tuple[str, ...]:
        """Parts of names that transformers keeps in float32 whatever the compute type (router bias, index weights)."""
        pretrained = self._class("PreTrainedModel")
        strict = getattr(pretrained, "_keep_in_fp32_modules_strict", None) or ()
        loose = getattr(pretrained, "_keep_in_fp32_modules", None) or ()
        return (*strict, *loose)

    def _class(self, role: str) -> type[torch.nn.Module]:
        found: type[torch.nn.Module] = getattr(self.module, self.prefix + role)
        return found


_DEEPSEEK_V3 = DecoderClasses("deepseek_v3", "DeepseekV3", "latent")

DECODERS: Mapping[str, DecoderClasses] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k25": _DEEPSEEK_V3,
    "deepseek_v32": DecoderClasses("deepseek_v32", "DeepseekV32", "expanded", always_mask=True),
    "glm_moe_dsa": DecoderClasses("glm_moe_dsa", "GlmMoeDsa", "expanded", always_mask=True, carries_topk=True),
    "glm4_moe": DecoderClasses("glm4_moe", "Glm4Moe", "key_value"),
    "qwen3_moe": DecoderClasses("qwen3_moe", "Qwen3Moe", "key_value", sliding=True),
    "minimax_m2": DecoderClasses(
        "minimax_m2",
        "MiniMaxM2",
        "key_value",
        renamed=(
            ("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
            ("mlp.", "block_sparse_moe."),
        ),
    ),
}
"""Family key (formats.families) -> its decoder. Adding a family is adding an entry and a tiny test model."""

_NOT_THE_MODEL = ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype", "transformers_version")
_PER_LAYER_DEFAULT = {"layer_types": "deepseek_sparse_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}


def decoder_classes(family: Family) -> DecoderClasses:
    """The decoder of a family.

    Raises:
        CheckpointError: the family is known to moepress, but not which classes run it.
    """
    classes = DECODERS.get(family.key)
    if classes is None:
        raise CheckpointError(
            f"no forward pass for {family.title}: calibration knows {', '.join(sorted(DECODERS))}",
            hint="round to nearest, which needs no calibration: --set weights.algorithm=rtn",
        )
    return classes


def decoder_config(family: Family, config: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' configuration of the text model, made from the published ``config.json``.

    What is not about the model (quantization, remote code, dtype) is left out: weights arrive decoded, and published
    modelling code is never run.

    Args:
        family: from ``identify_family``.
        config: the parsed ``config.json`` (the outer one for a wrapped vision-language model).

    Raises:
        CheckpointError: experts with another activation than silu.
    """
    classes = decoder_classes(family)
    # Copied in depth: transformers completes nested fields (rope_scaling) in place, and the caller's configuration is
    # what will be written out.
    fields = {
        name: copy.deepcopy(value) for name, value in text_config(family, config).items() if name not in _NOT_THE_MODEL
    }
    made: PreTrainedConfig = CONFIG_MAPPING[classes.model_type].from_dict({**fields, "model_type": classes.model_type})
    if made.hidden_act != "silu":
        raise CheckpointError(f"hidden_act {made.hidden_act!r}: the experts' forward pass here is SwiGLU, with silu")
    made._attn_implementation = register()  # S × S scores are never held for all heads at once
    made.use_cache = False
    return made


def mtp_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same configuration with its per-layer lists long enough for the MTP layers.

    An MTP layer has routed experts and, where the family has one, an indexer of its own.

    Args:
        config: of the main model.
        layers: number of MTP layers.
    """
    longer = copy.deepcopy(config)
    for field, value in _PER_LAYER_DEFAULT.items():
        listed = getattr(longer, field, None)
        if listed is not None:
            setattr(longer, field, [*listed, *[value] * layers])
    return longer
