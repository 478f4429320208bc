"""A conversion spread over processes and machines, on Ray Core. Same units, same receipts, same bytes.

    messages        torch ↔ numpy at the border: Ray moves numpy arrays without copying them
    shard_worker    what one worker holds and is asked for where nothing is calibrated; neither Ray nor torch in it
    worker          one that is asked for layers too; no Ray in it
    windows         calls in flight, results in order, errors as ours
    ray_start       Ray: start or join, place the workers
    ray_executor    hand out work, and put together what comes back
    gather          a shard from a worker's own disk, streamed and checked
    slurm, kuberay  readable job files that start Ray and run the same command

Ray is imported by windows and ray_* alone, when somebody asks for workers.
"""
