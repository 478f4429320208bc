"""Steps one after the other, each a command that could be typed, with one journal: ``OUT/.moepress/run.json``.

    {"recipe": …, "source": …, "to": …,
     "steps": {"convert": {"command": "moepress convert …", "outcome": "passed", "why": "", "output": digest, "finished": …}}}

Every step is a process of its own: memory is given back, and what a step prints is what its command prints. A step that
passed is not run again while its command and the output's digest are what they were. The first that fails ends the chain;
one that is not run leaves a line that says why. Outcomes: ``passed``, ``failed`` (checked and found wanting), ``stopped``
(could not be done), ``not judged`` (ran, and had too little to judge by: never the same as passed), ``not run``.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moepress.errors import MoepressError
from moepress.formats.atomic import atomic_write_json
from moepress.results import REPORT_NAME, output_digest, read_results

JOURNAL = Path(".moepress") / "run.json"
JUDGED = ("verify", "validate", "evaluate")
"""Steps whose verdict is kept as a result beside the output."""

AFTER_CONVERT = (*JUDGED, "publish")


@dataclass(frozen=True)
class Step:
    """A command's words after ``moepress``; with ``not_run``, why it is left out."""

    name: str
    words: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def command(self) -> str:
        return shlex.join(("moepress", *self.words)) if self.words else ""


@dataclass
class RunJournal:
    """What became of each step. One run owns a folder: another recipe, source or target is refused."""

    out: Path
    head: dict[str, str]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self, step: Step, outcome: str, why: str = "", data: Any = None) -> None:
        """Keeps a step's outcome. ``data``: what the step printed as JSON."""
        entry: dict[str, Any] = {"command": step.command, "outcome": outcome, "why": why}
        entry["output"] = output_digest(self.out) if (self.out / REPORT_NAME).exists() else None
        entry["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.steps[step.name] = entry if data is None else {**entry, "data": data}
        path = self.out / JOURNAL
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, {**self.head, "steps": self.steps})

    def passed(self, step: Step) -> bool:
        """The step passed in an earlier run, by this command, on the output as it now is."""
        entry = self.steps.get(step.name)
        if entry is None or entry["command"] != step.command or entry["outcome"] not in ("passed", "not judged"):
            return False
        digest = output_digest(self.out) if (self.out / REPORT_NAME).exists() else None
        if step.name in AFTER_CONVERT or step.name == "convert":
            return digest is not None and entry["output"] == digest
        return digest is not None  # pull and plan: their work is in the finished output


def open_journal(out: Path, head: dict[str, str]) -> RunJournal:
    """The folder's journal, or a new one.

    Raises:
        MoepressError: the folder belongs to a run with another recipe, source or target, or its journal is damaged.
    """
    path = out / JOURNAL
    if not path.exists():
        return RunJournal(out, head)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        other = [f"{name} {data[name]!r} → {value!r}" for name, value in head.items() if data[name] != value]
        steps = dict(data["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoepressError(f"not a journal of ours: {error!r}", where=str(path), hint=f"rm {path}") from error
    if other:
        raise MoepressError(
            f"the folder belongs to another run: {'; '.join(other)}",
            where=str(path),
            hint="choose another folder with --out, or remove the journal to go on in this one",
        )
    return RunJournal(out, head, steps)


def run_steps(journal: RunJournal, steps: list[Step], *, as_json: bool, say: Callable[[str], None]) -> int:
    """Runs what has not passed yet, in order, up to the first failure.

    Args:
        as_json: steps print JSON, which goes into the journal instead of onto the terminal.
        say: is told what happens.

    Returns:
        The exit code of the chain: 0, or that of the step that ended it.
    """
    for number, step in enumerate(steps, start=1):
        label = f"[{number}/{len(steps)}] {step.name}"
        if step.not_run:
            say(f"{label}: not run: {step.not_run}")
            journal.record(step, "not run", step.not_run)
            continue
        if journal.passed(step):
            say(f"{label}: {journal.steps[step.name]['outcome']} before")
            continue
        say(f"{label}: {step.command}")
        code, data = _run(step, as_json)
        if code in (130, -2, -15):
            journal.record(step, "stopped", "by a signal")
            return 130
        outcome = _outcome(journal.out, step, code)
        journal.record(step, outcome, "" if code == 0 else f"exit code {code}", data)
        if outcome in ("failed", "stopped"):
            left = ", ".join(later.name for later in steps[number:] if not later.not_run)
            say(f"{label}: {outcome}" + (f"; not reached: {left}" if left else ""))
            return code
    return 0


def _outcome(out: Path, step: Step, code: int) -> str:
    if step.name in JUDGED and code in (0, 1) and (out / REPORT_NAME).exists():
        fresh, _ = read_results(out)
        verdict = (fresh.get(step.name) or {}).get("verdict")
        if verdict == "not judged":
            return "not judged"
    return "passed" if code == 0 else "failed" if code == 1 else "stopped"


def _run(step: Step, as_json: bool) -> tuple[int, Any]:
    words = [sys.executable, "-m", "moepress.cli", *step.words, *(["--json"] if as_json else [])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE if as_json else None)
    try:
        printed, _ = process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130, None
    try:
        return process.returncode, json.loads(printed) if as_json and printed else None
    except ValueError:
        return process.returncode, None
