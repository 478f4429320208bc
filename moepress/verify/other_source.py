"""Was the output made from this source at all? Asked first: the answer no makes every later question meaningless.

    by names and shapes   the tensors fit the output's own config.json better than the source's, and the two announce different
                          weights. (A damaged config.json alone is no other source: then the tensors still fit.)
    by numbers            of weights spread over the model none is the source's, and nothing is wrong with the output by
                          itself: a model of the same shape, as base and instruct are

A wrong source is a mistake in the command line, not a fault of the output. So it is an error, and no verdict is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from moepress.convert.made_from import right_source
from moepress.errors import CheckpointError, MoepressError
from moepress.formats.architecture import expected_weights
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.same_model import two_models
from moepress.formats.storage import StoredWeight
from moepress.verify.files import PACKED, SCALE_NAMES, OutputFiles

LOOKED_AT = 16
"""Weights whose numbers are compared first. Of two models with one shape some may be equal, as frozen ones are; all of
them hardly."""


def refuse_another_model(output: OutputFiles, source: Checkpoint) -> None:
    """By headers and configurations alone.

    Raises:
        CheckpointError: the output was made from another model than the source.
    """
    try:
        own = _misfits(output, output.config)
        problem = two_models(output.config, source.config)
    except MoepressError:
        return  # a config.json that cannot be read is a finding about the output, or stops the comparison itself
    if problem is not None and _misfits(output, source.config) > own:
        raise _refusal(problem, output, source)


def refuse_other_numbers(
    output: OutputFiles,
    source: Checkpoint,
    storage: Mapping[str, StoredWeight],
    differs: Callable[[StoredWeight], bool],
) -> None:
    """By numbers, where nothing was found wrong with the output by itself.

    Args:
        storage: of the source.
        differs: whether a weight of the source is not the output's.

    Raises:
        CheckpointError: none of the weights that were looked at is the source's.
    """
    some: list[StoredWeight] = []
    for packed in (False, True):  # kept and quantized ones are judged by other rules, and experts outnumber all others
        kind = [s for s in storage.values() if len(s.shape) == 2 and _is_packed(output, s) == packed]
        step = max(1, 2 * len(kind) // LOOKED_AT)
        some += kind[step // 2 :: step][: LOOKED_AT // 2]
    if some and all(differs(stored) for stored in some):
        raise _refusal(
            f"these are two models of the same shape: of {len(some)} weights that were looked at, from {some[0].name} to "
            f"{some[-1].name}, none of the output's is the source's",
            output,
            source,
        )


def _is_packed(output: OutputFiles, stored: StoredWeight) -> bool:
    return f"{stored.name.removesuffix('.weight')}.{PACKED[0]}" in output.tensors


def _refusal(problem: str, output: OutputFiles, source: Checkpoint) -> CheckpointError:
    return CheckpointError(
        problem,
        where=f"{output.folder}; {source.location}",
        hint=right_source(output.folder, source.location, "--source"),
    )


def _misfits(output: OutputFiles, config: Mapping[str, Any]) -> int:
    """Weights that this configuration announces and the output lacks or has in another shape, and those it does not announce."""
    announced = {spec.name: spec for spec in expected_weights(config)}
    there: dict[str, bool] = {}
    for name, (_, _, shape) in output.tensors.items():
        module, _, part = name.rpartition(".")
        if part in SCALE_NAMES or part in PACKED[1:]:
            continue
        logical = f"{module}.weight" if part == PACKED[0] else name
        spec = announced.get(logical)
        if spec is None:
            there[logical] = False
        elif part == PACKED[0]:
            there[logical] = shape == (*spec.shape[:-1], math.ceil(spec.shape[-1] / 8))
        else:
            there[logical] = shape == spec.shape
    missing = sum(spec.copy_of is None and name not in there for name, spec in announced.items())
    return missing + sum(not fits for fits in there.values())
