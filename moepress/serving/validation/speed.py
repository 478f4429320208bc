"""How fast is it, next to the baseline? SGLang's own bench_serving, the sides in turn.

    visits   C B B C …          each round measures both sides, and neither is always first: a machine that warms up or
                                slows down does so for both
    decode   P tokens in, N out, at 1, 8, 32, 64 requests at once
             per request = 1000 / median time per output token after the first (ms);  decode = that × requests at once
    prefill  one long prompt, one token out: prompt tokens / median time to the first token

Prompts are text cut to length, not random ids: a router sends noise to other experts than language, and the share of
experts that a batch touches is what decides whether INT4 is faster. The prefix cache is flushed before every run.

A verdict needs every round's ratio on the same side of 1 by more than 2 %. INT4 can lose at high concurrency: with many
tokens an expert its kernel computes in 16 bits where FP8's computes in 8, and reading weights is no longer what limits.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moepress.errors import ServingError
from moepress.serving import keeper
from moepress.serving.death import last_lines
from moepress.serving.launch import CPU_LAB, Launch
from moepress.serving.sglang import our_environment
from moepress.serving.validation import bench_client
from moepress.serving.validation.figures import Figure, json_or_none, ratio
from moepress.serving.validation.sides import Host, Name, Stage

_NOTABLE = 0.02
_TIMEOUT_S = 7200.0


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Attributes:
        concurrencies: requests at once, one run each.
        prompt_tokens, output_tokens: of a decode request.
        prefill_tokens: of a prefill request.
        waves: requests of a run = waves × concurrency, at least `least`.
        rounds: times that every run is repeated on each side.
        warm: send as many requests as run at once before measuring: kernels are compiled for a batch size when it is met.
    """

    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    prompt_tokens: int = 1024
    output_tokens: int = 256
    prefill_tokens: int = 4096
    waves: int = 2
    least: int = 4
    rounds: int = 2
    warm: bool = True

    def fitted(self, context: int | None) -> Workload:
        """Shorter where the model's context is; `context`: tokens, None = unknown."""
        if context is None or (
            context >= self.prompt_tokens + self.output_tokens and context > self.prefill_tokens + 8
        ):
            return self
        room = context - 8
        output = min(self.output_tokens, room // 4)
        prompt, prefill = min(self.prompt_tokens, room - output), min(self.prefill_tokens, room)
        return replace(self, prompt_tokens=prompt, output_tokens=output, prefill_tokens=prefill)


SMOKE = Workload(prompt_tokens=32, output_tokens=8, prefill_tokens=64, waves=1, least=2, warm=False)
"""Without a GPU: shows that measuring works."""


@dataclass(frozen=True)
class Rates:
    """One side at one concurrency."""

    decode: Figure
    per_request: Figure
    output: Figure
    ttft_p50: Figure
    ttft_p95: Figure
    inter_token_p50: Figure
    inter_token_p95: Figure

    def as_json(self) -> dict[str, Any]:
        return {name: figure.as_json() for name, figure in self.__dict__.items()}


@dataclass(frozen=True)
class DecodeRow:
    """Both sides at one concurrency; `ratio` of decode speeds, candidate over baseline, one run a round."""

    concurrency: int
    candidate: Rates
    baseline: Rates | None

    @property
    def ratio(self) -> Figure | None:
        return None if self.baseline is None else ratio(self.candidate.decode, self.baseline.decode)

    def as_json(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "candidate": self.candidate.as_json(),
            "baseline": json_or_none(self.baseline),
            "ratio": json_or_none(self.ratio),
            "verdict": _verdict(self.ratio),
        }


@dataclass(frozen=True)
class Speed:
    """All rows. `prefill`: prompt tokens a second of each side."""

    workload: Workload
    order: tuple[Name, ...]
    decode: tuple[DecodeRow, ...]
    prefill: dict[Name, Figure]

    @property
    def prefill_ratio(self) -> Figure | None:
        if "baseline" not in self.prefill:
            return None
        return ratio(self.prefill["candidate"], self.prefill["baseline"])

    def remarks(self) -> list[str]:
        """What a reader of the figures should know."""
        slower = [row.concurrency for row in self.decode if _verdict(row.ratio) == "slower"]
        if not slower:
            return []
        return [
            f"slower than the baseline at {', '.join(map(str, slower))} concurrent requests: with many tokens an expert, "
            "INT4's arithmetic in 16 bits costs more than its smaller weights save"
        ]

    def as_json(self) -> dict[str, Any]:
        load = self.workload
        return {
            "workload": {
                "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens,
                "prefill_tokens": load.prefill_tokens,
                "rounds": load.rounds,
                "order": list(self.order),
            },
            "decode": [row.as_json() for row in self.decode],
            "prefill": {
                "candidate": {"prefill": self.prefill["candidate"].as_json()},
                "baseline": {"prefill": self.prefill["baseline"].as_json()} if "baseline" in self.prefill else None,
                "ratio": json_or_none(self.prefill_ratio),
                "verdict": _verdict(self.prefill_ratio),
            },
            "remarks": self.remarks(),
        }


def visits(names: Sequence[Name], rounds: int) -> tuple[Name, ...]:
    """The order of measurements: ``C B B C C B …``; one boot serves two visits in a row."""
    return tuple(name for turn in range(rounds) for name in (names if turn % 2 == 0 else names[::-1]))


class SpeedRun:
    """Visits sides and collects what bench_serving says. One visit = all concurrencies, and prefill.

    Args:
        host: whose Python runs the client.
        tokenizer: folder, see `bench_tokenizer`; the candidate's, for both sides get the same tokens.
        work: folder for the texts, jobs and logs.
        texts: to cut prompts from.
    """

    def __init__(self, host: Host, workload: Workload, *, tokenizer: Path, work: Path, texts: Sequence[str]) -> None:
        self._host = host
        self._tokenizer = tokenizer
        self._workload = workload
        self._work = work
        self._seen: list[Name] = []
        self._most: dict[Name, int] = {}
        self._runs: dict[Name, list[list[dict[str, Any]]]] = {}
        self._texts = work / "bench-texts.json"
        wanted = max(workload.least, workload.waves * max(workload.concurrencies))
        pieces = [_piece(texts, index, workload.prefill_tokens) for index in range(wanted)]
        turns = [{"conversations": [{"value": piece}, {"value": "."}]} for piece in pieces]
        self._texts.write_text(json.dumps(turns), encoding="utf-8")

    def visit(self, stage: Stage, name: Name) -> None:
        """Measure a side once more.

        Raises:
            ServingError: bench_serving failed, or requests did.
        """
        url = stage.client(name).url
        number = self._seen.count(name) + 1
        found = self._work / f"bench-{name}-{number}.jsonl"
        found.unlink(missing_ok=True)
        load, jobs = self._workload, []
        for concurrency in load.concurrencies:
            requests = max(load.least, load.waves * concurrency)
            jobs.append(self._job(url, found, load.prompt_tokens, load.output_tokens, requests, concurrency))
        jobs.append(self._job(url, found, load.prefill_tokens, 1, load.least, 1))
        self._run(jobs, self._work / f"bench-{name}-{number}.log")
        answers = [json.loads(line) for line in found.read_text().splitlines()]
        for answer in answers:
            errors = [error for error in answer["errors"] if error]
            if errors:
                raise ServingError(
                    f"{len(errors)} of {len(answer['errors'])} benchmark requests failed: {errors[0][:300]}", where=url
                )
        self._seen.append(name)
        self._most[name] = stage.sides[name].most_at_once or max(load.concurrencies)
        self._runs.setdefault(name, []).append(answers)

    def result(self) -> Speed:
        """Everything so far; needs at least one visit to the candidate."""
        load = self._workload
        rows = []
        for index, concurrency in enumerate(load.concurrencies):
            sides = {
                name: _rates([run[index] for run in runs], min(concurrency, self._most[name]))
                for name, runs in self._runs.items()
            }
            rows.append(DecodeRow(concurrency, sides["candidate"], sides.get("baseline")))
        prefill = {
            name: Figure.of([load.prefill_tokens * 1000 / run[-1]["median_ttft_ms"] for run in runs], "tok/s")
            for name, runs in self._runs.items()
        }
        return Speed(load, tuple(self._seen), tuple(rows), prefill)

    def _job(self, url: str, found: Path, prompt: int, output: int, requests: int, concurrency: int) -> list[str]:
        return [
            *("--backend", "sglang", "--base-url", url),
            *("--model", str(self._tokenizer), "--tokenizer", str(self._tokenizer)),
            *("--dataset-name", "random", "--dataset-path", str(self._texts), "--tokenize-prompt"),
            *("--random-input-len", str(prompt), "--random-output-len", str(output), "--random-range-ratio", "1"),
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
            *(
                "--warmup-requests",
                str(concurrency if self._workload.warm else 1),
                "--flush-cache",
                "--seed",
                "1",
                "--disable-tqdm",
            ),
            *("--output-file", str(found), "--output-details"),
        ]

    def _run(self, jobs: list[list[str]], log: Path) -> None:
        listed = log.with_suffix(".json")
        listed.write_text(json.dumps(jobs))
        client = self._work / "bench_client.py"
        client.write_bytes(Path(bench_client.__file__).read_bytes())
        variables = {"PYTHONPATH": str(CPU_LAB), "SGLANG_USE_CPU_ENGINE": "1"} if self._host.cpu_lab else {}
        launch = Launch(
            (self._host.python, str(client), str(listed)), url="", variables={"HF_HUB_OFFLINE": "1", **variables}
        )
        placed = self._host.place(launch, folders=[], work=self._work)
        variables = {**our_environment(), **placed.variables}
        try:
            status = keeper.run_kept(placed.command, variables=variables, log=log, timeout_s=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServingError(f"bench_serving was not done after {_TIMEOUT_S:.0f} s", where=str(log)) from None
        if status:
            said = last_lines(log.read_text(errors="replace"))
            raise ServingError(
                f"bench_serving ended with status {status}; its log ends with\n{said}",
                where=str(log),
                hint="read the log",
            )


def _rates(runs: Sequence[dict[str, Any]], concurrency: int) -> Rates:
    def ms(key: str) -> Figure:
        return Figure.of([run[key] for run in runs], "ms")

    per_request = [1000 / run["median_tpot_ms"] for run in runs]
    return Rates(
        decode=Figure.of([concurrency * rate for rate in per_request], "tok/s"),
        per_request=Figure.of(per_request, "tok/s"),
        output=Figure.of([run["output_throughput"] for run in runs], "tok/s"),
        ttft_p50=ms("median_ttft_ms"),
        ttft_p95=ms("p95_ttft_ms"),
        inter_token_p50=ms("median_itl_ms"),
        inter_token_p95=ms("p95_itl_ms"),
    )


def _verdict(ratio: Figure | None) -> str | None:
    if ratio is None:
        return None
    if min(ratio.runs) > 1 + _NOTABLE:
        return "faster"
    return "slower" if max(ratio.runs) < 1 - _NOTABLE else "no difference"


def _piece(texts: Sequence[str], index: int, tokens: int) -> str:
    """Text for one prompt: long enough to be cut to `tokens` (a token is rarely more than eight characters), no two alike."""
    own, rest = texts[index % len(texts)], texts[(index * 7 + 1) % len(texts)]
    return f"{index}. {own}\n{rest}"[: 8 * tokens + 64]
