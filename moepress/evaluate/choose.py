"""From the words of ``--tasks`` to measurements, with everything loaded that could be missing, before a server starts.

fidelity      KL, top-1 agreement and perplexity of next tokens, per domain of text
drift         greedy continuations side by side
tool-calls    single, parallel, over several turns
humaneval, mbpp                           executed in the sandbox
gsm8k-100                                 word problems, from a package or a file
gsm8k, mmlu, arc_challenge, wikitext      by lm-eval; lm:NAME or lm:NAME:METRIC for any other of its tasks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from moepress.calibration.text import Tokenizer, load_tokenizer
from moepress.errors import EvaluateError
from moepress.evaluate.code_tasks import HUB, load_problems
from moepress.evaluate.lm_eval_process import TASKS, LmSettings, find_lm_eval, task_named
from moepress.evaluate.measurements import (
    Code,
    DriftOverLength,
    LmEval,
    Measurement,
    NextTokens,
    ToolCalls,
    WordProblems,
)
from moepress.evaluate.sandbox import prove
from moepress.evaluate.texts import cut_windows, domain_documents
from moepress.evaluate.tool_cases import ToolCase, read_bfcl, read_cases, shipped_cases
from moepress.evaluate.tool_worlds import WorldCase, read_worlds
from moepress.evaluate.word_problems import NAME as WORD_PROBLEMS
from moepress.evaluate.word_problems import load_word_problems
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.families import identify_family, text_config
from moepress.formats.side_files import CONFIG_NAME

T = TypeVar("T")
DEFAULT_TASKS = ("fidelity", "drift", "tool-calls")


@dataclass(frozen=True)
class Settings:
    """What is measured and how much of it. The defaults are the command's.

    Attributes:
        tasks: words as in the module docstring.
        windows, length: of text, per domain. top_k: tokens named at each position.
        texts: domain -> file, in place of the shipped text.
        drift_prompts, drift_tokens: greedy continuations, and how long.
        tool_cases, bfcl: a file of cases, a folder of BFCL's; both None = the shipped ones.
        data: task -> file, for code tasks and gsm8k-100.
        chat: prompts go through the chat template (False: a base model).
        max_tokens: of an answer to a task, at most half of the model's context. limit: first prompts of a task only.
        lm_eval_python, lm_tasks: interpreter with lm-eval, folder of further task definitions.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    windows: int = 24
    length: int = 256
    top_k: int = 64
    texts: Mapping[str, Path] = field(default_factory=dict)
    drift_prompts: int = 32
    drift_tokens: int = 256
    tool_cases: Path | None = None
    bfcl: Path | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    chat: bool = True
    max_tokens: int = 1024
    limit: int | None = None
    lm_eval_python: str | None = None
    lm_tasks: Path | None = None
    trust_remote_code: bool = False


def known_tasks() -> list[str]:
    """Every word but ``lm:NAME``."""
    return [*DEFAULT_TASKS, *HUB, WORD_PROBLEMS, *TASKS]


def choose(out: Path, settings: Settings, *, folder: Path) -> list[Measurement]:
    """The measurements, ready to be asked.

    Args:
        out: the checkpoint, for its tokenizer and configuration.
        folder: where finished runs of lm-eval are kept.

    Raises:
        MoepressError: a word that is no task, or anything that a task needs and is not there.
    """
    unknown = [t for t in settings.tasks if t not in known_tasks() and task_named(t) is None]
    if unknown or not settings.tasks:
        raise EvaluateError(
            f"no such task: {', '.join(unknown) or '(none given)'}",
            where="--tasks",
            hint=f"there are {', '.join(known_tasks())}, and lm:NAME for any task of lm-eval",
        )
    made = _Maker(out, settings, folder)
    return [made.measurement(task) for task in dict.fromkeys(settings.tasks)]


class _Maker:
    """Makes measurements; tokenizer and windows are loaded once, when the first needs them."""

    def __init__(self, out: Path, settings: Settings, folder: Path) -> None:
        self.out, self.settings, self.folder = out, settings, folder
        self._tokenizer: Tokenizer | None = None

    def measurement(self, task: str) -> Measurement:
        settings = self.settings
        if task == "fidelity":
            return NextTokens(self.windows(settings.windows, settings.length), settings.top_k)
        if task == "drift":
            return DriftOverLength(self.prompts(), settings.drift_tokens)
        if task == "tool-calls":
            return ToolCalls(self.cases(), self.answer_tokens())
        if task in HUB:
            prove()
            problems = load_problems(task, settings.data.get(task))
            return Code(task, _first(problems, settings.limit), settings.chat, self.answer_tokens())
        if task == WORD_PROBLEMS:
            numbers = load_word_problems(settings.data.get(task))
            return WordProblems(_first(numbers, settings.limit), self.answer_tokens())
        return self.lm_eval(task)

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.out, trust_remote_code=self.settings.trust_remote_code)
        return self._tokenizer

    def windows(self, count: int, length: int) -> dict[str, list[list[int]]]:
        config = open_checkpoint(self.out).config
        vocabulary = int(text_config(identify_family(config), config)["vocab_size"])
        documents = domain_documents(self.settings.texts)
        return cut_windows(documents, self.tokenizer(), windows=count, length=length, vocab_size=vocabulary)

    def prompts(self) -> list[list[int]]:
        """The beginnings of windows, the domains in turn."""
        domains = max(1, len(self.settings.texts) or 4)
        each = -(-self.settings.drift_prompts // domains)
        by_domain = self.windows(each, 64).values()
        return [window for several in zip(*by_domain, strict=True) for window in several][: self.settings.drift_prompts]

    def cases(self) -> list[ToolCase | WorldCase]:
        settings, found = self.settings, list[ToolCase | WorldCase]()
        if settings.tool_cases is not None:
            found += _first(read_cases(settings.tool_cases), settings.limit)
        if settings.bfcl is not None:  # its categories are tasks of their own
            found += read_bfcl(settings.bfcl, limit=settings.limit)
            found += read_worlds(settings.bfcl, settings.limit)
        return found or list(_first(shipped_cases(), settings.limit))

    def lm_eval(self, name: str) -> Measurement:
        task = task_named(name)
        if task is None:
            raise ValueError(f"{name!r} is no task of lm-eval")
        python, version = find_lm_eval(self.settings.lm_eval_python)
        tokenizer = self.tokenizer()
        settings = LmSettings(
            limit=self.settings.limit,
            max_tokens=self.answer_tokens(),
            max_length=self.longest(),
            chat=self.settings.chat,
            include=str(self.settings.lm_tasks.resolve()) if self.settings.lm_tasks else None,
        )
        return LmEval(
            task,
            settings,
            python,
            version,
            self.out,
            self.folder,
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        )

    def answer_tokens(self) -> int:
        """A server refuses a question that has no room for its answer: half of a small model's context is the question's."""
        known = (self.out / CONFIG_NAME).is_file()
        return min(self.settings.max_tokens, max(1, self.longest() // 2)) if known else self.settings.max_tokens

    def longest(self) -> int:
        """Tokens a request may have: the model's context, as far as few-shot prompts need it."""
        config = open_checkpoint(self.out).config
        context = text_config(identify_family(config), config).get("max_position_embeddings")
        return min(32_768, int(context)) if context else LmSettings.max_length


def _first(values: Sequence[T], limit: int | None) -> list[T]:
    return list(values[:limit])
