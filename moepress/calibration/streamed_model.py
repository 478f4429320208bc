"""The forward pass of a model that does not fit in memory.

    embed → layer 0 → layer 1 → … → norm → lm_head → logits

        stream = model.embed(token_ids)
        for index in range(model.num_layers):
            model.run_layer(index, stream)            or, with work between its halves, model.open_layer(index)
        model.finish(stream)
        for sample, logits in model.logits(stream): …

Weights come from a `WeightSource` by name, decoded one layer at a time; see `layer_runner` for what is held. Nothing of
the published modelling code is used: layers are transformers' own classes for the family. The source is told what comes
next, so that a block of experts is read while the one before it, or the dense part of its layer, is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from moepress.calibration.activations import Scratch
from moepress.calibration.decoder import decoder_classes, decoder_config, mtp_config
from moepress.calibration.expert_tap import ExpertTap
from moepress.calibration.forward_arguments import LayerContext
from moepress.calibration.layer_fill import fill, on_meta, settle_names
from moepress.calibration.layer_runner import OpenLayer
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.stream import Stream
from moepress.calibration.weights import WeightSource
from moepress.errors import CheckpointError
from moepress.formats.families import canonical_name, expert_count, identify_family, mtp_layers, text_config
from moepress.quantize.side_by_side import side_by_side, width_on

ROWS = 512
"""Tokens whose logits are computed together: 512 × 163,840 of them in float32 are 0.3 GB."""
MTP_WEIGHTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What an MTP layer has beside its decoder layer; see `mtp`."""


def heads_at_once(device: torch.device | str) -> int:
    """How many products of `ROWS` tokens and the head are made at once: their logits are large."""
    return min(width_on(device), 8)


class StreamedModel:
    """A model that runs layer by layer from a weight source.

    Args:
        config: the published ``config.json``.
        source: where weights come from; nothing else of the checkpoint is read, and none of its code is run.
        scratch: where activations live.
        settings: how to use the machine.

    Attributes:
        num_layers: decoder layers of the main model.
        mtp_layers: indices of the MTP layers, from `num_layers` on; possibly empty.

    Raises:
        CheckpointError: unknown family, or one that calibration has no forward pass for.
    """

    def __init__(
        self, config: Mapping[str, Any], source: WeightSource, scratch: Scratch, settings: RunSettings | None = None
    ) -> None:
        self.family = identify_family(config)
        self.classes = decoder_classes(self.family)
        self.config = decoder_config(self.family, config)
        self.source = source
        self.scratch = scratch
        self.settings = settings or RunSettings()
        self.num_layers: int = self.config.num_hidden_layers
        self.mtp_layers = mtp_layers(self.family, config)
        self._num_experts = expert_count(text_config(self.family, config))
        self._rotary = self.classes.rotary(self.config).to(self.settings.device)
        self._top: dict[str, str] = {}
        self._in_layer: dict[int, dict[str, str]] = {}
        for name in source.names():
            canonical = canonical_name(self.family, name)
            parts = canonical.split(".", 3)
            if canonical.startswith("model.layers.") and len(parts) == 4:
                self._in_layer.setdefault(int(parts[2]), {})[parts[3]] = name
            else:
                self._top[canonical] = name

    def embed(self, token_ids: torch.Tensor, lengths: torch.Tensor | None = None) -> Stream:
        """Start a run.

        Args:
            token_ids: [N, S] int64.
            lengths: [N] int64, real tokens of each sample, padding after them; None = no padding.

        Raises:
            CheckpointError: a token id is beyond the embedding's rows.
        """
        samples, length = token_ids.shape
        lengths = torch.full((samples,), length) if lengths is None else lengths.long()
        hidden = self.scratch.allocate((samples, length, self.config.hidden_size), self.settings.dtype)
        table = self.embedding()
        for start, stop in self.settings.batches(samples):
            hidden.write(start, embed_tokens(token_ids[start:stop], table))
        return Stream(hidden, lengths)

    @contextmanager
    def open_layer(self, index: int) -> Iterator[OpenLayer]:
        """Build a decoder layer, which is filled when it is first computed with; its memory is given back on leaving.

        Args:
            index: 0 … num_layers − 1, or one of `mtp_layers`.

        Raises:
            CheckpointError: missing or unknown weights.
        """
        is_mtp = index >= self.num_layers
        config = mtp_config(self.config, len(self.mtp_layers)) if is_mtp else self.config
        layer = on_meta(lambda: self.classes.layer(config, index))
        names = settle_names(
            layer,
            family=self.family,
            classes=self.classes,
            present=self._in_layer.get(index, {}),
            num_experts=self._num_experts,
            extra=MTP_WEIGHTS if is_mtp else (),
            where=f"layer {index}",
        )
        tap = ExpertTap() if names.is_sparse else None
        if tap is not None:
            layer.get_submodule("mlp").experts = tap
        context = LayerContext(
            config=config,
            classes=self.classes,
            rotary=self._rotary,
            num_experts=self._num_experts,
            source=self.source,
            scratch=self.scratch,
            settings=self.settings,
            following=self._dense_names(index + 1),
        )
        yield OpenLayer(index, layer, partial(self._fill, layer, names.dense), tap, names, context)

    def run_layer(self, index: int, stream: Stream) -> None:
        """One whole layer with the source's own experts; `stream` is replaced by its output."""
        with self.open_layer(index) as layer:
            routed = layer.dense_part(stream)
            if routed is not None:
                layer.experts(stream, routed)
                routed.release()

    def finish(self, stream: Stream) -> None:
        """The final norm, in place: what lm_head and the MTP layer are given."""
        self.normalize(stream, self._named("model.norm.weight"))

    def final_norm(self) -> nn.Module:
        """The norm before lm_head, filled."""
        return self.norm(self._named("model.norm.weight"))

    @torch.no_grad()
    def normalize(self, stream: Stream, name: str) -> None:
        """An RMS norm of the family over a whole stream, in place. `name`: of its weight, as published."""
        norm, settings = self.norm(name), self.settings

        def one(batch: tuple[int, int]) -> None:
            stream.hidden.write(batch[0], norm(settings.on_device(stream.hidden.read(*batch))))

        batches = settings.dense_batches(len(stream.hidden), stream.hidden.shape[1])
        side_by_side(one, batches, width_on(settings.device))

    def norm(self, name: str) -> nn.Module:
        """An RMS norm of the family over the hidden size, filled. `name`: of its weight, as published."""
        norm = on_meta(lambda: self.classes.norm(self.config.hidden_size, eps=self.config.rms_norm_eps))
        self._fill(norm, {"weight": name})
        return norm

    def embedding(self) -> torch.Tensor:
        """[vocabulary, C] float32: the embedding table, freshly decoded."""
        return self.source.load(self._named("model.embed_tokens.weight"))

    def head(self) -> torch.Tensor:
        """[vocabulary, C] of the run's type, on its device: lm_head, or the embedding when the model ties them."""
        tied = "lm_head.weight" not in self._top and self.config.tie_word_embeddings
        name = self._named("model.embed_tokens.weight" if tied else "lm_head.weight")
        return self.settings.on_device(self.source.load(name))

    @torch.no_grad()
    def logits(self, stream: Stream) -> Iterator[tuple[int, torch.Tensor]]:
        """(sample, [S, vocabulary] float32) for each sample of a finished stream; padding rows mean nothing."""
        head = self.head()
        for sample in range(len(stream.hidden)):
            hidden = self.settings.on_device(stream.hidden.read(sample, sample + 1))[0]
            parts = side_by_side(
                lambda rows: (rows @ head.T).float(), torch.split(hidden, ROWS), heads_at_once(head.device)
            )
            yield sample, torch.cat(parts)

    def layer_weight(self, index: int, inner: str) -> str:
        """Published name of a weight inside a layer.

        Raises:
            CheckpointError: the source does not have it.
        """
        name = self._in_layer.get(index, {}).get(inner)
        if name is None:
            raise CheckpointError(f"no weight model.layers.{index}.{inner}", hint="moepress inspect SRC")
        return name

    def _dense_names(self, index: int) -> tuple[str, ...]:
        """Published names of everything in a layer of the main model but its routed experts; () beyond the last."""
        inside = self._in_layer.get(index, {}) if index < self.num_layers else {}
        return tuple(name for inner, name in inside.items() if ".experts." not in inner)

    def _fill(self, module: nn.Module, names: Mapping[str, str]) -> None:
        kept = self.classes.kept_in_float32
        fill(module, names, self.source, device=self.settings.device, dtype=self.settings.dtype, kept_in_float32=kept)

    def _named(self, canonical: str) -> str:
        name = self._top.get(canonical)
        if name is None:
            raise CheckpointError(f"no weight {canonical}", hint="moepress inspect SRC")
        return name


def embed_tokens(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding: token_ids [n, S] int64, table [vocabulary, C] -> [n, S, C].

    Raises:
        CheckpointError: a token id is beyond the table.
    """
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= len(table):
        raise CheckpointError(
            f"token ids {lowest}..{highest} where the embedding has {len(table)} rows",
            hint="the tokenizer does not belong to this checkpoint",
        )
    return table[token_ids]
