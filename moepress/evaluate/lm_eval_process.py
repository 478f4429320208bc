"""lm-eval as a process: GSM8K, MMLU, ARC-Challenge, perplexity, or any other task it knows, scored prompt by prompt.

    python -m lm_eval run --model local-completions … --log_samples   ──►   samples_*.jsonl   ──►   one score a prompt

lm-eval lives in an environment of its own choice (its pins are its own) and is only ever run. It keeps every answer in a
cache file as it arrives, so a stopped run resumes; a finished one is not run again. The source's samples and the
candidate's are paired by task and document, hence differences are judged on the same prompts.

Its samples hold no finish reason. An answer counts as cut off when it has as many tokens as it was allowed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moepress.environments import command
from moepress.errors import EvaluateError
from moepress.evaluate.answers import Contestant
from moepress.serving.keeper import run_kept

PYTHON_VARIABLE = "MOEPRESS_LM_EVAL_PYTHON"
DEFAULT_PYTHON = Path(".venv-lm-eval/bin/python")
_NO_DATA = ("on the Hub", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "NameResolutionError")
_TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class LmTask:
    """A task of lm-eval and which of its figures is judged.

    Attributes:
        name: what moepress calls it.
        task: what lm-eval calls it.
        metric: in its samples; empty = the first one there.
        answer_filter: which of its answer filters; empty = the first one there.
        fewshot: examples in the prompt; None = the task's own number.
        generates: answers are generated, hence can be cut off.
    """

    name: str
    task: str
    metric: str = ""
    answer_filter: str = ""
    fewshot: int | None = None
    generates: bool = False


TASKS = {
    "gsm8k": LmTask("gsm8k", "gsm8k", "exact_match", "flexible-extract", 5, generates=True),
    "mmlu": LmTask("mmlu", "mmlu", "acc", fewshot=5),
    "arc_challenge": LmTask("arc_challenge", "arc_challenge", "acc_norm", fewshot=25),
    "wikitext": LmTask("wikitext", "wikitext", "word_perplexity"),
}
"""The tasks with names of their own. `lm:NAME` or `lm:NAME:METRIC` takes any other."""


@dataclass(frozen=True)
class LmSettings:
    """How lm-eval is run; all of it is part of what a finished run is kept under.

    Attributes:
        limit: first prompts of each (sub)task only.
        max_tokens: of a generated answer.
        max_length: longest request, in tokens; lm-eval cuts longer ones on the left.
        chat: prompts go through the chat template.
        include: folder with further task definitions.
    """

    limit: int | None = None
    max_tokens: int = 1024
    max_length: int = 8192
    chat: bool = True
    include: str | None = None


@dataclass(frozen=True)
class LmSamples:
    """Scores of one model: (subtask, document) -> score, or (log-likelihood, weight) for a perplexity."""

    scores: dict[tuple[str, str], float | tuple[float, float]]
    metric: str
    truncated: int
    version: str


class _CannotKeep(EvaluateError):
    """lm-eval's own cache of answers fails on this kind of task: it is run again without, and then whole or not at all."""


def task_named(name: str) -> LmTask | None:
    """The task that a word of ``--tasks`` means, or None when it is none of lm-eval's."""
    if name.startswith("lm:"):
        task, _, metric = name[3:].partition(":")
        return LmTask(task, task, metric, generates=True)
    return TASKS.get(name)


def find_lm_eval(python: str | None = None) -> tuple[Path, str]:
    """The Python to run lm-eval with, and lm-eval's version.

    Args:
        python: an interpreter; None = MOEPRESS_LM_EVAL_PYTHON, else ``.venv-lm-eval``, else the one that runs moepress.

    Raises:
        EvaluateError: lm-eval is not installed there.
    """
    named = python or os.environ.get(PYTHON_VARIABLE) or (str(DEFAULT_PYTHON) if DEFAULT_PYTHON.exists() else "")
    found = shutil.which(named or sys.executable)
    hint = f"{command('lm-eval')} makes .venv-lm-eval here; or name a Python with --lm-eval-python or {PYTHON_VARIABLE}"
    if found is None:
        raise EvaluateError("no such Python", where=named, hint=hint)
    code = "import transformers; from importlib.metadata import version; print(version('lm_eval'))"
    try:
        asked = subprocess.run(
            [found, "-I", "-c", code], capture_output=True, text=True, timeout=300, check=False, env=_environment(None)
        )
    except subprocess.TimeoutExpired as error:
        raise EvaluateError("this Python did not import transformers within 300 s", where=found, hint=hint) from error
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise EvaluateError(f"lm-eval cannot be run: {last}", where=found, hint=hint)
    return Path(found), asked.stdout.strip()


def run_lm_eval(
    who: Contestant,
    task: LmTask,
    settings: LmSettings,
    *,
    python: Path,
    version: str,
    tokenizer: Path,
    folder: Path,
    count_tokens: Callable[[str], int],
) -> LmSamples:
    """One task for one model, from a finished run where there is one.

    Args:
        who: the model; its server is started only when there is work.
        tokenizer: the checkpoint's folder.
        folder: runs are kept below it.
        count_tokens: tokens of a text, to see which answers were cut off.

    Raises:
        EvaluateError: lm-eval failed; its log is named.
    """
    key = [who.identity, version, asdict(task), asdict(settings)]
    run = folder / f"{task.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    done = run / "done.json"
    if who.watcher is not None:
        who.watcher.start(f"{who.role}: lm-eval {task.name}", 1)
    if not done.exists():
        run.mkdir(parents=True, exist_ok=True)
        for old in run.rglob("samples_*.jsonl"):
            old.unlink()
        command = _command(who, task, settings, python=python, tokenizer=_tokenizer_folder(tokenizer, run), run=run)
        try:
            _execute([*command, "--use_cache", str(run / "requests")], who, run)
        except _CannotKeep:
            _execute(command, who, run)
        done.write_text(json.dumps({"task": task.task, "lm_eval": version}))
    samples = _read_samples(run, task, settings, count_tokens, version)
    if who.watcher is not None:
        who.watcher.add(1)
    return samples


def _command(
    who: Contestant, task: LmTask, settings: LmSettings, *, python: Path, tokenizer: Path, run: Path
) -> list[str]:
    endpoint = who.endpoint()
    arguments = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url}/v1/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": who.concurrency,
        "max_retries": 5,
        "timeout": int(endpoint.timeout_s),
        "max_length": settings.max_length,
    }
    command = [str(python), "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", task.task, "--log_samples", "--output_path", str(run)]
    if task.fewshot is not None:
        command += ["--num_fewshot", str(task.fewshot)]
    if task.generates:
        command += ["--gen_kwargs", f"temperature=0,max_gen_toks={settings.max_tokens}"]
    if settings.limit is not None:
        command += ["--limit", str(settings.limit)]
    if settings.chat and task.generates:
        command.append("--apply_chat_template")
    if settings.include:
        command += ["--include_path", settings.include]
    return command


def _execute(command: Sequence[str], who: Contestant, run: Path) -> None:
    log = run / "lm_eval.log"
    status = run_kept(command, variables=_environment(who.endpoint().api_key), log=log)
    if status != 0:
        text = log.read_text(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")[-300:]
        if "hash_args" in text and "'NoneType' object is not iterable" in text:
            raise _CannotKeep("lm-eval 0.4.13 cannot keep answers of rolling log-likelihoods", where=str(log))
        if any(sign in text for sign in _NO_DATA):
            raise EvaluateError(
                f"lm-eval could not load its data from the Hub: {last}",
                where=str(log),
                hint="go online once so that the data is cached, or leave the task out",
            )
        raise EvaluateError(f"lm-eval ended with status {status}: {last}", where=str(log), hint="read its log")


def _environment(api_key: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": api_key or "none"}


def _tokenizer_folder(checkpoint: Path, run: Path) -> Path:
    """A folder with the tokenizer alone: beside a config.json of an unknown model type, libraries refuse to load it."""
    if not (checkpoint / "tokenizer.json").is_file():
        return checkpoint
    folder = run / "tokenizer"
    folder.mkdir(exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config.pop("auto_map", None)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _read_samples(
    run: Path, task: LmTask, settings: LmSettings, count_tokens: Callable[[str], int], version: str
) -> LmSamples:
    scores: dict[tuple[str, str], float | tuple[float, float]] = {}
    metric, answer_filter, truncated = task.metric, task.answer_filter, 0
    files = sorted(run.rglob("samples_*.jsonl"))
    for file in files:
        subtask = file.name.removeprefix("samples_").rpartition("_")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            metric = metric or row["metrics"][0]
            answer_filter = answer_filter or str(row.get("filter", ""))
            if metric not in row:
                raise EvaluateError(
                    f"lm-eval's samples of {task.task} have no metric {metric!r}; they have {', '.join(row['metrics'])}",
                    where=str(file),
                    hint=f"lm:{task.task}:METRIC",
                )
            if str(row.get("filter", "")) != answer_filter and "filter" in row:
                continue
            value = row[metric]
            scores[subtask, str(row["doc_id"])] = (
                (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)
            )
            if task.generates and isinstance(text := row["resps"][0][0], str):
                truncated += count_tokens(text) >= settings.max_tokens
    if not scores:
        raise EvaluateError(
            f"lm-eval left no samples of {task.task}", where=str(run), hint=f"rm -r {run} and run again"
        )
    return LmSamples(scores, metric, truncated, version)
