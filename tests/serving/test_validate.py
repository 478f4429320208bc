"""`moepress validate` as it is typed, on the trained tiny Kimi pressed by GPTQ: real servers, real benchmark client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples.tiny_kimi import export
from moepress.convert.run import convert
from moepress.recipe import load_recipe
from moepress.results import read_results
from moepress.serving import keeper
from moepress.serving.launch import Launch, sglang_launch
from moepress.serving.sglang import start_anywhere

pytestmark = [pytest.mark.slow, pytest.mark.oracle, pytest.mark.timeout(1800)]

TINY = Path(export.__file__).parent
PROMPTS = TINY / "prompts.jsonl"
VALIDATE = [sys.executable, "-m", "moepress.cli", "validate"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export.export(tmp_path_factory.mktemp("validate") / "fp8")


@pytest.fixture(scope="module")
def pressed(source: Path) -> Path:
    """By GPTQ with little text, in the layout that the contract chooses."""
    wishes = ["serving.tensor_parallel=1", "weights.algorithm=gptq", f"calibration.text={TINY / 'calibration.txt'}"]
    wishes += ["calibration.samples=24", "calibration.length=256"]
    convert(source, source.parent / "int4", load_recipe("kimi-k2", wishes))
    return source.parent / "int4"


def validate(sglang_python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VALIDATE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        env=within(sglang_python),
    )


def within(sglang_python: Path) -> dict[str, str]:
    return {**os.environ, "MOEPRESS_SGLANG_PYTHON": str(sglang_python), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(sglang_python: Path, pressed: Path, source: Path) -> dict[str, Any]:
    """In turn, as on GPUs that one model fills: a boot of each side. More rounds, who is first, a second boot that holds
    something else: `validation/test_speed.py`, `validation/test_loads.py`."""
    run = validate(
        sglang_python,
        *(pressed, "--baseline", source, "--cpu-lab", "--prompts", PROMPTS),
        *("--concurrency", "1,4", "--rounds", "1", "--in-turn", "--json"),
    )
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def gates(found: dict[str, Any]) -> dict[str, str]:
    return {gate["gate"]: gate["verdict"] for gate in found["gates"]}


def test_everything_that_a_cpu_can_judge_passes_and_the_rest_is_not_judged(whole: dict[str, Any]) -> None:
    found = gates(whole)
    # the tiny model loops by itself, source and pressed alike; of four answers chance may give one more to the pressed
    assert found.pop("max_loops") in ("passed", "not judged")
    assert found == {
        "loads": "passed",
        "max_gib_per_gpu": "not judged",
        "min_decode_speedup at 1": "not judged",
        "max_kl": "passed",
        "max_serving_kl": "passed",
        "min_agreement": "passed",
        "deterministic": "passed",
    }, whole["gates"]
    assert whole["verdict"] == "not judged"
    assert whole["smoke"]


def test_the_first_greedy_tokens_are_the_references(whole: dict[str, Any]) -> None:
    sanity = whole["sanity"]
    assert sanity["first_tokens"] == {"equal": 16, "of": 16}
    assert sanity["agreement"]["wrong"] == 0
    assert sanity["agreement"]["equal"] + sanity["agreement"]["near_ties"] == sanity["tokens"] == 256


def test_serving_adds_less_than_pressing(whole: dict[str, Any]) -> None:
    serving, pressing, both = (whole["sanity"][f"kl_{name}"]["value"] for name in ("serving", "pressing", "source"))
    assert 0 < serving < 0.1 * pressing
    assert both == pytest.approx(pressing, rel=0.3)
    assert 0.8 < whole["sanity"]["top_mass"] <= 1


def test_every_tensor_is_loaded_and_memory_is_what_plan_predicts(whole: dict[str, Any]) -> None:
    after = whole["loads"]["after"]
    assert after["used"] + sum(after["excused"].values()) == after["tensors"] == whole["loads"]["before"]["tensors"]
    assert whole["loads"]["unchanged"] is None, "each side was booted once"
    rows = {row["component"]: row for row in whole["memory"]["rows"]}
    for name, row in rows.items():
        if name == "the server's own parameters":  # group indexes, which only an activation order would fill
            continue
        assert row["candidate"]["value"] == pytest.approx(row["predicted"]["value"], rel=0.02), name
    experts = rows["routed_expert"]
    assert experts["candidate"]["value"] < 0.6 * experts["baseline"]["value"]
    side = whole["memory"]["candidate"]
    assert (side["kv_dtype"], side["kv_tokens"]["value"]) == ("bfloat16", 20000)
    assert side["kv_bytes_per_token"]["value"] == pytest.approx(
        side["predicted"]["kv_bytes_per_token"]["value"], rel=0.1
    )


def test_speed_comes_from_bench_serving_on_both_sides(whole: dict[str, Any]) -> None:
    speed = whole["speed"]
    assert speed["workload"]["order"] == ["candidate", "baseline"]
    boots = {name: len(server["boot_seconds"]) for name, server in whole["servers"].items()}
    assert boots == {"candidate": 1, "baseline": 1}
    assert [row["concurrency"] for row in speed["decode"]] == [1, 4]
    for row in speed["decode"]:
        for side in (row["candidate"], row["baseline"]):
            assert side["decode"]["value"] > 0
            assert "runs" not in side["decode"], "one measurement has no spread"
            assert side["ttft_p95"]["value"] >= side["ttft_p50"]["value"] > 0
            assert side["inter_token_p95"]["value"] >= side["inter_token_p50"]["value"] > 0
    assert speed["prefill"]["candidate"]["prefill"]["value"] > 0


def test_the_result_says_what_it_was_measured_with_and_is_kept(whole: dict[str, Any], pressed: Path) -> None:
    assert whole["environment"]["sglang"] == "0.5.23"
    assert whole["environment"]["packages"]["torch"].startswith("2.13.0")
    assert whole["machine"]["cores"] >= 1
    server = whole["servers"]["candidate"]
    assert server["model_class"] == "DeepseekV3ForCausalLM"
    assert "--disable-shared-experts-fusion" in server["command"]
    assert server["flags"]["attention_backend"] == "torch_native"
    fresh, stale = read_results(pressed)
    assert stale == []
    assert fresh["validate"]["found"] == whole
    assert fresh["validate"]["verdict"] == "not judged"


def test_with_an_fp8_cache_the_first_tokens_agree_and_the_kl_is_reported(sglang_python: Path, pressed: Path) -> None:
    """In a container, as far as one can be had here: words before the command, and nothing of our environment inside."""
    container = f"env -i HOME={Path.home()} PATH={sglang_python.parent}:/usr/bin:/bin"
    run = validate(
        sglang_python,
        *(pressed, "--container", container, "--cpu-lab", "--kv-dtype", "fp8"),
        *("--only", "loads,memory,sanity", "--prompts", PROMPTS, "--json"),
    )
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout[-3000:]
    found = json.loads(run.stdout)
    assert found["servers"]["candidate"]["kv_dtype"] == "float8_e4m3fn"
    assert found["sanity"]["first_tokens"] == {"equal": 16, "of": 16}
    assert 0 < found["sanity"]["kl_serving"]["value"] < 0.02
    assert found["memory"]["candidate"]["predicted"]["kv_bytes_per_token"]["value"] > 0
    assert gates(found)["max_kl"] == "not judged"
    assert gates(found)["loads"] == "passed", "the recorder was reached through the mounts"
    assert found["environment"]["how"] == "container"


def damaged(pressed: Path, folder: Path) -> Path:
    """One expert's scale is gone."""
    shutil.copytree(pressed, folder, ignore=shutil.ignore_patterns(".moepress"))
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_dropped_scale_fails_the_gate_and_nothing_is_booted(
    sglang_python: Path, pressed: Path, tmp_path: Path
) -> None:
    run = validate(sglang_python, damaged(pressed, tmp_path / "damaged"), "--cpu-lab")
    assert run.returncode == 1, run.stderr + run.stdout
    assert "✗ loads" in run.stdout
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale" in run.stdout
    assert "nothing was booted" in run.stdout
    assert "booting" not in run.stderr


def test_a_layout_that_the_server_refuses_fails_the_gate_with_the_servers_words(
    sglang_python: Path, pressed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "refused"
    shutil.copytree(pressed, folder, ignore=shutil.ignore_patterns(".moepress"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"pack-quantized"', '"mixed-precision"'))
    run = validate(sglang_python, folder, "--cpu-lab", "--json")
    assert run.returncode == 1, run.stderr + run.stdout
    found = json.loads(run.stdout)
    assert gates(found)["loads"] == "failed"
    assert "quantization_config not accepted" in next(g["reason"] for g in found["gates"] if g["gate"] == "loads")


def test_a_server_that_cannot_start_for_another_reason_is_an_error(sglang_python: Path, pressed: Path) -> None:
    run = validate(sglang_python, pressed, "--cpu-lab", "--flags=--no-such-flag", "--json")
    assert run.returncode == 2, run.stderr + run.stdout
    assert json.loads(run.stdout)["cause"] == "launch argument not accepted"


def test_a_server_that_is_up_already(sglang_python: Path, pressed: Path, tmp_path: Path) -> None:
    """What it loaded cannot be proven, which is not the same as proven."""

    def launch(port: int) -> Launch:
        return sglang_launch(sglang_python, pressed, port=port, cpu_lab=True)

    with start_anywhere(launch, log=tmp_path / "server.log", timeout_s=800) as server:
        run = validate(sglang_python, pressed, "--url", server.url, "--only", "loads,memory", "--strict", "--json")
        assert server.running, "it is not ours to stop"
    assert run.returncode == 1, run.stderr + run.stdout
    found = json.loads(run.stdout)
    assert gates(found)["loads"] == "not judged"
    assert found["environment"]["how"] == "url"
    assert found["memory"]["candidate"]["kv_tokens"]["value"] == 20000
    assert found["memory"]["kv_dtype"] is None, "the interface says what was asked for; there is no log here"


@pytest.mark.parametrize("moment", ["loading", "benchmark"])
def test_killed_at_any_moment_it_leaves_no_process(moment: str, sglang_python: Path, pressed: Path) -> None:
    """SIGKILL to validate itself: server, benchmark client and their keepers have to go."""
    work = pressed / ".moepress" / "validate"
    shutil.rmtree(work, ignore_errors=True)
    log, line, program = {
        "loading": (work / "candidate-1.log", "server_args=", b"sglang.launch_server"),
        "benchmark": (work / "bench-candidate-1.log", "$ python -m sglang.bench_serving", b"bench_client.py"),
    }[moment]
    command = [*VALIDATE, str(pressed), "--cpu-lab", "--only", "speed", "--concurrency", "8", "--rounds", "50"]
    process = subprocess.Popen(command, env=within(sglang_python), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 400
    while not (log.exists() and line in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    pids = keeper.descendants(process.pid)
    assert any(program in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
