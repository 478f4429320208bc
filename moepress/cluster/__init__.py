"""A conversion spread over processes and machines, on Ray Core. Same units, same receipts, same bytes.

    tensors         torch ↔ numpy at the border: Ray moves numpy arrays without copying them
    worker          what one worker holds, and the six things it is asked for; no Ray in it
    windows         calls in flight, results in order, errors as ours
    ray_start       Ray: start or join, place the workers
    ray_executor    hand out work, and put together what comes back
    gather          a shard from a worker's own disk, streamed and checked
    slurm, kuberay  readable job files that start Ray and run the same command

Ray is imported by these two alone, when somebody asks for workers.
"""
