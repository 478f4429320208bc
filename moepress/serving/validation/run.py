"""The order of events.

    headers      what the server will ask for against what the files hold; wrong headers end here, nothing is booted
    candidate    boot → loads, memory, answers
    in turn      speed: candidate, baseline, baseline, candidate, …; on its first visit the baseline's memory and long
                 answers too
    servers off
    KV integrity where it is asked for: the candidate with the plug-in and without it, in turn
    reference    the answers scored by transformers' layers on the same weights
    gates        `conclude` turns all of it into verdicts and a result

A candidate that the server refuses because of what is in its files fails the gate `loads`. Anything else that stops a
server (no memory, a missing kernel, a taken port) is an error: nothing was judged. A baseline that does not come up costs
the comparisons, which are then not judged.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from moepress.calibration.text import default_documents
from moepress.convert.made_from import refuse_two_models
from moepress.errors import CheckpointError, PlanRefused, ServerDied, ServingError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import identify_family, text_config
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.serving.death import Cause
from moepress.serving.kv_integrity.trial import Trial, run_trial
from moepress.serving.load_proof import Problem
from moepress.serving.validation.bench_tokenizer import tokenizer_copy
from moepress.serving.validation.conclude import Measured, conclude
from moepress.serving.validation.headroom import SideMemory, measure_memory
from moepress.serving.validation.loads import Loads, after_boot, before_boot
from moepress.serving.validation.loops import LongAnswers
from moepress.serving.validation.machine import this_machine
from moepress.serving.validation.prompts import Prompt, load_prompts
from moepress.serving.validation.request import Request, Watcher
from moepress.serving.validation.result import Validation
from moepress.serving.validation.sanity import SMOKE_LENGTH, Asked, Length, Sanity, ask, judge_answers, long_answers
from moepress.serving.validation.sides import Name, Side, Stage
from moepress.serving.validation.speed import SMOKE, Speed, SpeedRun, Workload, visits

_TO_BLAME = frozenset(
    (
        Cause.UNKNOWN_TENSOR,
        Cause.WRONG_SHAPE,
        Cause.BAD_QUANTIZATION_CONFIG,
        Cause.MISSING_FILE,
        Cause.UNKNOWN_MODEL,
    )
)


def validate(request: Request, watcher: Watcher | None = None) -> Validation:
    """Run it.

    Raises:
        CheckpointError, PlanRefused: checkpoints, prompts or a server version that cannot be worked with; a baseline
            that is another model.
        ServingError: the candidate's server could not be started for a reason that is not the checkpoint's, or failed
            while it was measured.
    """
    return _Run(request, watcher or Watcher()).result()


class _Run:
    def __init__(self, request: Request, watcher: Watcher) -> None:
        self.request, self.watcher = request, watcher
        self.begun, self.clock = time.gmtime(), time.monotonic()
        self.machine = this_machine()
        self.candidate = open_checkpoint(request.out)
        self.source = None if request.baseline is None else open_checkpoint(request.baseline)
        if self.source is not None:
            refuse_two_models(self.candidate, self.source, option="--baseline")
        self.contract = _contract(request.version, self.candidate)
        self.inert = self.contract.kv_scales.names if self.contract.kv_scales.effect == "inert" else ()
        self.side = self._side("candidate", request.out, request.url, self.contract)
        self.baseline_side = None
        if request.baseline is not None and self.source is not None:
            theirs = _contract(request.version, self.source)
            self.baseline_side = self._side("baseline", request.baseline, request.baseline_url, theirs)
        self.remarks: list[str] = []
        self.loads: Loads | None = None
        self.memory: dict[Name, SideMemory] = {}
        self.baseline_is_lost = False
        self.prompts: list[Prompt] = []
        self.asked: Asked | None = None
        self.long_baseline: LongAnswers | None = None
        self.speed: Speed | None = None
        self.sanity: Sanity | None = None
        self.kv_integrity: Trial | None = None
        self.stopped = ""

    def result(self) -> Validation:
        self.loads = self._before()
        if self.loads.before and "loads" in self.request.asked:
            self.stopped = "the files are not what the server will ask for; nothing was booted"
        else:
            self._serve()
            self._guard()
            self._refer()
        return conclude(
            self.request,
            Measured(
                begun=self.begun,
                seconds=time.monotonic() - self.clock,
                machine=self.machine,
                smoke=self._smoke,
                side=self.side,
                baseline_side=self.baseline_side,
                loads=self.loads,
                memory=self.memory,
                speed=self.speed,
                sanity=self.sanity,
                kv_integrity=self.kv_integrity,
                remarks=self.remarks,
                stopped=self.stopped,
            ),
        )

    def _before(self) -> Loads:
        return before_boot(self.candidate, self.inert)

    def _side(self, name: Name, model: Path, url: str | None, contract: Contract) -> Side:
        flags = contract.launch_arguments(fp8_kv=self.request.fp8_kv)
        return Side(name, model, self.request.options, flags, url)

    def _serve(self) -> None:
        request = self.request
        sides = [side for side in (self.side, self.baseline_side) if side is not None]
        with Stage(
            sides,
            request.host,
            work=request.work,
            together=request.together,
            timeout_s=request.timeout_s,
            tell=self.watcher.tell,
        ) as stage:
            try:
                client = stage.client("candidate")
            except ServerDied as death:
                if death.cause not in _TO_BLAME:
                    raise
                self._refused(death)
                return
            _check_version(self.side, request.version)
            self._remember_memory(stage, "candidate", self.candidate)
            if "sanity" in request.asked:
                self.prompts = self._load_prompts()
                self.watcher.tell(f"asking {len(self.prompts)} prompts, twice, and for long answers")
                self.asked = ask(client, self.prompts, self._length)
            self._visit(stage)
        self.loads = after_boot(self._before(), self.candidate, self.side, self.inert)

    def _visit(self, stage: Stage) -> None:
        """Speed in turn, and whatever the baseline is asked besides."""
        run = self._speed_run() if "speed" in self.request.asked else None
        names: list[Name] = ["candidate"]
        if self.baseline_side is not None and self._baseline_is_needed():
            names.append("baseline")
        rounds = run[1].rounds if run is not None else 1
        for name in visits(names, rounds):
            if name == "baseline" and not self._baseline_is_up(stage):
                continue
            if run is not None:
                self.watcher.tell(f"measuring the {name}'s speed")
                run[0].visit(stage, name)
        if run is not None:
            self.speed = run[0].result()

    def _guard(self) -> None:
        """The same checkpoint with the KV-integrity plug-in and without it."""
        request = self.request
        if request.kv_integrity is None or self.stopped:
            return
        run = None if request.url is not None or request.host is None else self._speed_run("kv-integrity")
        if run is None or request.host is None:
            self.remarks.append("KV integrity: needs a server that is booted here, and a workload for it")
            return
        self.kv_integrity = run_trial(
            self.side,
            request.host,
            mode=request.kv_integrity,
            speed=run[0],
            rounds=run[1].rounds,
            work=request.work / "kv-integrity",
            together=request.together,
            timeout_s=request.timeout_s,
            tell=self.watcher.tell,
        )

    def _baseline_is_needed(self) -> bool:
        """Its speed, its memory, or whether it loops as well; its log-probabilities come from its weights alone."""
        loops = self.asked is not None and self.asked.long.looping > 0
        return loops or not {"speed", "memory"}.isdisjoint(self.request.asked)

    def _baseline_is_up(self, stage: Stage) -> bool:
        """Boots it if need be; on the first visit also memory and long answers. False: it does not come up."""
        if self.baseline_is_lost or self.source is None:
            return False
        try:
            client = stage.client("baseline")
        except ServingError as error:
            self.baseline_is_lost = True
            self.remarks.append(f"no baseline to compare with: {error.what}")
            return False
        if "baseline" not in self.memory:
            self._remember_memory(stage, "baseline", self.source)
            if self.prompts:
                self.long_baseline = long_answers(client, self.prompts, self._length)
        return True

    def _remember_memory(self, stage: Stage, name: Name, checkpoint: Checkpoint) -> None:
        side = stage.sides[name]
        here = self.machine.gpus[0].memory if self.machine.gpus and stage.is_booted_here(name) else None
        self.memory[name] = measure_memory(side, stage.client(name), checkpoint, here)

    def _speed_run(self, part: str = "") -> tuple[SpeedRun, Workload] | None:
        """`part`: a folder of its own inside the work folder."""
        request = self.request
        work = request.work / part
        work.mkdir(parents=True, exist_ok=True)
        if request.host is None:
            self.remarks.append("speed: no Python with SGLang here to run bench_serving with")
            return None
        base = SMOKE if self._smoke else Workload()
        asked = replace(base, concurrencies=request.concurrencies, rounds=request.rounds)
        workload = asked.fitted(self._longest)
        try:
            tokenizer = tokenizer_copy(
                request.out, work / "tokenizer", trust_remote_code=request.options.trust_remote_code
            )
        except CheckpointError as error:
            self.remarks.append(f"speed: {error.what} ({error.hint})")
            return None
        texts = [document.text or "" for document in default_documents()]
        return SpeedRun(request.host, workload, tokenizer=tokenizer, work=work, texts=texts), workload

    def _load_prompts(self) -> list[Prompt]:
        request, config = self.request, self.candidate.config
        vocabulary = int(text_config(identify_family(config), config)["vocab_size"])
        context = self._longest
        return load_prompts(
            request.out,
            request.prompts,
            longest=None if context is None else max(1, context - request.tokens - 8),
            vocabulary=vocabulary,
            trust_remote_code=request.options.trust_remote_code,
        )

    def _refer(self) -> None:
        if self.asked is None:
            return
        self.watcher.tell("the reference: transformers' layers on the same weights")
        self.sanity = judge_answers(
            self.asked,
            self.prompts,
            self.candidate,
            self.source,
            long_baseline=self.long_baseline,
            layer_done=self.watcher.layer,
        )

    def _refused(self, death: ServerDied) -> None:
        """The server does not take the files."""
        problem = Problem("checkpoint that the server refuses", (str(self.request.out),), death.what)
        self.loads = replace(self._before(), not_proven="the server died", log=(problem,))
        self.stopped = "the server does not load the candidate"

    @property
    def _length(self) -> Length:
        length = replace(SMOKE_LENGTH if self._smoke else Length(), answers=self.request.tokens)
        most = max((len(prompt.tokens) for prompt in self.prompts), default=0)
        return (
            length
            if self._longest is None
            else replace(length, long=max(1, min(length.long, self._longest - most - 8)))
        )

    @property
    def _longest(self) -> int | None:
        """Tokens of a request, prompt and answer. In the CPU lab attention is dense: not longer than what an indexer picks."""
        found = [self.side.context]
        if self.request.host is not None and self.request.host.cpu_lab:
            config = self.candidate.config
            found.append(text_config(identify_family(config), config).get("index_topk"))
        return min((int(each) for each in found if each), default=None)

    @property
    def _smoke(self) -> bool:
        in_lab = self.request.host is not None and self.request.host.cpu_lab
        return in_lab or self.side.info.get("device") == "cpu" or not (self.side.info or self.machine.gpus)


def _contract(version: str, checkpoint: Checkpoint) -> Contract:
    return contract_for("sglang", version, identify_family(checkpoint.config).key)


def _check_version(side: Side, version: str) -> None:
    """A container or a URL says its version only when it is up."""
    there = str(side.info.get("version", "")).partition("+")[0]
    if there and there != version.partition("+")[0]:
        raise PlanRefused(
            f"the server is SGLang {there}, and what it reads is known for {version}",
            where=side.url or side.name,
            hint=f"run SGLang {version}, or name the other with --set serving.version={there} if a contract for it exists",
        )
