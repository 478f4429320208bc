"""What a decoder layer is called with, beside its hidden states.

Masks, positions, rotary embeddings and the carried top-k indices are made as each family's ``Model.forward`` makes them
in transformers 5.17. Padding is always on the right: with causal attention real tokens never see it, so it needs no
mask, and it never reaches the tap's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from moepress.calibration.activations import Scratch
from moepress.calibration.decoder import DecoderClasses
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.weights import WeightSource


@dataclass(frozen=True)
class LayerContext:
    """What a layer needs from its model.

    Attributes:
        config: transformers' configuration of the text model.
        classes: the family's classes.
        rotary: its rotary embedding, filled.
        num_experts: routed experts of a sparse layer.
        source, scratch, settings: as given to the model.
        following: names of the next layer's dense part: what is loaded after this layer's experts.
    """

    config: PreTrainedConfig
    classes: DecoderClasses
    rotary: nn.Module
    num_experts: int
    source: WeightSource
    scratch: Scratch
    settings: RunSettings
    following: tuple[str, ...] = ()


def forward_arguments(context: LayerContext, hidden: torch.Tensor, topk: torch.Tensor | None) -> dict[str, Any]:
    """The arguments that Model.forward makes once for all layers, and what the family carries from layer to layer.

    Args:
        hidden: [n, S, C], on the run's device.
        topk: [n, S, k] int32, carried from sparse attention's last indexer.
    """
    config, classes = context.config, context.classes
    position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds": hidden,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    if classes.sliding and config.sliding_window is not None:
        mask = create_sliding_window_causal_mask(**arguments)
    else:
        mask = create_causal_mask(**arguments, allow_is_causal_skip=not classes.always_mask)
    made = {
        "attention_mask": mask,
        "position_ids": position_ids,
        "position_embeddings": context.rotary(hidden, position_ids=position_ids),
    }
    if classes.carries_topk:
        made["prev_topk_indices"] = None if topk is None else topk.to(context.settings.device)
    return made
