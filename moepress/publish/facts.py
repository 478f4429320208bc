"""What the card says, gathered: the report's figures, the results of later commands, and what nobody has looked at.

Everything comes from `report.output.PressedOutput`, so that page and card never disagree. Two things are the card's own:
the warning, which is made from the evidence and names what is missing, and neutrality: folders of this machine are
replaced by the model's names, because a card is read elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from moepress import __version__
from moepress.formats.runtime_contract import CONTRACTS, doubtful_signed_scales
from moepress.formats.sizes import GIB
from moepress.hub.address import hub_address
from moepress.hub.ledger import read_origin
from moepress.report.gates import Gate, gates
from moepress.report.kv_treatment import kv_treatment
from moepress.report.memory import Gpu, GpuMemory, computed_memory
from moepress.report.output import PressedOutput
from moepress.report.reproduce import commands, recipe_yaml
from moepress.report.served import SpeedPoint, measured_memory, speed_points
from moepress.report.sizes import FateRow, SizeRow, fate_rows, size_rows

PLANNED_GPU = Gpu(141_000_000_000, 0.88, "fp8")
"""The GPU that computed memory is for: the one `moepress plan` takes by default."""

WORST = 10


@dataclass(frozen=True)
class Origin:
    """The source as readers find it. ``repo`` and ``commit`` None: not known to be on the Hub."""

    repo: str | None
    commit: str | None

    @property
    def words(self) -> str:
        return self.repo or "SRC"


@dataclass(frozen=True)
class CardFacts:
    """Everything the template asks for. Sizes in bytes; shares 0 to 1; empty and None: not there, and the card says so."""

    title: str
    origin: Origin
    family: str
    grid: str
    algorithm: str
    layout: str
    server: str
    tensor_parallel: int
    parameters: int
    source_bytes: int
    output_bytes: int
    sizes: list[SizeRow]
    fates: list[FateRow]
    worst: list[dict[str, Any]]
    fallbacks: dict[str, str]
    calibration: dict[str, Any] | None
    cost: list[str]
    not_for: list[str]
    fidelity: dict[str, Any] | None
    evaluate: dict[str, Any] | None
    evaluated: str | None
    scored: list[dict[str, Any]]
    judged: list[dict[str, Any]]
    skipped: list[tuple[str, str]]
    validate: dict[str, Any] | None
    speed: list[SpeedPoint]
    memory: list[GpuMemory]
    kv: list[str]
    kv_seen: str | None
    gates: list[Gate]
    commands: list[tuple[str, str]]
    recipe_yaml: str
    shards: dict[str, str]
    digest: str
    moepress: str
    tags: list[str]


def read_source(output: PressedOutput, base_model: str | None) -> Origin:
    """Where the source is on the Hub: named, recorded by `pull`, or given to convert as an address."""
    recorded = output.report.get("source")
    place = output.source or ""
    found = None
    if isinstance(recorded, Mapping) and recorded.get("repo"):
        found = Origin(str(recorded["repo"]), recorded.get("commit"))
    elif place and Path(place).is_dir():
        known = read_origin(Path(place))
        found = Origin(known.repo, known.commit) if known else None
    elif address := hub_address(place):
        found = Origin(address.repo, address.revision)
    if base_model is not None and (found is None or found.repo != base_model):
        return Origin(base_model, None)
    return found or Origin(None, None)


def gather(output: PressedOutput, *, title: str | None = None, base_model: str | None = None) -> CardFacts:
    """All facts of one output.

    Args:
        title: the model's name; the folder's by default.
        base_model: ``org/name`` of the source, where it is not recorded.
    """
    title = title or output.folder.resolve().name
    origin = read_source(output, base_model)
    neutral = _Neutral(output, title, origin)
    report, weights = output.report, output.recipe.weights
    fidelity, evaluate, validate = (output.found(name) for name in ("fidelity", "evaluate", "validate"))
    rows = list((evaluate or {}).get("rows") or ())
    smoke = bool((validate or {}).get("smoke"))  # no GPU: figures of a processor stand beside no GPU's
    kv = kv_treatment(output)
    elsewhere = replace(output, folder=Path(title), source="SRC")
    group = f"groups of {weights.group_size}" if weights.group_size > 0 else "one scale a row"
    return CardFacts(
        title=title,
        origin=origin,
        family=output.family.title,
        grid="source" if output.recipe.keeps_experts else f"INT{weights.num_bits}, symmetric, {group}",
        algorithm=weights.algorithm,
        layout=str(report["layout"]),
        server=f"{output.recipe.serving.server} {output.recipe.serving.version}",
        tensor_parallel=output.recipe.serving.tensor_parallel,
        parameters=int(report["total_parameters"]),
        source_bytes=int(report["source_bytes"]),
        output_bytes=int(report["output_bytes"]),
        sizes=size_rows(output),
        fates=fate_rows(output),
        worst=[_with_tokens(entry, output.records) for entry in report["quantized"]["worst"][:WORST]],
        fallbacks=dict(report["fallbacks"]),
        calibration=_calibration(output),
        cost=_cost(fidelity, evaluate),
        not_for=[
            *_not_for(evaluate, validate, quantized=not output.recipe.keeps_experts),
            *_not_for_kernels(output),
        ],
        fidelity=fidelity,
        evaluate=evaluate,
        evaluated=(output.results.get("evaluate") or {}).get("finished"),
        scored=[row for row in rows if is_score(row)],
        judged=[row for row in rows if not is_score(row)],
        skipped=[
            (str(skip["task"]), neutral(_short(str(skip["why"])))) for skip in (evaluate or {}).get("skipped") or ()
        ],
        validate=validate,
        speed=[] if smoke else speed_points(validate),
        memory=computed_memory(output, PLANNED_GPU) + ([] if smoke else measured_memory(validate)),
        kv=[text for text in kv.sentences if (kv.scales or kv.evidence not in text) and "validated server" not in text],
        kv_seen=kv.resolved,
        gates=[neutral.gate(gate) for gate in gates(elsewhere)],
        commands=_commands(elsewhere, origin, neutral),
        recipe_yaml=neutral(recipe_yaml(output.recipe)),
        shards=dict(report["shards"]),
        digest=output.digest,
        moepress=__version__,
        tags=["moepress", *_formats(output), "mixture-of-experts", "sglang"],
    )


def _formats(output: PressedOutput) -> list[str]:
    if output.recipe.keeps_experts:
        return ["prefill"]
    return ["compressed-tensors", f"int{output.recipe.weights.num_bits}", "quantized"]


def is_score(row: Mapping[str, Any]) -> bool:
    """A row of evaluate that is a task's score, of which source and pressed model each have one; not KL, not perplexity."""
    return row.get("recovery") is not None and row.get("candidate") is not None


def scores(facts: CardFacts) -> list[EvalResult]:
    """The pressed model's task scores, as the Hub's metadata has them; figures that compare the two stand in the text."""
    found = []
    for row in (facts.evaluate or {}).get("rows") or ():
        if not is_score(row):
            continue
        name, dataset = DATASETS.get(row["task"], (row["task"], re.sub(r"[^\w./-]+", "-", row["task"])))
        found.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=dataset,
                dataset_name=name,
                metric_type=re.sub(r"[^\w-]+", "_", row["metric"]),
                metric_name=f"{row['metric']} (source, measured alike: {row['source']:.4f})",
                metric_value=round(float(row["candidate"]), 6),
            )
        )
    return found


DATASETS = {
    "gsm8k": ("GSM8K", "openai/gsm8k"),
    "mmlu": ("MMLU", "cais/mmlu"),
    "arc_challenge": ("ARC-Challenge", "allenai/ai2_arc"),
    "humaneval": ("HumanEval", "openai/openai_humaneval"),
    "mbpp": ("MBPP", "google-research-datasets/mbpp"),
}
"""lm-eval's task to its name and its data set on the Hub."""


def _commands(output: PressedOutput, origin: Origin, neutral: _Neutral) -> list[tuple[str, str]]:
    """As they can be typed elsewhere: the source comes from the Hub, at the commit it was pressed from."""
    found = [(what, neutral(line)) for what, line in commands(output) if what != "This page"]
    if origin.repo:
        commit = f"@{origin.commit}" if origin.commit else ""
        found.insert(0, ("Fetch", f"moepress pull {origin.repo}{commit} SRC"))
    return found


def _calibration(output: PressedOutput) -> dict[str, Any] | None:
    recipe = output.recipe
    if not recipe.calibrated:
        return None
    text = recipe.calibration.text
    if text == "default":
        words = "the text that ships with moepress (English technical prose and Python)"
    elif text.startswith("hub:"):
        from moepress.calibration.text import dataset_address

        words = f"[{text[4:]}](https://huggingface.co/datasets/{dataset_address(text[4:])[0]})"
    else:
        words = f"the publisher's own file `{Path(text).name}`"
    return {
        "text": words,
        "samples": recipe.calibration.samples,
        "length": recipe.calibration.length,
        "sha256": output.report.get("calibration_sha256"),
    }


def _cost(fidelity: Mapping[str, Any] | None, evaluate: Mapping[str, Any] | None) -> list[str]:
    """What it cost, one sentence a measurement; a sentence too where there is none."""
    found = []
    texts = list(((fidelity or {}).get("texts") or {}).values())
    if texts:
        kl = _range([text["kl"] for text in texts], "{:.4f}")
        same = _range([100 * text["top1_agreement"] for text in texts], "{:.1f}")
        kinds = f"{len(texts)} kinds of held-out text" if len(texts) > 1 else "held-out text"
        found.append(
            f"On {kinds}, the next-token distribution moved by {kl} nats a token (KL), and {same} % of the most likely "
            "tokens are the same."
        )
    domains = list(((evaluate or {}).get("fidelity") or {}).values())
    if domains and not texts:
        kl = _range([domain["kl"] for domain in domains], "{:.4f}")
        same = _range([100 * domain["top1_agreement"] for domain in domains], "{:.1f}")
        least = "" if all(domain["kl_is"] == "exact" for domain in domains) else "at least "
        kinds = f"{len(domains)} kinds of text" if len(domains) > 1 else "one kind of text"
        found.append(
            f"Over a server, on {kinds}, the next-token distribution moved by {least}{kl} nats a token (KL), and {same} % "
            "of the most likely tokens are the same."
        )
    if evaluate is None:
        found.append("**No task was scored**, so the cost in answer quality is not known.")
        return found
    rows = [row for row in evaluate.get("rows") or () if is_score(row)]
    lost = [row for row in rows if row["verdict"] == "REGRESSION"]
    short = [row for row in rows if row["verdict"] == "NOT ENOUGH DATA"]
    if rows:
        found.append(
            f"{len(rows)} scores were compared with the source's, measured the same way: {len(lost)} regressed, "
            f"{len(short)} had too little data to tell."
        )
    else:
        found.append("**No task was scored**, so the cost in answer quality is not known.")
    return found


def _range(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _not_for(evaluate: Mapping[str, Any] | None, validate: Mapping[str, Any] | None, *, quantized: bool) -> list[str]:
    """When not to use the weights: from the evidence, and from what is missing of it."""
    found = []
    rows = list((evaluate or {}).get("rows") or ())
    lost = [row["task"] for row in rows if row["verdict"] == "REGRESSION"]
    if lost:
        found.append(f"for {', '.join(dict.fromkeys(lost))}: they regressed beyond the recipe's bounds (table below)")
    tested = {row["task"] for row in rows}
    if not (evaluate or {}).get("tool_calls"):
        found.append("for long agent runs: tool calls were not evaluated, and small errors add up over many turns")
    if not tested & {"humaneval", "mbpp"} and not any("code" in task for task in tested):
        found.append("for code that nobody reviews: no coding task was scored")
    median = (((evaluate or {}).get("drift") or {}).get("candidate") or {}).get("median")
    if median is not None:
        found.append(
            f"where answers must match the source's word for word: half of the long answers differ by token {median}"
        )
    elif quantized:
        found.append(
            "where answers must match the source's word for word: sooner or later, quantized weights choose other words"
        )
    if validate is None:
        found.append("in production unchecked: no server has been seen loading these files")
    if not quantized:
        return [
            *found,
            "with a decode server whose weights hold other KV scales: moepress verify --same-kv-as compares them",
        ]
    found.append("behind a service that gives the source model's name without saying that the weights are quantized")
    return found


def _not_for_kernels(output: PressedOutput) -> list[str]:
    """Kernels of either server, in the versions that somebody looked at, that are not known to take this output's scales."""
    weights = output.recipe.weights
    if not weights.signed_scales or output.recipe.keeps_experts:
        return []
    return [
        f"{row.when} in {contract.server} {contract.version}: half of the scales are negative, which its {row.kernel} kernel "
        f"{'takes for large positive ones, without an error' if row.takes is False else 'was not seen to take'}"
        for contract in CONTRACTS.values()
        if contract.family == output.family.key
        for row in doubtful_signed_scales(contract, weights.group_size, settings=True)
    ]


class _Neutral:
    """Replaces folders of this machine by names."""

    def __init__(self, output: PressedOutput, title: str, origin: Origin) -> None:
        pairs = [(str(output.folder.resolve()), title), (str(output.folder), title)]
        if output.source and Path(output.source).is_absolute():
            pairs.append((output.source, origin.words))
        verified = (output.found("verify") or {}).get("source")
        if verified and Path(str(verified)).is_dir():
            pairs += [(str(Path(str(verified)).resolve()), origin.words), (str(verified), origin.words)]
        text = output.recipe.calibration.text
        if Path(text).is_absolute():
            pairs.append((text, Path(text).name))
        self._pairs = [(old, new) for old, new in sorted(pairs, key=lambda pair: -len(pair[0])) if len(old) > 1]

    def __call__(self, text: str) -> str:
        for old, new in self._pairs:
            text = text.replace(old, new)
        return text

    def gate(self, gate: Gate) -> Gate:
        return replace(gate, reason=self(gate.reason))


def _with_tokens(entry: dict[str, Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    tokens = records.get(entry["weight"], {}).get("tokens")
    return {**entry, "tokens": None if tokens is None else int(tokens)}


def _short(text: str, limit: int = 160) -> str:
    """The first words of a reason; servers answer whole documents."""
    words = " ".join(text.split())
    return words if len(words) <= limit else words[:limit].rsplit(" ", 1)[0] + " …"


def gibibytes(count: float) -> str:
    """``420.71 GiB``, ``8.69 MiB``: the unit of every size on the card."""
    return f"{count / GIB:,.2f} GiB" if abs(count) >= GIB / 2 else f"{count / 2**20:,.2f} MiB"
