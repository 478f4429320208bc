"""Conversions by Ray workers on two local nodes: the same bytes as in one process, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moepress.cluster.ray_executor import RayExecutor, ray_workers
from moepress.cluster.ray_start import ENVIRONMENT, Workers
from moepress.convert.run import convert
from moepress.convert.watcher import Silent
from moepress.errors import FormatError, PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.verify.run import verify
from tests.pressing import press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build

pytestmark = pytest.mark.slow

SMALL = ("calibration.samples=6", "calibration.length=48", "calibration.batch_size=2", "output.shard_size=1MB")
GPTQ = ("weights.algorithm=gptq", *SMALL)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """A Ray cluster of two nodes with one processor each, on this machine; its address."""
    from ray.cluster_utils import Cluster

    os.environ |= ENVIRONMENT
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000})
    cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    yield cluster.address
    cluster.shutdown()


def spread(source: Path, out: Path, family: str, *overrides: str, workers: Workers, **more: Any) -> Any:
    return convert(source, out, recipe_for(family, *overrides), place=partial(ray_workers, workers), **more)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("kimi", ("output.shard_size=1MB",)),
        ("glm5", GPTQ),
        ("kimi", ("weights.algorithm=awq+gptq", "weights.awq.norm=true", "calibration.loss=kl", *SMALL)),
    ],
    ids=["rtn", "gptq with carried top-k and MTP", "awq behind the norm and gptq by the predictions"],
)
def test_two_workers_on_two_nodes_give_the_bytes_of_one_process(
    family: str, overrides: tuple[str, ...], two_nodes: str, tmp_path: Path
) -> None:
    source = build(family, tmp_path / "src")
    press(source.folder, tmp_path / "one", family, *overrides)
    spread(source.folder, tmp_path / "two", family, *overrides, workers=Workers(2, two_nodes))
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")
    logs = sorted((tmp_path / "two" / ".moepress" / "logs").iterdir())
    assert [log.name for log in logs] == ["worker-0.log", "worker-1.log"]
    assert all("done" in log.read_text() for log in logs)


def test_outputs_that_workers_do_not_see_are_gathered(two_nodes: str, tmp_path: Path) -> None:
    """Workers press on their own disks; what arrives has the SHA-256 that was written."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi", *GPTQ)
    workers = Workers(2, two_nodes, gather=tmp_path / "scratch")
    spread(source.folder, tmp_path / "two", "kimi", *GPTQ, workers=workers)
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_workers_killed_again_and_again_change_no_byte(two_nodes: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Work that died with its worker is done again; nothing half-written is taken for a shard."""
    source = build("kimi", tmp_path / "src", layers=5)
    press(source.folder, tmp_path / "one", "kimi", *GPTQ)
    killed: list[int] = []
    stop = threading.Event()

    def kill_now_and_then(executor: RayExecutor) -> None:
        while not stop.wait(2.5) and len(killed) < 3:
            victim = worker_pids(tmp_path / "two")
            if victim:
                os.kill(victim[0], signal.SIGKILL)
                killed.append(victim[0])

    started = RayExecutor.__init__

    def init(self: RayExecutor, *arguments: Any, **named: Any) -> None:
        started(self, *arguments, **named)
        threading.Thread(target=kill_now_and_then, args=(self,), daemon=True).start()

    monkeypatch.setattr(RayExecutor, "__init__", init)
    try:
        spread(source.folder, tmp_path / "two", "kimi", *GPTQ, workers=Workers(2, two_nodes))
    finally:
        stop.set()
    assert killed
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")
    assert not list((tmp_path / "two").rglob("*.moepress-tmp"))
    assert verify(tmp_path / "two", source.folder).problems == ()


def worker_pids(out: Path) -> list[int]:
    """Processes of Ray workers that have begun to work for `out`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if name.startswith(b"ray::_RayWorker"):
            found.append(int(entry.name))
    return sorted(found) if (out / ".moepress" / "logs").exists() else []


def test_workers_outlive_a_run_that_waits_for_its_disk(two_nodes: str, tmp_path: Path) -> None:
    """CL-01: workers share no collective and no deadline, so a run that writes slowly ends nobody."""

    class SlowDisk(Silent):
        def unit_done(self, receipt: dict[str, Any]) -> None:
            time.sleep(3)

    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi", *GPTQ)
    spread(source.folder, tmp_path / "two", "kimi", *GPTQ, workers=Workers(2, two_nodes), watcher=SlowDisk())
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")


def test_what_a_worker_finds_wrong_is_our_error_with_its_name(two_nodes: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    checkpoint = open_checkpoint(source.folder)
    ref = checkpoint.tensors[name]
    with checkpoint.path(ref.shard).open("r+b") as file:
        file.seek(ref.start)
        file.write(b"\x7f")
    with pytest.raises(FormatError, match="NaN") as caught:
        spread(source.folder, tmp_path / "out", "kimi", workers=Workers(2, two_nodes))
    assert caught.value.where == name
    assert not (tmp_path / "out" / "config.json").exists()


def test_more_workers_than_the_cluster_has_room_for_are_refused(two_nodes: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    with pytest.raises(PlanRefused, match="the cluster has 2"):
        spread(source.folder, tmp_path / "out", "kimi", workers=Workers(3, two_nodes))


def test_an_address_where_no_cluster_answers_is_said_plainly(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    started = time.monotonic()
    with pytest.raises(PlanRefused, match="no Ray cluster answers"):
        spread(source.folder, tmp_path / "out", "kimi", workers=Workers(1, "127.0.0.1:1"))
    assert time.monotonic() - started < 60


def test_workers_of_this_machine_leave_other_clusters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself Ray joins what RAY_ADDRESS or the machine's latest cluster names, also when that has just been killed."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi", *SMALL)
    spread(source.folder, tmp_path / "two", "kimi", *SMALL, workers=Workers(1))
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")


@pytest.mark.slow
def test_a_run_with_workers_still_ends_in_order_when_it_is_asked_to(tmp_path: Path) -> None:
    """Ray takes SIGTERM for itself when it starts, and would end the process without a word on how to go on."""
    code = (
        "import os, signal, ray\n"
        "from moepress.cluster.ray_start import Workers, _signals_kept, _start_ray\n"
        "from moepress.commands import stopping\n"
        "stopping.listen()\n"
        "with _signals_kept(): _start_ray(Workers(1))\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); sum(range(10**6)); print('not stopped')\n"
        "except KeyboardInterrupt: print('in order')\n"
        "ray.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.split("\n")[0] == "in order", done.stderr[-2000:]
