"""The command line as a user meets it: processes, exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moepress.cli import COMMANDS, app
from tests.pressing import RECIPES
from tests.tiny_checkpoints import TinyCheckpoint, build

ROOT = Path(__file__).resolve().parents[1]


def moepress(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moepress.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or ROOT,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
    )


def test_help_imports_nothing_heavy() -> None:
    """`moepress --help` answers in 0.3 s on a quiet machine; what would make it slow is what it imports."""
    code = (
        "import sys; from moepress.cli import app\n"
        "try: app(['--help'], standalone_mode=False)\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'pydantic', 'safetensors', 'compressed_tensors'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
    assert "convert" in done.stdout


def test_headers_are_read_without_torch(tiny: Callable[[str], TinyCheckpoint]) -> None:
    """inspect and plan's arithmetic start fast: no torch, no numba."""
    code = (
        "import sys\nfrom moepress.formats.checkpoint import open_checkpoint\n"
        "from moepress.formats.inspection import inspect_checkpoint\n"
        "from moepress.convert.plan import make_plan\nfrom moepress.recipe import load_recipe\n"
        f"c = open_checkpoint({str(tiny('kimi').folder)!r}); inspect_checkpoint(c)\n"
        "make_plan(c, load_recipe('kimi-k2', ['serving.tensor_parallel=1']))\n"
        "print(sorted({'torch', 'numba', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_names_that_look_like_markup_or_need_quotes_come_through_whole(tmp_path: Path) -> None:
    """What rich would read as markup, or stumble over, and what a shell would split: printed as it is, quoted in commands."""
    source, out = tmp_path / "Qwen [v1] é [/b]", tmp_path / "out [bold]"
    build("qwen3_moe", source)
    steps = (
        ("inspect", source),
        ("convert", source, out, "--recipe", "qwen3-moe", "--set", "serving.tensor_parallel=1"),
        ("verify", out, "--source", source),
        ("report", out),
    )
    for step in steps:
        done = moepress(*step)
        assert done.returncode == 0, done.stderr
        command = done.stdout.rpartition("next: ")[2].strip()
        assert str(step[1] if step[0] in ("inspect", "verify", "report") else out) in shlex.split(command)
    assert f"agree with {source}" in done.stdout


def test_python_can_be_asked_to_run_the_package() -> None:
    """Where scripts are not on PATH: `python -m moepress`."""
    done = subprocess.run(
        [sys.executable, "-m", "moepress", "recipes", "list"], capture_output=True, text=True, check=True
    )
    assert "kimi-k2" in done.stdout


def test_version_says_what_a_bug_report_needs() -> None:
    """The environment comes from package metadata: nothing heavy is imported for it."""
    import torch

    from moepress import __version__

    line, packages = moepress("--version").stdout.strip().splitlines()
    assert line.startswith(f"moepress {__version__} (Python {platform.python_version()} in ")
    assert platform.system() in line
    assert f"torch {torch.__version__}" in packages
    for name in ("transformers", "compressed-tensors", "safetensors", "numba"):
        assert f"{name} " in packages
    assert "missing" not in packages


def completed(*words: str) -> list[str]:
    """What bash would be offered for the last word."""
    environment = {**os.environ, "_MOEPRESS_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "from moepress.cli import app; app(prog_name='moepress')"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**environment, "COMP_WORDS": " ".join(words)},
    )
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_recipes() -> None:
    assert {"convert", "verify", "doctor"} <= set(completed("moepress", ""))
    assert completed("moepress", "conv") == ["convert"]
    assert "--recipe" in completed("moepress", "convert", "a", "b", "--rec")
    assert completed("moepress", "plan", "a", "--recipe", "kimi-k2") == ["kimi-k2", "kimi-k2-bf16"]
    assert completed("moepress", "recipes", "show", "glm") == ["glm-4", "glm-5"]


def test_every_command_has_examples_and_help_has_the_exit_codes() -> None:
    from moepress.commands.examples import EXAMPLES, EXIT_CODES

    names = {command.__name__ for commands in COMMANDS.values() for command in commands}
    assert set(EXAMPLES) == names | {"recipes", "cluster"}
    shown = " ".join(moepress("--help").stdout.split())
    for code, what in EXIT_CODES.items():
        assert f"{code} {what}"[:60] in shown
    line, what = EXAMPLES["verify"][0]
    assert f"# {what} {line}" in " ".join(moepress("verify", "--help").stdout.split())


def test_help_is_whole_in_a_window_of_80_columns() -> None:
    """A word that is longer than its column is cut by a mark, and what it said is gone."""
    words = [[command.__name__] for commands in COMMANDS.values() for command in commands]
    words += [["recipes"], ["cluster"]]
    words += [["recipes", name] for name in ("list", "show", "check", "schema", "families")]
    words += [["cluster", name] for name in ("slurm", "kuberay")]
    for command in [[], *words]:
        shown = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [*command, "--help"])
        assert shown.exit_code == 0, shown.output
        cut = [line for line in shown.output.splitlines() if re.search(r"[\w/.:-]…", line)]
        assert not cut, f"moepress {' '.join(command)} --help: {cut}"


def unboxed(shown: str) -> str:
    """What stands in a box, on one line."""
    return " ".join(re.sub("[│─╭╮╰╯]", " ", shown).split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--threads", "0"], "'--threads': 0 is too small; it must be 1 or more"),
        (["--threads", "two"], "'--threads': 'two' is not a whole number; it must be 1 or more"),
        (["--memory-fraction", "1.5"], "'--memory-fraction': 1.5 is too large; it must be from 0.05 to 1"),
        (["--memory-fraction", "nan"], "'--memory-fraction': 'nan' is not a number; it must be from 0.05 to 1"),
    ],
)
def test_an_option_says_in_our_words_what_it_takes(words: list[str], says: str) -> None:
    refused = CliRunner().invoke(app, ["plan", "a", "-r", "b", *words])
    assert refused.exit_code == 2
    assert says in unboxed(refused.output)


def test_a_device_that_is_none() -> None:
    refused = CliRunner().invoke(app, ["convert", "a", "b", "-r", "c", "--device", "tpu"])
    assert "'--device': 'tpu' is not one of auto, cpu, cuda" in unboxed(refused.output)
    assert completed("moepress", "convert", "a", "b", "--device", "cu") == ["cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_conversion_says_how_to_go_on_and_that_command_does(how: signal.Signals, tmp_path: Path) -> None:
    """Also where a name needs quotes; the exit code is 130, not the 1 of a check that failed."""
    source = build("kimi", tmp_path / "the src").folder
    out = tmp_path / "out"
    small = ["weights.algorithm=gptq", "calibration.samples=64", "calibration.length=256", "output.shard_size=1MB"]
    options = [part for each in ("serving.tensor_parallel=1", *small) for part in ("--set", each)]
    command = ["convert", str(source), str(out), "--recipe", "kimi-k2", *options, "--threads", "1"]
    running = subprocess.Popen(
        [sys.executable, "-m", "moepress.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 300
    while not list(out.glob(".moepress/receipts/*.json")) and time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    running.send_signal(how)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert "stopped: " in said
    assert "shards are kept" in said
    resume = shlex.split(said.strip().splitlines()[-1])
    assert resume == ["moepress", *command]
    resumed = moepress(*resume[1:])
    assert resumed.returncode == 0, resumed.stderr
    assert "from an earlier run" in resumed.stdout
    assert not list(out.glob(".moepress/*lock*"))


def test_a_wish_to_stop_that_a_finalizer_swallowed_is_not_lost() -> None:
    """Python drops a KeyboardInterrupt that is raised in a weak reference's callback; the next sign of progress raises it again."""
    code = (
        "import os, signal, weakref\n"
        "from moepress.commands import stopping\nfrom moepress.commands.convert_view import ConvertView\n"
        "class Thing: pass\n"
        "stopping.listen(); thing = Thing()\n"
        "ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT) or sum(range(10)))\n"
        "del thing\n"
        "print('lost')\n"
        "try: ConvertView().advance(1)\nexcept KeyboardInterrupt: print('found')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["lost", "found"]


@pytest.mark.slow
def test_a_stopped_check_is_not_a_check_that_failed(tmp_path: Path) -> None:
    """Ctrl-C ends any command with 130; Typer alone would make it 1, which scripts take for found wanting."""
    code = (
        "import os, signal\nfrom moepress import api, cli\n"
        "api.verify = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("family", sorted(RECIPES))
def test_inspect_adds_up(family: str, tiny: Callable[[str], TinyCheckpoint]) -> None:
    done = moepress("inspect", tiny(family).folder, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    checkpoint = tiny(family)
    assert data["bytes"] == sum(t.numel() * t.element_size() for t in checkpoint.tensors.values())
    assert data["parameters"] == sum(t.numel() for t in checkpoint.truth.values())
    assert sum(row["tensors"] for row in data["rows"]) == len(checkpoint.tensors)


@pytest.mark.slow
def test_the_whole_path_and_each_next_step(tmp_path: Path) -> None:
    """Every command ends with the next one to run, and that next command works."""
    source = build("kimi", tmp_path / "src").folder
    out = tmp_path / "out"
    recipe = ("--recipe", "kimi-k2", "--set", "serving.tensor_parallel=1")
    inspected = moepress("inspect", source)
    assert f"next: moepress plan {source} --recipe" in inspected.stdout
    planned = moepress("plan", source, out, *recipe)
    assert planned.returncode == 0, planned.stderr
    command = planned.stdout.partition("next: moepress ")[2].split()
    assert command[0] == "convert"
    converted = moepress(*command)
    assert converted.returncode == 0, converted.stderr
    command = converted.stdout.partition("next: moepress ")[2].split()
    assert command[0] == "verify"
    verified = moepress(*command)
    assert verified.returncode == 0, verified.stdout
    assert "verified" in verified.stdout


@pytest.mark.slow
def test_json_is_data_alone(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src").folder
    recipe = ("--recipe", "kimi-k2", "--set", "serving.tensor_parallel=1")
    for command in (
        ["plan", source, *recipe],
        ["convert", source, tmp_path / "out", *recipe],
        ["verify", tmp_path / "out", "--source", source],
    ):
        done = moepress(*command, "--json")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


@pytest.mark.slow
def test_exit_codes(tmp_path: Path) -> None:
    """0 good, 1 checked and found wanting, 2 could not be done; never a traceback."""
    source = build("kimi", tmp_path / "src").folder
    recipe = ("--recipe", "kimi-k2", "--set", "serving.tensor_parallel=1")
    out = tmp_path / "out"
    assert moepress("convert", source, out, *recipe).returncode == 0
    (out / "tokenizer.json").unlink()
    wanting = moepress("verify", out, "--source", source)
    assert wanting.returncode == 1
    assert "tokenizer.json" in wanting.stdout
    strict = moepress("convert", source, tmp_path / "strict", *recipe, "--set", "limits.max_relative_error=0.01")
    assert strict.returncode == 1
    assert "limits.max_relative_error" in strict.stderr
    for bad in (
        ["convert", tmp_path / "nowhere", out, *recipe],
        ["inspect", "moonshotai/Kimi-K2-Instruct"],
        ["plan", source, "--recipe", "nope"],
    ):
        done = moepress(*bad)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert "hint:" in done.stderr


def test_errors_are_json_too(tmp_path: Path) -> None:
    done = moepress("inspect", tmp_path / "nowhere", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["what"]


def test_recipes_list_show_check_schema() -> None:
    listed = moepress("recipes", "list", "--json")
    names = [recipe["name"] for recipe in json.loads(listed.stdout)]
    assert "kimi-k2" in names
    shown = moepress("recipes", "show", "kimi-k2", "--set", "weights.group_size=64")
    assert "group_size: 64" in shown.stdout
    assert moepress("recipes", "check", "glm-5").returncode == 0
    assert moepress("recipes", "check", "glm-5", "--set", "weights.group_size=7").returncode == 2
    assert json.loads(moepress("recipes", "schema").stdout)["title"] == "Recipe"
    assert "glm_moe_dsa" in moepress("recipes", "families").stdout


@pytest.mark.parametrize(
    ("config", "recipe", "overrides", "source_gib", "pressed_gib", "gpu_before", "gpu_after"),
    [
        ("glm_5.2_fp8", "glm-5", ("mtp.experts=bf16",), 703.72, 420.71, 88.46, 51.94),
        (
            "glm_5.2_fp8",
            "glm-5",
            ("rest.shared_experts=source", "rest.dense_mlp=source", "mtp.rest=source"),
            703.72,
            404.31,
            88.46,
            51.53,
        ),
    ],
)
def test_plan_gives_the_published_figures_from_a_config_alone(
    config: str,
    recipe: str,
    overrides: tuple[str, ...],
    source_gib: float,
    pressed_gib: float,
    gpu_before: float,
    gpu_after: float,
) -> None:
    """The mission's headline: GLM-5.2, 704 → 421 GiB, 88 → 52 GiB a GPU at TP8."""
    options = [part for override in overrides for part in ("--set", override)]
    done = moepress("plan", ROOT / "tests" / "configs" / f"{config}.json", "--recipe", recipe, *options, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    for side, size, gpu in (("source", source_gib, gpu_before), ("pressed", pressed_gib, gpu_after)):
        assert abs(data[side]["bytes"] / 2**30 - size) < 0.05
        assert abs(data[side]["weights_per_gpu"] / 2**30 - gpu) < 0.05


def test_help_keeps_every_word() -> None:
    """Rich takes ``[default: …]`` and ``[@revision]`` for markup and drops them: write them in round brackets, or as words."""
    swallowed = []
    waiting = [("moepress", typer.main.get_command(app))]
    for name, command in waiting:
        waiting += [(f"{name} {inner}", found) for inner, found in getattr(command, "commands", {}).items()]
        texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        swallowed += [f"{name}: {text}" for text in texts if "[" in (text or "")]
    assert len(waiting) > 20
    assert swallowed == []
