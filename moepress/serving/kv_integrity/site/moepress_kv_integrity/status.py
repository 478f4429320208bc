"""What /server_info shows: the counters of every rank. Here an operator, and `moepress validate`, see that the check is active."""

from __future__ import annotations

import torch

from . import STATUS_KEY
from .watch import watch_of


def internal_state(original, self, recv_req):
    """Scheduler.get_internal_state: our status of every rank of this scheduler's tensor-parallel group."""
    answer = original(self, recv_req)
    watch = watch_of(self)
    if watch is not None:
        status = watch.counters.status(watch.suspect)
        ranks = [status]
        # Every rank is given the same control requests in the same order, so all of them are here.
        group = getattr(self, "dp_tp_cpu_group", None)
        if group is not None and (size := torch.distributed.get_world_size(group)) > 1:
            ranks = [None] * size
            torch.distributed.all_gather_object(ranks, status, group=group)
        answer.internal_state[STATUS_KEY] = {**status, "ranks": ranks}
    return answer
