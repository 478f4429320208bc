"""Are the scales of a weight that was rounded to nearest those of its recipe? Worked out again from the source, in plain torch.

    max    s = bf16(max|w| / 7.5)                                    every group, equal
    mse    s = the one of bf16(max|w| / d), d of `DIVISORS`, that loses least
           every group           s is one of them
           every 32nd row        and none of the others loses less

One step of BF16 is 0.4 to 0.8 % of a scale, neighbouring divisors are 2 % or more apart: a scale that is a step off is none of
the seventeen, which costs one pass over the groups to see, not seventeen over the weights. That a scale among them is the best
one does cost those, so it is looked at in a sample, whose first row is drawn from the weight's name: a search that goes wrong
does so everywhere. What remains unseen is a scale exchanged, outside the sample, for another of the seventeen, with codes and
error to match.

A row with a group that comes back exactly was on a grid before, and its other groups may have any of `ON_GRID_DIVISORS`
and the BF16 neighbours: where such a scale is found, that group is judged whole.

The divisors stand here a second time on purpose: a changed table there is a finding here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch

DIVISORS = (
    7.5,
    7.0,
    8.0,
    *(7.5 * f for f in (0.9, 0.96, 1.02, 1.04, 1.09, 1.12, 1.15, 1.18, 1.21, 1.25, 1.3, 1.36, 1.43, 1.6)),
)
ON_GRID_DIVISORS = tuple(float(d) for d in range(1, 9))
ON_GRID_ERROR = 2.0**-15
"""Mean squared error over max² below which a group was on a grid; rounding leaves a hundred times as much."""

ROWS_PER_SAMPLE = 32
MARGIN = 1e-4
"""How much less, relatively, another scale must lose: sums differ in their last digits by the order they are taken in."""


def max_scales_off(truth: torch.Tensor, scale: torch.Tensor) -> int:
    """How many scales are not bf16(max|w| / 7.5). truth float32 [R, C], scale bfloat16 [R, G]."""
    return int((scale.float() != _candidate(_peaks(truth, scale.shape[1]), 7.5)).sum())


def searched_scales_off(
    truth: torch.Tensor, scale: torch.Tensor, served: torch.Tensor, *, name: str, signed: bool
) -> tuple[int, int, int]:
    """Scales of the least-error search that cannot be its result.

    Args:
        truth: float32 [R, C], the source's values.
        scale: bfloat16 [R, G], numbers other than 0.
        served: float32 [R, C], codes times scales.
        name: of the weight; draws the sample.
        signed: scales may be negative.

    Returns:
        (scales that are no candidates, judged groups whose scale loses more than another, groups judged).
    """
    groups = scale.shape[1]
    peaks, sizes = _peaks(truth, groups), scale.float().abs()
    known = torch.zeros(sizes.shape, dtype=torch.bool)
    for divisor in DIVISORS:
        known |= sizes == _candidate(peaks, divisor)
    errors = _by_group(truth - served, groups).square().sum(2)
    width = truth.shape[1] // groups
    was_on_grid = ((errors <= ON_GRID_ERROR * width * peaks.square()) & (peaks > 0)).any(1, keepdim=True)
    finer = torch.zeros_like(known)
    for divisor in ON_GRID_DIVISORS if bool((~known & was_on_grid).any()) else ():
        for step in (-1, 0, 1):
            finer |= sizes == _candidate(peaks, divisor, step)
    no_candidates = int((~known & ~(finer & was_on_grid)).sum())

    judged = ~known & finer & was_on_grid
    judged[zlib.crc32(name.encode()) % min(ROWS_PER_SAMPLE, len(judged)) :: ROWS_PER_SAMPLE] = True
    w, top = _by_group(truth, groups)[judged], peaks[judged]
    least = torch.full_like(top, torch.inf)
    for s in _candidates(top, signed=signed):
        least = torch.minimum(least, _loss(w, s))
    on_grid = was_on_grid.expand_as(judged)[judged]
    if bool(on_grid.any()):
        for s in _on_grid_candidates(top):
            least = torch.where(on_grid, torch.minimum(least, _loss(w, s)), least)
    worse = errors[judged] > least * (1 + MARGIN) + 1e-9 * top.square()
    return no_candidates, int(worse.sum()), worse.numel()


def _candidates(peaks: torch.Tensor, *, signed: bool) -> Iterator[torch.Tensor]:
    for divisor in DIVISORS:
        s = _candidate(peaks, divisor)
        yield from (s, -s) if signed else (s,)


def _on_grid_candidates(peaks: torch.Tensor) -> Iterable[torch.Tensor]:
    return (_candidate(peaks, divisor, step) for divisor in ON_GRID_DIVISORS for step in (-1, 0, 1))


def _loss(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Σ (w − q s)² of groups [n, width] under scales [n]."""
    codes = (w / s[:, None]).round_().clamp_(-8, 7)
    return codes.mul_(s[:, None]).sub_(w).square_().sum(1)


def _candidate(peaks: torch.Tensor, divisor: float, step: int = 0) -> torch.Tensor:
    """bf16(max|w| / d), ``step`` BF16 numbers further, as float32; 2⁻⁷ where that is no normal number."""
    rounded = (peaks / divisor).to(torch.bfloat16)
    if step:
        rounded = (rounded.view(torch.int16) + step).view(torch.bfloat16)
    return torch.where(rounded.float() < 2.0**-126, 2.0**-7, rounded.float())


def _peaks(truth: torch.Tensor, groups: int) -> torch.Tensor:
    """max|w| of each group, float32 [R, G]."""
    return _by_group(truth, groups).abs().amax(2)


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.reshape(values.shape[0], groups, -1)
