"""How a server's end is told and tidied up, whatever program the server is: small ones here, SGLang in test_sglang_server.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from moepress.errors import ServerDied, ServingError
from moepress.serving import keeper
from moepress.serving.death import Cause
from moepress.serving.launch import Launch
from moepress.serving.ports import free_port
from moepress.serving.sglang import ask_python, launch_process, start, start_anywhere

TAKEN = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"


def program(code: str, port: int | None = None) -> Launch:
    return Launch((sys.executable, "-c", code), f"http://127.0.0.1:{port or free_port()}")


def test_an_end_without_a_cause_shows_the_logs_last_lines(tmp_path: Path) -> None:
    code = "print('loading'); print('layer 7 of 61'); print('nanobind: leaked 1 types!'); raise SystemExit(3)"
    with pytest.raises(ServerDied) as died:
        start(program(code), log=tmp_path / "log")
    assert died.value.what == (
        "the server ended while starting: exit status 3; the log ends with\n    loading\n    layer 7 of 61"
    )
    assert died.value.cause is None


def test_a_time_limit_of_the_servers_own_is_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    """SGLang kills itself with signal 9 then, as the kernel would."""
    line = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
    with pytest.raises(ServerDied) as died:
        start(program(f"import os; print({line!r}, flush=True); os.kill(os.getpid(), 9)"), log=tmp_path / "log")
    assert died.value.cause is Cause.TIME_LIMIT
    assert "--watchdog-timeout" in (died.value.hint or "")


def test_a_server_that_stays_up_without_its_port_is_ended_and_another_port_is_tried(tmp_path: Path) -> None:
    asked: list[int] = []

    def launch(port: int) -> Launch:
        asked.append(port)
        return program(f"import time; print({TAKEN!r}, flush=True); time.sleep(600)", port)

    with pytest.raises(ServerDied) as died:
        start_anywhere(launch, log=tmp_path / "log", timeout_s=60)
    assert died.value.cause is Cause.PORT_TAKEN
    assert len(set(asked)) == 3
    assert keeper.descendants(os.getpid()) == []


def test_another_cause_is_not_tried_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def launch(port: int) -> Launch:
        asked.append(port)
        return program("raise MemoryError('out of memory')", port)

    with pytest.raises(ServerDied, match="out of memory"):
        start_anywhere(launch, log=tmp_path / "log", timeout_s=60)
    assert len(asked) == 1


def test_not_ready_in_time_shows_the_logs_last_lines_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import time; print('reading shard 12', flush=True); time.sleep(600)"
    with pytest.raises(ServingError, match=r"not ready after 1 s; its log ends with\n    reading shard 12"):
        start(program(code), log=tmp_path / "log", timeout_s=1)


def test_a_server_that_takes_its_time_to_end_is_waited_for_when_its_log_says_why(tmp_path: Path) -> None:
    """SGLang writes dumps for a minute after its scheduler has died."""
    code = "import time; print('torch.OutOfMemoryError: CUDA out of memory', flush=True); time.sleep(3); raise SystemExit(1)"
    with launch_process(program(code), log=tmp_path / "log") as server:
        while "memory" not in server.log_text():
            time.sleep(0.05)
        death = server.autopsy(wait_s=0.1)
    assert death is not None
    assert death.cause is Cause.OUT_OF_MEMORY


def test_a_python_that_fails_is_an_error_with_its_last_words() -> None:
    assert ask_python(sys.executable, "print(6 * 7)") == "42"
    with pytest.raises(ServingError, match="No module named 'nothing_like_it'"):
        ask_python(sys.executable, "import nothing_like_it")
    with pytest.raises(ServingError, match="does not run"):
        ask_python("/no/such/python", "pass")
