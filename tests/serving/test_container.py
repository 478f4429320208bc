"""A container's words around a launch. What runs in it is stood for by `env -i`: another world, same machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from moepress.errors import ServingError
from moepress.serving import keeper
from moepress.serving.container import container_words, enclose
from moepress.serving.launch import Launch


def test_folders_are_mounted_under_their_own_names(tmp_path: Path) -> None:
    words = container_words("env docker run --rm -i --network host {mounts} lmsysorg/sglang:v0.5.23")
    launch = Launch(("python3", "-m", "sglang.launch_server", "--port", "1"), "http://127.0.0.1:1", {"A": "b c"})
    inside = enclose(launch, words, folders=[Path("/models/m"), tmp_path, tmp_path], work=tmp_path)
    text = shlex.join(inside.command)
    assert f"--network host -v /models/m:/models/m -v {tmp_path}:{tmp_path} lmsysorg/sglang:v0.5.23 env" in text
    assert text.endswith(f"env 'A=b c' python3 {tmp_path}/keeper.py 15.0 python3 -m sglang.launch_server --port 1")
    assert inside.variables == {}
    assert (tmp_path / "keeper.py").read_text() == Path(keeper.__file__).read_text()


@pytest.mark.parametrize(
    ("text", "says"), [("", "no program"), ("no-such-engine run", "no program"), ("a 'b", "not a")]
)
def test_words_that_cannot_be_run(text: str, says: str) -> None:
    with pytest.raises(ServingError, match=says):
        container_words(text)


def test_what_a_signal_does_not_reach_ends_with_the_pipe(tmp_path: Path) -> None:
    """Its client killed, a container goes on: only the pipe tells the keeper inside that nobody is left."""
    client = tmp_path / "client.py"
    client.write_text(
        "import subprocess, sys\n"  # like `docker run -i`: another session, standard input passed on
        "subprocess.run(sys.argv[1:], start_new_session=True)\n"
    )
    python = shutil.which("python3") or sys.executable
    launch = Launch((python, "-c", "print('up', flush=True); import time; time.sleep(600)"), url="")
    inside = enclose(launch, [sys.executable, str(client)], folders=[], work=tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = keeper.start_kept(inside.command, variables=dict(os.environ), out=out, grace=1)
    deadline = time.monotonic() + 60
    while "up" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = keeper.descendants(process.pid)
    assert len(pids) == 3  # client, inner keeper, server
    process.kill()  # the outer keeper cannot clean up any more
    process.wait()
    while [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
