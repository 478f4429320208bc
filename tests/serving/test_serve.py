"""Commands of `moepress serve`: what is in them, what is refused, and that SGLang's own parsers take every flag."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moepress.cli import app
from moepress.errors import PlanRefused, ServingError
from moepress.formats.checkpoint import open_checkpoint
from moepress.serving.launch import CPU_LAB, ServeOptions
from moepress.serving.running import running, watch
from moepress.serving.serve import Deployment, Role, Server, one_server, open_pressed, prefill_and_decode
from moepress.verify.kv_pair import kv_differences
from tests.pressing import press
from tests.stretched import stretched
from tests.tiny_checkpoints import TinyCheckpoint

FAMILIES = ("kimi", "glm4", "glm5", "qwen3_moe")
ROUTER = Server("10.0.0.9", 30000, 0)
SMALL = ("calibration.samples=2", "calibration.length=32", "kv_cache.samples=2")


@pytest.fixture(scope="module")
def pairs(
    tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Family → source and pressed."""
    found = {}
    for family in FAMILIES:
        out = tmp_path_factory.mktemp("serve") / family
        press(tiny(family).folder, out, family)
        found[family] = (tiny(family).folder, out)
    return found


def two(pair: tuple[Path, Path], hosts: tuple[str, str] = ("10.0.0.1", "10.0.0.2"), **choices: Any) -> Deployment:
    """Prefill on eight GPUs, decode on four."""
    servers = (Server(hosts[0], 30001, 8), Server(hosts[1], 30002, 4))
    return prefill_and_decode(
        open_checkpoint(pair[0]),
        open_pressed(pair[1]),
        servers,
        ROUTER,
        python="python",
        router_python="python",
        kv_dtypes=choices.get("kv_dtypes", ("fp8", "fp8")),
        options=choices.get("options"),
    )


def value(role: Role, flag: str) -> str | None:
    words = role.launch.command
    return words[words.index(flag) + 1] if flag in words else None


def test_one_server_has_the_contracts_flags(pairs: dict[str, tuple[Path, Path]]) -> None:
    pressed = open_pressed(pairs["kimi"][1])
    (role,) = one_server(pressed, Server("127.0.0.1", 30000, 8), python="python", kv_dtype="fp8").roles
    assert "--disable-shared-experts-fusion" in role.launch.command
    assert value(role, "--tp-size") == "8"
    assert value(role, "--attention-backend") == "flashmla"
    assert value(role, "--page-size") == "64"
    assert value(role, "--kv-cache-dtype") == "fp8_e4m3"


def test_the_kv_dtype_is_fp8_only_where_somebody_saw_to_its_scales(pairs: dict[str, tuple[Path, Path]]) -> None:
    def chosen(family: str, **kv_cache: Any) -> str | None:
        pressed = open_pressed(pairs[family][1])
        if kv_cache:
            pressed = replace(pressed, report={**pressed.report, "kv_cache": kv_cache})
        deployment = one_server(pressed, Server("127.0.0.1", 30000, 1), python="python")
        return value(deployment.roles[0], "--kv-cache-dtype")

    assert chosen("kimi") == "bfloat16"
    assert chosen("kimi", emission="folded") == "fp8_e4m3"
    assert chosen("glm5") == "fp8_e4m3", "its cache has a scale of its own for every tile"


def test_prefill_and_decode_name_the_same_dtype_and_page(pairs: dict[str, tuple[Path, Path]]) -> None:
    prefill, decode, router = two(pairs["kimi"]).roles
    assert (value(prefill, "--disaggregation-mode"), value(decode, "--disaggregation-mode")) == ("prefill", "decode")
    for flag in ("--kv-cache-dtype", "--page-size", "--disaggregation-transfer-backend"):
        assert value(prefill, flag) == value(decode, flag) is not None
    assert value(prefill, "--model-path") == str(pairs["kimi"][0])
    assert value(decode, "--model-path") == str(pairs["kimi"][1])
    assert (value(prefill, "--tp-size"), value(decode, "--tp-size")) == ("8", "4")
    assert value(decode, "--base-gpu-id") is None
    assert value(router, "--prefill") == prefill.launch.url


def test_on_one_machine_decode_begins_behind_the_gpus_of_prefill(pairs: dict[str, tuple[Path, Path]]) -> None:
    _, decode, _ = two(pairs["kimi"], hosts=("127.0.0.1", "127.0.0.1")).roles
    assert value(decode, "--base-gpu-id") == "8"
    assert "GPUs 8 to 11" in decode.about


@pytest.mark.parametrize("mix", [("bf16", "fp8"), ("fp8", "bf16")])
def test_a_mix_of_kv_dtypes_is_refused_with_what_is_possible(
    mix: tuple[str, str], pairs: dict[str, tuple[Path, Path]]
) -> None:
    with pytest.raises(PlanRefused, match=r"is not possible in sglang 0\.5\.23") as refused:
        two(pairs["kimi"], kv_dtypes=mix)
    assert "--kv-dtype fp8_e4m3 or --kv-dtype bfloat16" in str(refused.value)


def test_two_names_of_one_dtype_become_one(pairs: dict[str, tuple[Path, Path]]) -> None:
    """SGLang compares the words, and would refuse bf16 beside bfloat16."""
    prefill, decode, _ = two(pairs["kimi"], kv_dtypes=("bf16", "bfloat16")).roles
    assert value(prefill, "--kv-cache-dtype") == value(decode, "--kv-cache-dtype") == "bfloat16"


def test_another_model_cannot_prefill(pairs: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(PlanRefused, match=r"config\.json: num_hidden_layers|config\.json: architectures"):
        two((pairs["glm5"][0], pairs["kimi"][1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi", "glm4"])
def test_a_prefill_artifact_is_taken_where_the_source_is_refused(family: str, tmp_path: Path) -> None:
    """The source writes what the folded side reads 2^a times as large, and nobody but us would notice."""
    source = stretched(family, tmp_path / "src", experts=4).folder
    decode, prefill = tmp_path / "decode", tmp_path / "prefill"
    press(source, decode, family, "kv_cache.scales=folded", *SMALL)
    with pytest.raises(PlanRefused, match=r"layer 1: .* is cached × 2\^\d+ by prefill of what decode reads") as refused:
        two((source, decode))
    assert f"--recipe prefill --same-kv-as {decode}" in str(refused.value)

    words = ["convert", source, prefill, "--recipe", "prefill", "--same-kv-as", decode]
    done = CliRunner().invoke(app, [*map(str, words), "--set", "serving.tensor_parallel=1"])
    assert done.exit_code == 0, done.output
    assert f"moepress verify {prefill} --source {source} --same-kv-as {decode}" in done.output
    roles = two((prefill, decode), kv_dtypes=("auto", "auto")).roles
    assert [value(role, "--kv-cache-dtype") for role in roles[:2]] == ["fp8_e4m3", "fp8_e4m3"]
    assert value(roles[0], "--model-path") == str(prefill)


def test_scale_tensors_count_where_the_server_reads_them(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = pairs["kimi"][0]
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor([0.5])
    tensors["model.layers.2.self_attn.k_proj.k_scale"] = torch.tensor([1.0])
    save_file(tensors, scaled / "model.safetensors")
    (scaled / "config.json").write_bytes((source / "config.json").read_bytes())
    contract = open_pressed(pairs["kimi"][1]).contract.kv_scales
    found = kv_differences(open_checkpoint(scaled), open_checkpoint(source), contract)
    assert list(map(str, found)) == ["layer 1: k_proj.k_scale is 0.5 in prefill and 1 in decode"]
    inert = open_pressed(pairs["glm4"][1]).contract.kv_scales
    assert kv_differences(open_checkpoint(scaled), open_checkpoint(source), inert) == []


def test_the_printed_script_is_shell(pairs: dict[str, tuple[Path, Path]]) -> None:
    source, out = pairs["kimi"]
    done = CliRunner().invoke(
        app, ["serve", "--prefill", str(source), "--decode", str(out), "--kv-dtype", "fp8", "--print"]
    )
    assert done.exit_code == 0, done.output
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert done.stdout.count("\npython -m sglang") == 3
    data = CliRunner().invoke(app, ["serve", str(out), "--print", "--json", "--tp", "2"])
    (role,) = json.loads(data.stdout)["roles"]
    assert role["command"][role["command"].index("--tp-size") + 1] == "2"


@pytest.mark.parametrize("words", [[], ["--prefill", "SRC"], ["OUT", "--decode", "OUT"], ["OUT", "--prefill-tp", "2"]])
def test_half_a_deployment_is_refused(words: list[str], pairs: dict[str, tuple[Path, Path]]) -> None:
    named = [str(pairs["kimi"][1]) if word == "OUT" else word for word in words]
    done = CliRunner().invoke(app, ["serve", *named, "--print"])
    assert done.exit_code != 0
    assert "moepress serve --prefill SRC --decode OUT" in str(done.exception)


def test_the_recipes_deployment_is_changed_for_one_run(pairs: dict[str, tuple[Path, Path]]) -> None:
    source, out = pairs["kimi"]
    words = ["serve", "--prefill", str(source), "--decode", str(out), "--print"]
    before = CliRunner().invoke(app, words).stdout
    assert before.count("--disaggregation-enable-kv-checksum") == 2
    fields = [
        "--set",
        "serving.disaggregation.kv_checksum=false",
        "--set",
        "serving.disaggregation.transfer_backend=nixl",
    ]
    after = CliRunner().invoke(app, [*words, *fields]).stdout
    assert "checksum" not in after
    assert after.count("--disaggregation-transfer-backend nixl") == 2


def test_two_machines_are_not_started_from_one(pairs: dict[str, tuple[Path, Path]]) -> None:
    source, out = pairs["kimi"]
    done = CliRunner().invoke(
        app, ["serve", "--prefill", str(source), "--decode", str(out), "--prefill-host", "10.0.0.1"]
    )
    assert "on this machine alone" in str(done.exception)


def test_a_server_that_dies_ends_the_others(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Two processes, of which one cannot start: the other is gone when the error is told."""
    import sys

    prefill, decode, _ = two(pairs["kimi"]).roles
    pid = tmp_path / "pid"
    lives = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    waits = f"import os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.05)\nraise RuntimeError('out of memory')"
    roles = tuple(
        replace(role, launch=replace(role.launch, command=(sys.executable, "-c", code)))
        for role, code in ((prefill, lives), (decode, waits))
    )
    with (
        pytest.raises(ServingError, match=r"the decode server died while starting: out of memory") as ended,
        running(Deployment(roles), logs=tmp_path, timeout_s=60) as started,
    ):
        watch(started)
    assert str(tmp_path / "decode.log") in str(ended.value)
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.slow
@pytest.mark.oracle
def test_sglangs_own_parsers_take_every_command(
    sglang_python: Path, pairs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    router = subprocess.run([sglang_python, "-c", "import sglang_router"], capture_output=True, check=False)
    options = ServeOptions(mem_fraction_static=0.9, context_length=4096, mtp=True, trust_remote_code=True)
    roles: list[Role] = []
    for source, out in pairs.values():
        pressed = open_pressed(out)
        for kv_dtype in ("bf16", "fp8"):
            roles += one_server(pressed, Server("127.0.0.1", 30000, 8), python="python", kv_dtype=kv_dtype).roles
            roles += two((source, out), kv_dtypes=(kv_dtype, kv_dtype), options=options).roles
    if router.returncode != 0:
        roles = [role for role in roles if role.name != "router"]
    (tmp_path / "commands.json").write_text(json.dumps([role.launch.command for role in roles]))
    run = subprocess.run(
        [sglang_python, Path(__file__).with_name("flags_parse.py"), tmp_path / "commands.json"],
        env={
            **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            "PYTHONPATH": str(CPU_LAB),
            "SGLANG_USE_CPU_ENGINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    parsed = [json.loads(line)["parsed"] for line in run.stdout.splitlines() if line.startswith('{"parsed"')]
    assert len(parsed) == len(roles)
    for role, found in zip(roles, parsed, strict=True):
        if role.name == "router":
            assert found["prefill_urls"] == [["http://10.0.0.1:30001", 8998]]
            assert found["decode_urls"] == ["http://10.0.0.2:30002"]
        else:
            mode = "null" if role.name == "server" else role.name
            assert found["disaggregation_mode"] == mode
            assert found["kv_cache_dtype"] == value(role, "--kv-cache-dtype")
