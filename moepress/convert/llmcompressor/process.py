"""llm-compressor's `oneshot` with GPTQ on a model's routed experts: a process of its own, started by `engine`.

    python -m moepress.convert.llmcompressor.process REQUEST.json

Importing llm-compressor changes how transformers builds and loads models for the rest of the process, so it never shares one
with anything else. The model is loaded by transformers from a BF16 folder, whole, in BF16. What comes out is one file per
decoder layer with, for every expert's matrix,

    LAYER.EXPERT.PROJECTION.codes   int8 [R, C]            LAYER.EXPERT.PROJECTION.scales   bfloat16 [R, C / group]

and at the end DONE, so that a cut-off run is never taken for a finished one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file

DONE = "done.json"
EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj)$")


@dataclass(frozen=True)
class Request:
    """What the process is told.

    Attributes:
        model: BF16 folder that transformers loads.
        model_type: transformers' own, under which it has classes.
        decoder_layer: class name of a decoder layer, the unit in which `oneshot` goes through the model.
        tokens: int64 [N, S], .npy.
        out: folder for the results.
        num_bits, group_size: of the integers.
        batch_size: samples a forward call.
        threads: of torch; None = its own choice.
    """

    model: str
    model_type: str
    decoder_layer: str
    tokens: str
    out: str
    num_bits: int
    group_size: int
    batch_size: int
    threads: int | None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def quantize(request: Request) -> None:
    """Loads, quantizes, writes."""
    if request.threads:
        torch.set_num_threads(request.threads)
    model = load(Path(request.model), request.model_type)
    stand_in_for_torchvision()
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import PreTrainedTokenizerFast

    own = Path(request.out) / "config"
    config: Any = model.config
    config.save_pretrained(own)
    config._name_or_path = str(own)  # oneshot reads the configuration again, by this name
    ids = np.load(request.tokens)
    grouped = request.group_size > 0
    weights = QuantizationArgs(
        num_bits=request.num_bits,
        type="int",
        symmetric=True,
        strategy="group" if grouped else "channel",
        group_size=request.group_size if grouped else None,
    )
    targets = [r"re:.*experts\.\d+\.(gate_proj|up_proj|down_proj)$"]
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast.from_pretrained(request.model),
        dataset=Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}),
        recipe=GPTQModifier(
            config_groups={"experts": QuantizationScheme(targets=targets, weights=weights)},
            ignore=["lm_head"],
            actorder="static",
        ),
        pipeline="sequential",
        sequential_targets=[request.decoder_layer],
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
        batch_size=request.batch_size,
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=True,
    )
    written = write_experts(model, Path(request.out))
    (Path(request.out) / DONE).write_text(
        json.dumps({"matrices": written, "llmcompressor": version("llmcompressor"), "tokens": int(ids.size)})
    )


def load(folder: Path, model_type: str) -> torch.nn.Module:
    """The model, in BF16; every parameter from the files, or it is an error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    published = json.loads((folder / "config.json").read_text())
    config = AutoConfig.for_model(model_type, **{k: v for k, v in published.items() if k != "model_type"})
    config.use_cache = False
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise SystemExit(f"transformers did not find {len(missing)} weights, the first {missing[0]}")
    loaded: torch.nn.Module = model.eval()
    return loaded


def write_experts(model: torch.nn.Module, out: Path) -> int:
    """Codes and scales of every expert's matrix, a file a layer; returns how many."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    written = 0
    for name, module in model.named_modules():
        found = EXPERT.search(name)
        if found is None:
            continue
        scales = module.weight_scale.detach().to(torch.bfloat16)
        groups = module.weight.detach().float().unflatten(-1, (scales.shape[-1], -1))
        codes = (groups / scales.float().unsqueeze(-1)).round_().flatten(-2).to(torch.int8)
        key = ".".join(found.groups())
        layers.setdefault(int(found[1]), {}).update(
            {f"{key}.codes": codes.contiguous(), f"{key}.scales": scales.contiguous()}
        )
        written += 1
    for layer, tensors in layers.items():
        save_file(tensors, out / f"layer-{layer:05d}.safetensors")
    return written


def stand_in_for_torchvision() -> None:
    """llm-compressor imports torchvision for vision models, which are not used here; an empty package is enough."""
    if importlib.util.find_spec("torchvision") is not None:
        return

    class Anything(types.ModuleType):
        __path__: ClassVar[list[str]] = []  # type: ignore[misc]

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        module = Anything(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


if __name__ == "__main__":
    quantize(Request(**json.loads(Path(sys.argv[1]).read_text())))
