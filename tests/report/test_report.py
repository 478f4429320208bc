"""The page, made from a real conversion: what it says, that it is whole, and that it asks for nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.errors import MoepressError
from moepress.recipe import load_recipe
from moepress.report.memory import gpu_of
from moepress.report.output import read_pressed_output
from moepress.report.page import contents, render
from moepress.report.reproduce import recipe_words
from moepress.results import write_result
from tests.pressing import press, recipe_for
from tests.report.html import Page
from tests.report.validation import evaluation, kv_cache, validation
from tests.tiny_checkpoints import TinyCheckpoint

GPU = gpu_of(141 * 10**9, 0.88, "fp8")


@pytest.fixture(scope="module")
def pressed(tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "Tiny-INT4"
    press(tiny("glm5").folder, out, "glm5")
    return out


@pytest.fixture
def out(pressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pressed, tmp_path / pressed.name))


def page(out: Path) -> Page:
    output = read_pressed_output(out)
    found = Page(render(output, contents(output, GPU)))
    assert found.problems == []
    return found


def test_what_is_known_after_convert_alone(out: Path) -> None:
    found = page(out)
    assert "Routed experts FP8 e4m3, 128×128 blocks" in found.section("sizes")
    assert "INT4 packed, group 32" in found.section("sizes")
    assert "Routed experts (MTP)" in found.section("weights")
    assert "largest relative error" in found.section("gates")
    assert "None: every weight was treated as the recipe asks." in found.section("fallbacks")
    assert re.search(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+\.weight", found.section("errors"))
    assert len(found.charts) == 2 * 3, "sizes, memory and the map of errors, wide and narrow"
    assert all(chart["aria-label"] for chart in found.charts)


@pytest.mark.parametrize(
    ("section", "command"),
    [
        ("verification", "moepress verify"),
        ("fidelity", "moepress fidelity"),
        ("speed", "moepress validate"),
        ("memory", "moepress validate"),
        ("evaluation", "moepress evaluate"),
    ],
)
def test_a_part_that_was_not_run_says_so_with_its_command(section: str, command: str, out: Path) -> None:
    words = page(out).section(section)
    assert "not run." in words
    assert f"{command} {out}" in words


def test_sizes_add_up_to_what_convert_reported(out: Path) -> None:
    output = read_pressed_output(out)
    figures = contents(output, GPU)
    assert sum(row.after for row in figures.sizes) == figures.output_bytes == output.report["output_bytes"]
    assert sum(row.before or 0 for row in figures.sizes) == figures.source_bytes == output.report["source_bytes"]
    assert sum(row.weights for row in figures.fates) == len(output.records)


def test_the_commands_keep_what_they_found_and_the_page_shows_it(
    out: Path, tiny: Callable[[str], TinyCheckpoint]
) -> None:
    done = CliRunner().invoke(app, ["verify", str(out), "--source", str(tiny("glm5").folder)])
    assert done.exit_code == 0, done.output
    found = page(out)
    assert "passed every tensor re-read" in found.section("gates")
    assert "kept weights equal the source" in found.section("verification")
    (out / "tokenizer.json").unlink()
    assert CliRunner().invoke(app, ["verify", str(out), "--source", str(tiny("glm5").folder)]).exit_code == 1
    found = page(out)
    assert "failed every tensor re-read" in found.section("gates")
    assert "tokenizer.json" in found.section("verification")


def test_fidelity_is_shown_with_its_drift(out: Path) -> None:
    text = {
        "tokens": 4096,
        "kl": 0.01234,
        "kl_standard_error": 0.0005,
        "kl_max": 1.0,
        "top1_agreement": 0.9712,
        "source_perplexity": 5.0,
        "candidate_perplexity": 5.1,
    }
    found = {"samples": 8, "length": 512, "texts": {"held out": text}, "drift": [0.01, 0.02], "experts": {}}
    write_result(out, "fidelity", "not judged", found)
    words = page(out).section("fidelity")
    assert "held out 4,096 0.01234 ± 0.00050 97.12%" in words


def test_results_of_an_earlier_conversion_are_named_and_not_shown(out: Path) -> None:
    write_result(out, "validate", "pass", validation(smoke=False))
    report = json.loads((out / "moepress_report.json").read_text())
    (out / "moepress_report.json").write_text(json.dumps(report, indent=1))  # another conversion: other bytes
    found = page(out)
    assert "It is stale and not shown" in found.section("speed")
    assert "123.4" not in found.text
    assert "not run loads, fits, is faster" in found.section("gates")


def test_a_validation_is_drawn(out: Path) -> None:
    write_result(out, "validate", "fail", validation(smoke=False))
    found = page(out)
    assert "1 80.0 (77.6 to 82.4) 123.4 (119.7 to 127.1) 1.54 faster" in found.section("speed")
    assert "slower" in found.section("speed")
    assert "slower at 32 requests" in found.section("gates")
    assert "bound 1.5 ×" in found.section("gates")
    assert "pressed measured 51.94 GiB" in found.section("memory")
    assert "8 of 9 tensors" in found.section("verification")
    assert "The validated server's cache was bfloat16." in found.section("kv")
    assert "a gate failed" in found.text


def test_figures_made_without_a_gpu_are_marked_and_not_drawn_beside_a_gpus(out: Path) -> None:
    write_result(out, "validate", "not judged", validation(smoke=True))
    found = page(out)
    assert "Smoke only: measured without a GPU" in found.section("speed")
    assert "faster" not in found.section("speed")
    assert "measured, smoke only" in found.section("memory")
    memory = next(chart for chart in found.charts if "Memory of one GPU" in (chart["aria-label"] or ""))
    assert "measured" not in (memory["aria-label"] or "")


def test_a_published_copy_without_receipts_and_source(out: Path) -> None:
    shutil.rmtree(out / ".moepress")
    found = page(out)
    assert "receipts are not in this copy" in found.section("errors")
    assert "name it with --source" in found.section("sizes")
    assert "SRC" in found.section("reproduce")
    assert len(found.charts) == 2, "memory alone"


def test_a_fallback_is_listed_with_its_reason(out: Path) -> None:
    report = json.loads((out / "moepress_report.json").read_text())
    name = report["quantized"]["worst"][0]["weight"]
    report["fallbacks"] = {name: "the Hessian <is> not positive & damping 1.0 did not help"}
    (out / "moepress_report.json").write_text(json.dumps(report))
    assert f"{name} the Hessian <is> not positive & damping" in page(out).section("fallbacks")


def test_an_evaluation_is_shown_row_by_row(out: Path) -> None:
    write_result(out, "evaluate", "fail", evaluation())
    found = page(out)
    words = found.section("evaluation")
    assert "fidelity KL, prose 24 – 0.0121 0.0121 0.0113 to 0.0129 0.0500 passed" in words
    assert "gsm8k exact_match 1,319 0.9400 0.9100 -0.0300 -0.0400 to -0.0200 -0.0100 failed" in words
    assert "mmlu: lm-eval is not installed" in words
    assert any("20 of 32 continuations part" in (chart["aria-label"] or "") for chart in found.charts)
    assert "failed gsm8k evaluate 3 points worse" in found.section("gates")


def test_kv_scales_are_shown_by_layer_with_what_they_changed(out: Path) -> None:
    report = json.loads((out / "moepress_report.json").read_text())
    report["kv_cache"] = kv_cache()
    (out / "moepress_report.json").write_text(json.dumps(report))
    words = page(out).section("kv")
    assert "0 latent 900 8 1.2 % 0 % 0.2000 0.0200 2 × 900 does not fit 448" in words
    assert "Suspicious: k_pe is the same in every layer." in words


def test_the_recipe_comes_back_from_its_words() -> None:
    recipe = recipe_for("kimi", "weights.group_size=64", "weights.scale=max", "calibration.text=some file.txt")
    words = recipe_words(recipe)
    assert "--set weights.group_size=64" in words
    import shlex

    name, *options = shlex.split(words)
    assert load_recipe(name, options[1::2]) == recipe


def test_the_same_output_gives_the_same_page(out: Path) -> None:
    output = read_pressed_output(out)
    assert render(output, contents(output, GPU)) == render(output, contents(output, GPU))


def test_the_command(out: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(out), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert Page((tmp_path / "page.html").read_text()).problems == []
    beside = CliRunner().invoke(app, ["report", str(out), "--json"])
    assert beside.exit_code == 0
    assert json.loads(beside.stdout)["verdict"] == "not run"
    assert (out.parent / f"{out.name}.report.html").exists()
    assert not list(out.glob("*.html")), "the checkpoint's folder stays as convert left it"


def test_a_folder_that_is_no_conversion(tmp_path: Path) -> None:
    with pytest.raises(MoepressError, match="not a finished conversion"):
        read_pressed_output(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(width: int, out: Path, tmp_path: Path) -> None:
    """In a browser, where there is one: only tables scroll sideways, each by itself."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    write_result(out, "validate", "fail", validation(smoke=False))
    output = read_pressed_output(out)
    html = render(output, contents(output, GPU))
    # A frame of that width in a page of ours, whose script measures it; the page itself forbids scripts.
    host = (
        f'<!doctype html><iframe style="width:{width}px;height:900px;border:0"></iframe><script>'
        "const frame = document.querySelector('iframe');"
        "frame.onload = () => { document.title = frame.contentDocument.documentElement.scrollWidth };"
        f"frame.srcdoc = {json.dumps(html).replace('</', '<' + chr(92) + '/')};</script>"
    )
    (tmp_path / "page.html").write_text(host)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [browser, *flags, "--window-size=1400,1000", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    measured = re.search(r"<title>(\d+)</title>", done.stdout)
    assert measured, done.stdout[:300]
    assert int(measured[1]) <= width
