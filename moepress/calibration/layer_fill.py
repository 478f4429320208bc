"""From names to parameters: a decoder layer on the meta device, filled from a weight source.

A layer is built without memory (meta device), its routed experts are cut out, and every parameter and buffer that is
left is filled exactly once. Names are settled before a byte is read:

    needed   = the layer's state_dict, in published names, plus each expert's gate, up and down
    present  = the weights of that layer in the source
    missing  = needed − present                        -> error: a parameter nobody filled would be random
    unknown  = present − needed − known extras         -> error: a weight nobody uses would be calibrated around

Known extras are those that the family's table marks optional or as copies (KV scales, rotary buffers of old exporters,
the MTP layer's own embedding and head).

The experts come in blocks, per-expert tensors stacked into the fused layout of transformers 5:

    gate_up [B, 2·I, C]    rows 0..I−1 gate_proj, rows I..2·I−1 up_proj
    down    [B, C, I]

so that memory holds the dense part of one layer (a few GB) and as many experts as the budget allows, never all 256.
Sources whose experts are already fused on disk (BF16 builds) are read by bands of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moepress.calibration.decoder import DecoderClasses
from moepress.calibration.weights import WeightSource
from moepress.errors import CheckpointError
from moepress.formats.families import Component, Family

FUSED_GATE_UP = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True)
class ExpertBlock:
    """The weights of some of a layer's routed experts, float32 unless the run computes in another type.

    Attributes:
        first: index of the first expert; they follow each other.
        gate_up: [B, 2·I, C], gate rows before up rows.
        down: [B, C, I].
    """

    first: int
    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def experts(self) -> range:
        return range(self.first, self.first + len(self.gate_up))

    def to(self, device: str, dtype: torch.dtype) -> ExpertBlock:
        """The same weights on a device, in a type; itself where both are right."""
        return ExpertBlock(self.first, self.gate_up.to(device, dtype), self.down.to(device, dtype))


@dataclass(frozen=True)
class LayerNames:
    """What one layer's weights are called.

    Attributes:
        dense: key of the layer's state_dict -> published name, without the routed experts.
        experts: per routed expert (gate, up, down), published; () when the layer has none, or they are fused on disk.
        fused: published names of (gate_up, down) when the source holds fused experts.
        expert_shape: (I, C) of one expert's gate, as the configuration has it; (0, 0) without experts.
    """

    dense: Mapping[str, str]
    experts: tuple[tuple[str, str, str], ...]
    fused: tuple[str, str] | None
    expert_shape: tuple[int, int]

    @property
    def is_sparse(self) -> bool:
        """The layer has routed experts."""
        return bool(self.experts) or self.fused is not None


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build` makes, without memory, in evaluation mode."""
    with torch.device("meta"):
        return build().eval()


def settle_names(
    layer: nn.Module,
    *,
    family: Family,
    classes: DecoderClasses,
    present: Mapping[str, str],
    num_experts: int,
    extra: Iterable[str] = (),
    where: str,
) -> LayerNames:
    """Match the layer's parameters against the source's names.

    Args:
        layer: the decoder layer on meta, its routed experts still inside.
        family, classes: the family's tables.
        present: name inside the layer, as published -> full published name; all weights of this layer in the source.
        num_experts: routed experts of a sparse layer.
        extra: further names inside the layer that the caller fills (the MTP layer's projection and norms).
        where: for messages, for example ``layer 3``.

    Raises:
        CheckpointError: missing or unknown names, with their count and five examples.
    """
    state = layer.state_dict()
    is_sparse = FUSED_GATE_UP in state
    dense_inner = {key: _published(classes, key) for key in state if not key.startswith("mlp.experts.")}
    experts = _expert_names(family, num_experts) if is_sparse else ()
    fused = (_published(classes, FUSED_GATE_UP), _published(classes, FUSED_DOWN))
    is_fused = (
        is_sparse and fused[0] in present and not present.keys() & {name for triple in experts for name in triple}
    )

    needed = {*dense_inner.values(), *extra, *(fused if is_fused else (name for triple in experts for name in triple))}
    tolerated = {
        slot.name
        for slot in family.mtp_slots.values()
        if (slot.optional or slot.copy_of is not None) and slot.component is not Component.ROUTED_EXPERT
    }
    _refuse(f"{where}: weights missing", sorted(needed - present.keys()), where)
    _refuse(f"{where}: weights that its forward pass does not use", sorted(present.keys() - needed - tolerated), where)
    return LayerNames(
        dense={key: present[inner] for key, inner in dense_inner.items()},
        experts=() if is_fused else tuple((present[gate], present[up], present[down]) for gate, up, down in experts),
        fused=(present[fused[0]], present[fused[1]]) if is_fused else None,
        expert_shape=(state[FUSED_DOWN].shape[2], state[FUSED_DOWN].shape[1]) if is_sparse else (0, 0),
    )


def fill(
    module: nn.Module,
    names: Mapping[str, str],
    source: WeightSource,
    *,
    device: str,
    dtype: torch.dtype,
    kept_in_float32: tuple[str, ...] = (),
) -> None:
    """Give every parameter and buffer of `module` its weight, each exactly once.

    Args:
        module: on meta, or partly.
        names: key of ``module.state_dict()`` -> name in the source; must cover it.
        source: gives float32 tensors.
        device, dtype: where the parameters live and what the module computes in.
        kept_in_float32: parts of keys that stay float32 whatever `dtype` says.

    Raises:
        CheckpointError: a shape differs, or something is left without memory.
    """
    for key, wanted in module.state_dict(keep_vars=True).items():
        published = names.get(key)
        if published is None:
            raise CheckpointError(f"nothing fills parameter {key} of {type(module).__name__}")
        weight = _of_shape(source.load(published, device=device), wanted.shape, published)
        kept = any(part in key for part in kept_in_float32)
        _assign(module, key, weight.to(device=device, dtype=torch.float32 if kept else dtype))
    left = [key for key, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    _refuse(f"{type(module).__name__}: parameters without a weight", left, type(module).__name__)


def load_experts(
    names: LayerNames, source: WeightSource, experts: range, *, device: str, dtype: torch.dtype
) -> ExpertBlock:
    """Decode and stack a block of a layer's routed experts.

    Args:
        names: from `settle_names`, of a sparse layer.
        experts: consecutive expert indices.

    Raises:
        CheckpointError: a shape that is not the configuration's.
    """
    inner, hidden = names.expert_shape
    gate_up = torch.empty(len(experts), 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(len(experts), hidden, inner, dtype=dtype, device=device)
    if names.fused is not None:
        for name, block in zip(names.fused, (gate_up, down), strict=True):
            some = source.load(name, slice(experts.start, experts.stop), device=device)
            block.copy_(_of_shape(some, block.shape, name))
        return ExpertBlock(experts.start, gate_up, down)
    for slot, expert in enumerate(experts):
        parts = (gate_up[slot, :inner], gate_up[slot, inner:], down[slot])
        for name, part in zip(names.experts[expert], parts, strict=True):
            part.copy_(_of_shape(source.load(name, device=device), part.shape, name))
    return ExpertBlock(experts.start, gate_up, down)


def expect_experts(names: LayerNames, source: WeightSource, experts: range) -> None:
    """A block of experts that will be loaded next; its bytes may begin to come while something else is computed."""
    if names.fused is not None:
        source.expect(names.fused, slice(experts.start, experts.stop))
    else:
        source.expect([name for expert in experts for name in names.experts[expert]])


def _assign(module: nn.Module, key: str, weight: torch.Tensor) -> None:
    path, _, leaf = key.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    else:
        owner._buffers[leaf] = weight


def _of_shape(weight: torch.Tensor, wanted: torch.Size, name: str) -> torch.Tensor:
    if weight.shape != wanted:
        raise CheckpointError(
            f"shape {list(weight.shape)} where the configuration asks for {list(wanted)}",
            where=name,
            hint="config.json and the weights do not belong together",
        )
    return weight


def _published(classes: DecoderClasses, key: str) -> str:
    for ours, theirs in classes.renamed:
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def _expert_names(family: Family, num_experts: int) -> tuple[tuple[str, str, str], ...]:
    """(gate, up, down) of each expert, inside the layer, in the family's own words (``w1`` is a gate)."""
    templates: dict[str, str] = {}
    for slot in family.sparse:
        if slot.component is Component.ROUTED_EXPERT and "{expert}" in slot.name:
            templates[slot.projection or slot.name.split(".")[-2]] = slot.name
    gate, up, down = (templates[projection] for projection in ("gate_proj", "up_proj", "down_proj"))
    return tuple((gate.format(expert=i), up.format(expert=i), down.format(expert=i)) for i in range(num_experts))


def _refuse(what: str, names: list[str], where: str) -> None:
    if names:
        examples = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise CheckpointError(
            f"{what} ({len(names)}): {examples}",
            where=where,
            hint="check the checkpoint against its configuration: moepress inspect SRC",
        )
