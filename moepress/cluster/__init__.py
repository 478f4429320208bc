"""A conversion spread over processes and machines, on Ray Core. Same units, same receipts, same bytes.

    tensors         torch ↔ numpy at the border: Ray moves numpy arrays without copying them
    worker          what one worker holds, and the four things it is asked for; no Ray in it
    windows         calls in flight, results in order, errors as ours
    ray_executor    Ray: start or join, place the workers, hand out work
    gather          a shard from a worker's own disk, streamed and checked
    slurm, kuberay  readable job files that start Ray and run the same command

Ray is imported by `ray_executor` alone, when somebody asks for workers.
"""
