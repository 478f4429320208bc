"""Write down which checkpoint tensor went into which parameter while SGLang loads a model. Changes nothing.

SGLang's loaders do not say what they skip: unknown names are passed over (GLM-4, Qwen3) or logged once (DeepSeek), and
a parameter that no tensor filled keeps whatever was in memory. So we follow the data. Every tensor that the loader is
given is a subclass of torch.Tensor that carries the names it came from; views, casts, concatenations and copies between
devices carry them on; a copy into memory of a parameter is written down, with the place inside it:

    model.layers.3.mlp.experts.17.up_proj.weight_packed ──▶ model.layers.3.mlp.experts.w13_weight_packed, 98304 elements

In the end each tensor has been used or not, and each parameter is filled to a known share. It needs no knowledge of
model classes, and works the same on GPUs and CPUs, with any tensor parallelism (each rank writes its own report).

Active where this folder is on PYTHONPATH and MOEPRESS_LOAD_REPORT names a folder. The cost is a few Python calls per
tensor: seconds for a checkpoint of 180,000 tensors.
"""

from __future__ import annotations

import os

VARIABLE = "MOEPRESS_LOAD_REPORT"
_TARGET = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"


def register() -> None:
    """Entry point, called by SGLang once in every process."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .recorder import record

    def load(original, model, weights, target_device):
        with record(model, os.environ[VARIABLE]) as follow:
            return original(model, follow(weights), target_device)

    HookRegistry.register(_TARGET, load, HookType.AROUND)
