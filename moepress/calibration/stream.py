"""All samples of a run between two layers: hidden states in memory or files, and which positions are tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moepress.calibration.activations import Activations, Scratch


@dataclass
class Stream:
    """All samples of a run, between two layers.

    Attributes:
        hidden: [N, S, C] hidden states; what is in padding positions means nothing.
        lengths: [N] int64, real tokens of each sample; the rest of its row is padding.
        topk: [N, S, k] int32 indices carried from sparse attention's last indexer, where the family carries them.
    """

    hidden: Activations
    lengths: torch.Tensor
    topk: Activations | None = None

    @property
    def tokens(self) -> int:
        """Real tokens in all samples."""
        return int(self.lengths.sum())

    def first_token(self, sample: int) -> int:
        """Index, among all real tokens, of a sample's first."""
        return int(self.lengths[:sample].sum())

    def real(self, start: int, stop: int) -> torch.Tensor:
        """[stop − start, S] bool: which positions of these samples are tokens."""
        return torch.arange(self.hidden.shape[1])[None, :] < self.lengths[start:stop, None]

    def copied(self, scratch: Scratch) -> Stream:
        """The same samples in memory or files of their own."""
        return Stream(
            self.hidden.copied(scratch), self.lengths, None if self.topk is None else self.topk.copied(scratch)
        )

    def release(self) -> None:
        """Give the memory or the files back."""
        self.hidden.release()
        if self.topk is not None:
            self.topk.release()
