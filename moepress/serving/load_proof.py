"""Did the server load what we wrote? Two proofs: from the headers before it starts, from the data flow after.

SGLang does not fail on tensors that are absent or that it has no place for, and a scale that was skipped leaves a model
that talks, badly. So nothing is inferred from a server that answers.

    before   `expected_tensors`: names, dtypes and shapes that SGLang will ask for, from config.json alone (family table
             + its quantization_config), against the headers of the files                         `compare_headers`
    after    the load recorder's report: each tensor of ours was copied into a parameter, and each parameter was filled
             to its last element                                                                  `prove_load`
    always   two servers, or one server twice, hold the same parameters: /weights_checker          `compare_checksums`

What may stay unused is a short list with reasons (the MTP layer when no draft model is served, KV scales that the
contract calls inert); what may stay unfilled too (group indexes when there is no activation order).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError, ServingError
from moepress.formats.architecture import WeightSpec, expected_weights
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Family, classify, identify_family

RECORDER = Path(__file__).parent / "load_recorder" / "site"
RECORDER_VARIABLE = "MOEPRESS_LOAD_REPORT"

_FLOATS = ("BF16", "F16", "F32")
_EXAMPLES = 5

# Parameters that exist for layouts we do not write, and are never read for the ones that we do.
_MAY_STAY_EMPTY = ("_g_idx", "_g_idx_sort_indices", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor that the server will ask for. `dtypes`: any of these is right (safetensors names)."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Problem:
    """One kind of thing that is wrong.

    Attributes:
        kind: what is wrong with all of them.
        names: the tensors or parameters, sorted.
        detail: of the first one.
    """

    kind: str
    names: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_EXAMPLES]) + (", …" if len(self.names) > _EXAMPLES else "")
        return f"{len(self.names)} × {self.kind}: {shown}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class LoadProof:
    """What became of a checkpoint's tensors in a server. Good when `problems` is empty.

    Attributes:
        tensors: in the checkpoint.
        used: copied into parameters.
        parameters: of the server's models, all ranks.
        excused: tensors that rightly stayed unused, by reason.
        problems: everything else.
    """

    tensors: int
    used: int
    parameters: int
    excused: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def complete(self) -> bool:
        """Every tensor and every parameter is accounted for."""
        return not self.problems


def expected_tensors(config: Mapping[str, Any]) -> dict[str, ExpectedTensor]:
    """Every tensor that SGLang will ask for, from a configuration.

    Args:
        config: the parsed ``config.json``, with its ``quantization_config``.

    Raises:
        CheckpointError: unknown family or quantization.
    """
    declared = config.get("quantization_config") or {}
    inverse = "linear_fp8_config" in declared or declared.get("quant_method") == "fp8"
    block = _block_size(declared)
    expected = [part for spec in expected_weights(config) for part in _parts(spec, block, inverse)]
    return {part.name: part for part in expected}


def _parts(spec: WeightSpec, block: Sequence[int], inverse: bool) -> list[ExpectedTensor]:
    optional, kind = spec.copy_of is not None, spec.published.kind
    if kind in ("bf16", "f32"):
        floats = ("F32",) if kind == "f32" else _FLOATS
        return [ExpectedTensor(spec.name, floats, spec.shape, optional)]
    rows, columns = spec.shape
    module = spec.name.removesuffix(".weight")
    if kind == "int4":
        group = spec.published.group_size or -1
        groups = 1 if group == -1 else columns // group
        return [
            ExpectedTensor(f"{module}.weight_packed", ("I32",), (rows, math.ceil(columns / 8)), optional),
            ExpectedTensor(f"{module}.weight_scale", _FLOATS, (rows, groups), optional),
            ExpectedTensor(f"{module}.weight_shape", ("I64", "I32"), (2,), optional),
        ]
    scales: tuple[int, ...] = (rows, 1)
    if kind == "fp8_block":
        scales = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    elif kind == "fp8_tensor":
        scales = (1,)
    suffix = "weight_scale_inv" if inverse else "weight_scale"
    return [
        ExpectedTensor(spec.name, ("F8_E4M3",), spec.shape, optional),
        ExpectedTensor(f"{module}.{suffix}", _FLOATS, scales, optional),
    ]


def _block_size(declared: Mapping[str, Any]) -> Sequence[int]:
    linear = declared.get("linear_fp8_config") or declared
    if size := linear.get("weight_block_size"):
        return list(size)
    for group in (declared.get("config_groups") or {}).values():
        if size := (group.get("weights") or {}).get("block_structure"):
            return list(size)
    return (128, 128)


def compare_headers(checkpoint: Checkpoint, *, inert: Iterable[str] = ()) -> tuple[Problem, ...]:
    """What the files hold against what SGLang will ask for. Reads no weights.

    Args:
        checkpoint: opened; its headers are what is compared.
        inert: suffixes of tensors that the server is known to pass over (the contract's KV scale names).

    Returns:
        Empty when all names, dtypes and shapes agree.
    """
    expected = expected_tensors(checkpoint.config)
    held = checkpoint.tensors
    wrong_dtype, wrong_shape = [], []
    for name in expected.keys() & held.keys():
        if held[name].dtype not in expected[name].dtypes:
            wrong_dtype.append(name)
        if tuple(held[name].shape) != expected[name].shape:
            wrong_shape.append(name)
    missing = [name for name, tensor in expected.items() if name not in held and not tensor.optional]
    endings = tuple(inert)
    surplus = [name for name in held if name not in expected and not (endings and name.endswith(endings))]
    problems = [Problem("tensor that the server will ask for and the files do not have", tuple(sorted(missing)))]
    problems.append(Problem("tensor that no parameter of the server is named after", tuple(sorted(surplus))))
    if wrong_dtype:
        first = min(wrong_dtype)
        detail = f"{first} is {held[first].dtype}, read as {' or '.join(expected[first].dtypes)}"
        problems.append(Problem("tensor of another dtype than the server reads", tuple(sorted(wrong_dtype)), detail))
    if wrong_shape:
        first = min(wrong_shape)
        detail = f"{first} is {list(held[first].shape)}, read as {list(expected[first].shape)}"
        problems.append(Problem("tensor of another shape than the server reads", tuple(sorted(wrong_shape)), detail))
    return tuple(problem for problem in problems if problem.names)


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The load recorder's reports of one server, one for each rank and model.

    Raises:
        ServingError: there are none (the recorder was not on PYTHONPATH, or the server died before loading).
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ServingError(
            "no report of what was loaded",
            where=str(folder),
            hint="the server must be started by moepress, or with the load recorder on PYTHONPATH",
        )
    return found


def prove_load(checkpoint: Checkpoint, reports: Sequence[Mapping[str, Any]], *, inert: Iterable[str] = ()) -> LoadProof:
    """What the server did with each tensor.

    Args:
        checkpoint: what it was given.
        reports: from `read_reports`, all ranks and the draft model's too.
        inert: suffixes of tensors that the server is known to pass over.

    Returns:
        The proof; its problems name tensors that were not offered, not used or copied to nowhere, parameters that were
        not filled, and loads that failed.
    """
    offered = set().union(*(report["offered"] for report in reports))
    unused = set.intersection(*(set(report["unused"]) for report in reports))
    drafted = any(map(_is_draft, reports))
    family = identify_family(checkpoint.config)
    endings = tuple(inert)
    excused: dict[str, int] = {}
    left: list[str] = []
    for name in sorted(unused & checkpoint.tensors.keys()):
        reason = None
        if endings and name.endswith(endings):
            reason = "KV scale that this server passes over"
        elif _is_mtp(family, checkpoint, name):
            if not drafted:
                reason = "MTP layer; no draft model was served"
            elif name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
                reason = "MTP layer's copy of the embedding or head; the server shares the main ones"
        if reason:
            excused[reason] = excused.get(reason, 0) + 1
        else:
            left.append(name)
    absent = sorted(checkpoint.tensors.keys() - offered)
    unknown = sorted(offered - checkpoint.tensors.keys())
    unfilled = sorted(
        {name for report in reports for name, held in report["parameters"].items() if _unfilled(name, held, report)}
    )
    failures = [f"{report['model_class']}: {report['failure']}" for report in reports if report["failure"]]
    rounded = sorted({cast["example"] for report in reports for cast in report["casts"] if _loses(cast)})
    problems = (
        Problem("load that failed", tuple(failures)),
        Problem("tensor of the checkpoint that the server never read", tuple(absent)),
        Problem("tensor that the server read and the checkpoint does not list", tuple(unknown)),
        Problem("tensor that went into no parameter", tuple(left)),
        Problem("parameter that was not filled", tuple(unfilled)),
        Problem("tensor that was rounded to a smaller dtype", tuple(rounded)),
    )
    return LoadProof(
        tensors=len(checkpoint.tensors),
        used=len(checkpoint.tensors) - len(unused & checkpoint.tensors.keys()) - len(absent),
        parameters=sum(len(report["parameters"]) for report in reports),
        excused=excused,
        problems=tuple(problem for problem in problems if problem.names),
    )


def compare_checksums(
    first: Mapping[str, Mapping[str, str]], second: Mapping[str, Mapping[str, str]]
) -> tuple[Problem, ...]:
    """Whether two servers hold the same parameters.

    Args:
        first, second: from `SGLangClient.checksums`.
    """
    ranks = first.keys() ^ second.keys()
    one = {f"{rank}: {name}": value for rank, names in first.items() for name, value in names.items()}
    two = {f"{rank}: {name}": value for rank, names in second.items() for name, value in names.items()}
    differ = sorted(name for name in one.keys() & two.keys() if one[name] != two[name])
    problems = (
        Problem("rank that only one of them has", tuple(sorted(ranks))),
        Problem("parameter that only one of them has", tuple(sorted(one.keys() ^ two.keys())) if not ranks else ()),
        Problem("parameter with other contents", tuple(differ)),
    )
    return tuple(problem for problem in problems if problem.names)


def _unfilled(name: str, parameter: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    if name.endswith(_MAY_STAY_EMPTY):
        return False
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        # Padded to a multiple of 64 rows a rank; a draft model is given the main model's after loading.
        return bool(parameter["filled"] == 0 and not _is_draft(report))
    return bool(parameter["filled"] < math.prod(parameter["shape"]))


def _is_mtp(family: Family, checkpoint: Checkpoint, name: str) -> bool:
    try:
        return classify(family, checkpoint.config, name).is_mtp
    except CheckpointError:  # a name that no weight of the family has: not excused
        return False


def _is_draft(report: Mapping[str, Any]) -> bool:
    return str(report["model_class"]).endswith("NextN")


def _loses(cast: Mapping[str, str]) -> bool:
    """float32 into a 16-bit parameter: wanted for scales, wrong for the router's correction bias."""
    return "e_score_correction_bias" in cast["parameter"] and cast["from"] == "float32" != cast["to"]
