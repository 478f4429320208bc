"""Every command of README, docs and help texts that can run on a machine without GPUs does, and ends with exit code 0.

A page's commands run in their order, in this process. What stands in them for something big is replaced by something tiny:

    /models/…, SRC, OUT, COPY, …     folders of the page's own: a tiny checkpoint of the family that the name or the recipe says
                                     (`SOURCES`), or what was pressed from it (`OUTPUTS`), made when a command needs it
    moonshotai/…, zai-org/…, ORG/…   the same tiny checkpoints on the local Hub
    press.pem, held-out.txt, …       files made for it (`FILES`)
    --recipe R                       gets ``serving.tensor_parallel=1``, as tiny experts cannot be split eight ways; calibration
                                     and fidelity get two short samples
    doctor                           gets ``--offline``

What does not run is named in `NOT_RUN`, with the reason; each entry there must still be needed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from moepress.cli import app
from moepress.convert.run import convert
from moepress.errors import MoepressError
from moepress.recipe import load_recipe
from tests.hub.conftest import hub  # noqa: F401
from tests.hub.local_hub import LocalHub
from tests.pressing import RECIPES, press
from tests.stretched import stretched
from tests.test_docs import EXAMPLE_LINES, FOUND, ROOT
from tests.tiny_checkpoints import TinyCheckpoint

NOT_RUN = {
    r"make ": "a target of the Makefile: most take minutes, and some run these tests",
    r"python -m fuzz": "tests/formats/test_fuzz.py runs a part of every campaign; coverage needs atheris",
    r"python -m benchmarks\.h200": "needs an H200; tests/test_h200.py runs its smoke",
    r"python -m benchmarks\.bench_kv_integrity": "needs a GPU",
    r"python -m moepress\.environments": "installs gigabytes: tests/test_environments.py",
    r"python -m pytest": "tests of this suite",
    r"python -m sglang": "needs SGLang and a checkpoint of full size",
    r"moepress validate": "boots SGLang: tests/serving/test_validate.py",
    r"moepress evaluate": "boots SGLang or asks servers that are up: tests/evaluate",
    r"moepress serve (?!.*--print)": "a server that stays: tests/serving/test_serve.py",
    r"moepress convert .*--workers": "starts Ray: tests/cluster",
    r"moepress convert .*--device cuda": "needs a GPU",
    r"moepress run ": "every other command in processes of their own: tests/hub/test_commands.py",
    r"moepress --install-completion": "changes the shell's own files",
    r"moepress .*tiny-kimi-int4|moepress pull press/tiny-kimi": "lines of the example card; its numbers are the run that made it",
}
"""Patterns of commands that are only parsed (`test_docs`), and why."""

SOURCES = {
    "/models/Kimi-K2-Instruct": "kimi",
    "/models/Kimi-K2-FP8": "kimi",
    "/models/GLM-5.2-FP8": "glm5",
    "/models/Qwen3-30B-A3B-FP8": "qwen3_moe",
    "/data/src": "glm5",
}
OUTPUTS = {
    "/models/Kimi-K2-INT4": "kimi",
    "/models/GLM-5.2-INT4": "glm5",
    "/models/Qwen3-30B-A3B-INT4": "qwen3_moe",
    "/models/Kimi-K2-prefill": "prefill",
    "/data/out": "glm5",
    "Kimi-K2-INT4": "kimi",
    "OUT": "kimi",
    "COPY": "kimi",
    "DECODE": "kimi",
    "PREFILL": "prefill",
}
ON_THE_HUB = {
    "moonshotai/Kimi-K2-Instruct": "kimi",
    "zai-org/GLM-5.2-FP8": "glm5",
    "Qwen/Qwen3-30B-A3B-FP8": "qwen3_moe",
    "ORG/NAME": "kimi",
}
FILES = {
    "press.pem": "key",
    "press.pem.pub": "key",
    "held-out.txt": "text",
    "held-out.jsonl": "text",
    "config.json": "config",
    "my-recipe.yaml": "recipe",
}
MADE_BY = {"convert": 1, "pull": 1}
"""Commands that make the folder that is their argument of this number: it must not be there before."""

CALIBRATED = ("weights.algorithm=gptq", "kv_cache.scales=folded")
SHORT = ("--set", "calibration.samples=2", "--set", "calibration.length=32", "--set", "kv_cache.samples=2")
FOLDED = {"docs/guides/prefill-decode.md", "docs/concepts/kv-scales.md"}
"""Pages whose outputs have folded KV scales."""

LINES: dict[str, list[str]] = {}
for _page, _line in [*FOUND, *EXAMPLE_LINES]:
    if not _page.startswith("docs/reference"):  # the reference repeats the help texts
        LINES.setdefault(_page, []).append(_line)


def why_not(line: str) -> str:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), "")


def to_run() -> dict[str, list[str]]:
    """What runs, by page; a line that stands on several runs for the first."""
    pages: dict[str, list[str]] = {}
    seen: set[str] = set()
    for page, lines in LINES.items():
        fresh = [line for line in lines if not why_not(line) and " ".join(line.split()) not in seen]
        seen.update(" ".join(line.split()) for line in fresh)
        if fresh:
            pages[page] = fresh
    return pages


RUN = to_run()


def test_what_is_not_run_is_named_and_nothing_is_named_in_vain() -> None:
    every = [line for lines in LINES.values() for line in lines] + [line for _, line in FOUND]
    assert [p for p in NOT_RUN if not any(re.match(p, line) for line in every)] == []
    assert sum(map(len, RUN.values())) > 60


class Page:
    """The folders and files of one page."""

    def __init__(
        self, folder: Path, server: LocalHub, tiny: Callable[[str], TinyCheckpoint], made: Path, name: str
    ) -> None:
        self.folder, self.hub, self.tiny, self.made, self.name = folder, server, tiny, made, name

    def replaced(self, line: str) -> list[str]:
        """The words that are run, everything that they name made."""
        words = shlex.split(line)[1:]
        recipe = next((words[i + 1] for i, word in enumerate(words) if word in ("--recipe", "-r")), "")
        family = next((name for name, shipped in RECIPES.items() if shipped == recipe), "kimi")
        made = MADE_BY.get(words[0])
        arguments = -1
        told = False
        done = []
        for word in words[1:]:
            arguments += not word.startswith("-") and not told
            new = self._place(word, family, is_made=arguments == made and not told, publishes=words[0] == "publish")
            told = word.startswith("-") and word not in (
                "--print",
                "--stream",
                "--delete-source",
                "--mtp",
                "--dry-run",
                "--json",
            )
            done.append(new)
        words = [words[0], *done]
        if words[0] == "doctor":
            words.append("--offline")
        if words[0] in ("plan", "convert") and "tests/configs" not in line and "tensor_parallel" not in line:
            words += ["--set", "serving.tensor_parallel=1"]
        if "tests/configs" not in line:
            words = [re.sub(r"^serving\.tensor_parallel=.*", "serving.tensor_parallel=1", word) for word in words]
        if words[0] == "fidelity":
            words += ["--samples", "2", "--length", "64"]
        if words[0] == "convert" and any(word in CALIBRATED for word in words):
            words += SHORT
        return words

    def _place(self, word: str, family: str, *, is_made: bool, publishes: bool) -> str:
        if word == "/models":
            return str(self.folder)
        if word.startswith(("tests/", "examples/")):
            return str(ROOT / word)
        name, _, _ = word.partition("@")
        if name in ON_THE_HUB:
            if name not in self.hub.repositories and not publishes:
                self.hub.repository(name).add_folder(self.tiny(ON_THE_HUB[name]).folder)
            return word
        if word in FILES:
            return str(self._file(FILES[word], self.folder / word))
        kind = "source" if word in SOURCES or word == "SRC" else "output" if word in OUTPUTS else ""
        if not kind:
            return word
        path = self.folder / word.strip("/").replace("/", "-")
        if is_made:
            shutil.rmtree(path, ignore_errors=True)
        elif not path.exists():
            which = SOURCES.get(word, family) if kind == "source" else OUTPUTS[word]
            shutil.copytree(
                self._source(which) if kind == "source" else self._output(which), path, copy_function=os.link
            )
        return str(path)

    def _source(self, family: str) -> Path:
        if family != "kimi" or self.name not in FOLDED:
            return self.tiny(family).folder
        folder = self.made / "kimi-stretched"  # with a cache that needs scales
        return folder if folder.exists() else stretched("kimi", folder, experts=4).folder

    def _output(self, family: str) -> Path:
        folded = self.name in FOLDED
        made = self.made / (f"{family}-folded" if folded else family)
        if made.exists():
            return made
        if family == "prefill":
            recipe = load_recipe("prefill", ["serving.tensor_parallel=1"])
            convert(self._source("kimi"), made, recipe, same_kv_as=str(self._output("kimi")))
        else:
            changes = ("kv_cache.scales=folded", *SHORT[1::2]) if folded and family == "kimi" else ()
            press(self._source(family), made, family, *changes)
        return made

    def _file(self, kind: str, path: Path) -> Path:
        if path.exists():
            return path
        if kind == "key":
            key = ec.generate_private_key(ec.SECP256R1())
            secret = path.with_name(path.name.removesuffix(".pub"))
            secret.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
            public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            Path(f"{secret}.pub").write_bytes(key.public_key().public_bytes(*public))
        elif kind == "text":
            lines = [f"Line {i} of a text that nobody has seen before." for i in range(100)]
            plain = "\n".join(lines)
            path.write_text(f'{{"text": "{" ".join(lines)}"}}\n' if path.suffix == ".jsonl" else plain)
        elif kind == "config":
            shutil.copy(ROOT / "tests" / "configs" / "glm_5.2_fp8.json", path)
        else:
            shutil.copy(ROOT / "moepress" / "recipes" / "kimi-k2.yaml", path)
        return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where outputs are pressed once, to be linked into the pages' folders."""
    return tmp_path_factory.mktemp("pressed")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(
    page: str,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub: LocalHub,  # noqa: F811
    tiny: Callable[[str], TinyCheckpoint],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Page(tmp_path, hub, tiny, made, page)
    for line in RUN[page]:
        words = place.replaced(line)
        try:
            result = CliRunner().invoke(app, words)
        finally:
            huggingface_hub.close_session()
        error = result.exception
        said = (
            "".join(traceback.format_exception(error))
            if not isinstance(error, MoepressError | SystemExit | None)
            else ""
        )
        assert result.exit_code == 0, f"{line}\n{words}\n{result.stdout}\n{result.stderr}\n{error}\n{said}"
        assert "Traceback" not in result.stderr
