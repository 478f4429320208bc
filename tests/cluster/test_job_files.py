"""Job files: what they ask for, that a shell and a YAML reader take them, and that Slurm's really converts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moepress.cluster.jobs import Job
from moepress.cluster.kuberay import rayjob_text
from moepress.cluster.slurm import sbatch_text
from moepress.errors import MoepressError
from tests.pressing import press, shard_bytes
from tests.tiny_checkpoints import build


def test_a_batch_file_asks_for_the_machines_and_is_good_shell(tmp_path: Path) -> None:
    job = Job("/data/src of mine", "/data/out", "glm-5", ("weights.group_size=64",), nodes=2, cpus=64, gpus=8)
    text = sbatch_text(job, time="02:00:00", partition="h200", setup="source /opt/venv/bin/activate")
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=64", "--time=02:00:00", "--partition=h200"} <= options
    assert {"--requeue", "--signal=B:TERM@120"} <= options
    assert "moepress convert '/data/src of mine' /data/out --recipe glm-5 --set weights.group_size=64" in text
    assert "--workers 16 --worker-threads 7 --worker-gpus 1" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_job_without_gpus_shares_processors_among_few_workers() -> None:
    job = Job("s", "o", "kimi-k2", cpus=64)
    assert (job.workers_per_node, job.threads) == (8, 7)
    assert Job("s", "o", "kimi-k2", cpus=1).threads == 1


@pytest.mark.parametrize(("nodes", "cpus", "gpus"), [(0, 8, 0), (1, 0, 0), (1, 4, 8)])
def test_impossible_jobs_are_refused(nodes: int, cpus: int, gpus: int) -> None:
    with pytest.raises(MoepressError):
        Job("s", "o", "kimi-k2", nodes=nodes, cpus=cpus, gpus=gpus)


def test_a_rayjob_mounts_one_volume_everywhere_and_runs_the_same_command() -> None:
    job = Job("/data/src", "/data/out", "glm-5", nodes=3, cpus=64, gpus=8, name="glm")
    text = rayjob_text(job, image="registry.example/moepress:1", claim="models")
    manifest = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]) == ("ray.io/v1", "RayJob", "glm")
    spec = manifest["spec"]["rayClusterSpec"]
    workers = spec["workerGroupSpecs"][0]
    assert workers["replicas"] == 2
    for template in (spec["headGroupSpec"]["template"], workers["template"]):
        container = template["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    assert manifest["spec"]["entrypoint"].startswith("moepress convert /data/src /data/out --recipe glm-5")
    assert "&id" not in text


def session(leader: int) -> list[str]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " ")[:200])
        except (OSError, ValueError, IndexError):
            continue
    return found


SRUN = """#!/bin/bash
# Slurm's srun, as far as the batch file uses it: options away, then the command, on this machine.
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.slow
def test_the_batch_file_starts_ray_on_its_machines_and_converts_to_the_same_bytes(tmp_path: Path) -> None:
    """The text itself, with a stand-in for srun that runs everything here: two Ray nodes, one conversion, nothing left."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi")
    overrides = ("serving.tensor_parallel=1",)
    job = Job(str(source.folder), str(tmp_path / "out"), "kimi-k2", overrides, nodes=2, cpus=1)
    script = tmp_path / "job.sbatch"
    script.write_text(sbatch_text(job))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "scontrol").write_text("#!/bin/bash\necho localhost\necho localhost\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "SLURM_JOB_NODELIST": "ignored",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    log = tmp_path / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            ["bash", str(script)], env=environment, cwd=tmp_path, stdout=written, stderr=written, start_new_session=True
        )
        try:
            status = process.wait(300)
        finally:
            left = session(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-3000:]
    assert left == []
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "one")
