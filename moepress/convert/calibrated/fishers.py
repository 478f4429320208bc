"""The Fisher information of a conversion's layers (`calibration.loss: kl`): one backward pass of the source, kept in files.

    OUT/.moepress/fisher/layer-00007.npy      float32 [C, C], there from the backward pass until the layer's shards are

The pass comes before the layers are pressed, over the same text, in this process. A conversion that was stopped goes on with the
files that are there; the pass is only made again for layers that have neither a file nor finished shards, and gives the same
bytes.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from moepress.calibration.output_fisher import output_fishers
from moepress.calibration.streamed_model import StreamedModel
from moepress.convert.forecast.calibration_cost import label_draws
from moepress.convert.journal import Journal
from moepress.errors import ConvertError
from moepress.formats.atomic import atomic_file, write_all
from moepress.quantize.row_metric import shrunk_fisher
from moepress.quantize.side_by_side import one_blas_thread


class LayerFishers:
    """F of the layers to be pressed, each in a file.

    Args:
        journal: of the open output folder.
    """

    def __init__(self, journal: Journal) -> None:
        self._folder = journal.state / "fisher"
        self._recipe = journal.plan.recipe

    def missing(self, layers: Collection[int]) -> set[int]:
        """Those of `layers` without a file."""
        return {layer for layer in layers if not self._path(layer).exists()}

    def measure(self, model: StreamedModel, token_ids: torch.Tensor, layers: Collection[int]) -> None:
        """Makes the files of some layers by one backward pass.

        Args:
            model: the source.
            token_ids: [N, S] int64.
            layers: of the main model.

        Raises:
            QuantizeError: a gradient that is not finite, named by layer.
            ConvertError: a file cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        times, seed = label_draws(self._recipe, model.config.hidden_size), self._recipe.calibration.seed
        for found in output_fishers(model, token_ids.repeat(times, 1), layers, seed=seed):
            content = io.BytesIO()
            with one_blas_thread():
                np.save(content, shrunk_fisher(found.fisher.cpu(), token_ids.numel()).numpy())
            path = self._path(found.layer)
            with atomic_file(path) as descriptor:
                write_all(descriptor, content.getbuffer(), path)

    def read(self, layer: int) -> torch.Tensor:
        """F of a layer, float32 [C, C], shrunk as far as the text's tokens are few.

        Raises:
            ConvertError: the file is damaged.
        """
        path = self._path(layer)
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise ConvertError(
                f"{path.name} cannot be read: {error}",
                where=str(path),
                hint="delete it, and run the same command again",
            ) from error

    def forget(self, layer: int) -> None:
        """Removes a pressed layer's file, and the folder with the last one."""
        self._path(layer).unlink(missing_ok=True)
        if self._folder.exists() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05d}.npy"
