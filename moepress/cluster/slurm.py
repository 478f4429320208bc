"""A Slurm batch file that starts Ray on its machines, runs the conversion, and ends both. Nothing hidden: read it, change it.

    sbatch JOB.sbatch      the first time, and again after any end: finished shards are kept

One Ray head on the first machine, one Ray node on each other, the conversion beside the head. Two minutes before the time
limit Slurm sends SIGTERM, which stops the conversion between two writes; ``--requeue`` lets a preempted job start over, which is
resuming. Ray 2.50 and newer want a token from everybody who connects: the job makes one, and Slurm hands it on.
"""

from __future__ import annotations

import shlex

from moepress.cluster.jobs import Job


def sbatch_text(job: Job, *, time: str = "04:00:00", partition: str | None = None, setup: str | None = None) -> str:
    """The batch file.

    Args:
        job: what to do.
        time: limit, in Slurm's words.
        partition: of the cluster; None leaves it to the site.
        setup: a shell line that makes `moepress` and `ray` known, for example ``source ~/venv/bin/activate``.
    """
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--partition={partition}"] if partition else []),
        f"--time={time}",
        "--signal=B:TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.log",
    ]
    header = "\n".join(f"#SBATCH {option}" for option in options)
    node = f"--num-cpus={job.cpus} --num-gpus={job.gpus} --disable-usage-stats --block"
    return f"""#!/bin/bash
{header}
# {shlex.join(["moepress", "convert", job.source, job.out, "--recipe", job.recipe])}, on {job.nodes} machines.
# Submit it again after any end: finished shards are kept, and the bytes do not depend on where it stopped.
set -euo pipefail
{setup or "# Make `moepress` and `ray` known here, for example: source ~/venv/bin/activate"}

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${{nodes[0]}}
on() {{ srun --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$1" "${{@:2}}"; }}
# For steps in the background: no shell of ours between a signal and srun.
step() {{ exec srun --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$1" "${{@:2}}"; }}

# Ray: a port and a token of this job's own, so that jobs on the same machines never meet.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_TOKEN
ip=$(on "$head" hostname --ip-address | awk '{{print $1}}')
port=$((20000 + SLURM_JOB_ID % 20000))
step "$head" ray start --head --node-ip-address="$ip" --port="$port" --include-dashboard=false {node} &
for node in "${{nodes[@]:1}}"; do
  step "$node" ray start --address="$ip:$port" {node} &
done

# The conversion. On SIGTERM it stops cleanly, and so does the job.
step "$head" {job.command('"$ip:$port"')} &
run=$!
trap 'kill -TERM $run 2>/dev/null; wait $run' TERM
wait $run
status=$?
kill $(jobs -p) 2>/dev/null || true
wait || true
exit $status
"""
