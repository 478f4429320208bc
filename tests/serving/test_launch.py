from __future__ import annotations

import pytest

from moepress.errors import ServingError
from moepress.serving.launch import CPU_LAB, ServeOptions, sglang_launch


def test_fusion_is_off_and_nothing_listens_outside() -> None:
    launch = sglang_launch("python", "/models/m", port=30000)
    assert launch.command[:3] == ("python", "-m", "sglang.launch_server")
    assert "--disable-shared-experts-fusion" in launch.command
    assert launch.command[launch.command.index("--host") + 1] == "127.0.0.1"
    assert launch.url == "http://127.0.0.1:30000"
    assert launch.variables == {}


def test_a_choice_wins_over_the_contract() -> None:
    contract = ("--attention-backend", "flashmla", "--page-size", "64", "--kv-cache-dtype", "fp8_e4m3")
    options = ServeOptions(tensor_parallel=8, kv_cache_dtype="bfloat16", mem_fraction_static=0.85)
    command = sglang_launch("python", "m", port=1, options=options, contract_flags=contract).command
    assert command.count("--kv-cache-dtype") == 1
    assert command[command.index("--kv-cache-dtype") + 1] == "bfloat16"
    assert command[command.index("--attention-backend") + 1] == "flashmla"
    assert command[command.index("--tp-size") + 1] == "8"
    assert command[command.index("--mem-fraction-static") + 1] == "0.85"


def test_the_contracts_flags_are_not_repeated() -> None:
    command = sglang_launch("python", "m", port=1, contract_flags=("--disable-shared-experts-fusion",)).command
    assert command.count("--disable-shared-experts-fusion") == 1


def test_the_cpu_lab_is_on_the_path_and_keeps_its_own_attention() -> None:
    contract = ("--attention-backend", "flashmla", "--page-size", "64")
    launch = sglang_launch("python", "m", port=1, contract_flags=contract, cpu_lab=True)
    assert str(CPU_LAB) in launch.variables["PYTHONPATH"]
    assert launch.command.count("--attention-backend") == 1
    assert launch.command[launch.command.index("--attention-backend") + 1] == "torch_native"
    assert "--max-total-tokens" in launch.command
    assert launch.variables["TORCH_COMPILE_DISABLE"] == "1"
    own = sglang_launch("python", "m", port=1, options=ServeOptions(extra=("--watchdog-timeout", "5")), cpu_lab=True)
    limits = [own.command[at + 1] for at, word in enumerate(own.command) if word == "--watchdog-timeout"]
    assert limits == ["3600", "5"], "of two the server takes the last, the user's"


def test_the_cpu_lab_refuses_several_ranks() -> None:
    with pytest.raises(ServingError, match="one rank"):
        sglang_launch("python", "m", port=1, options=ServeOptions(tensor_parallel=2), cpu_lab=True)


def test_the_printed_command_is_one_flag_a_line_and_quoted() -> None:
    launch = sglang_launch("python", "/models/my model", port=30000, options=ServeOptions(mtp=True))
    lines = launch.shell_line().splitlines()
    assert lines[0] == "python -m sglang.launch_server \\"
    assert "  --model-path '/models/my model' \\" in lines
    assert lines[-1] == "  --speculative-algorithm EAGLE"
