"""A prefill server's hand-over of its KV cache, for mooncake over TCP.

On CUDA the list of pages goes to the host through pinned memory, and a recorded event says when. There is neither here: the
list is on the host already, so the plain way, which SGLang has for other transports, is taken. Sending a cached prefix
before the forward is left out as well (it waits on an event); the last chunk covers the whole range.
"""

# ruff: noqa: ARG001 - the functions keep the signatures of those they replace
from __future__ import annotations


def _without_pinned_memory(send):
    def send_kv_chunk(self, req, last_chunk=False, end_idx=None):
        req.disagg_kv_sender.supports_host_tensor_indices = False
        return send(self, req, last_chunk=last_chunk, end_idx=end_idx)

    return send_kv_chunk


def _not_early(self, req, allow_send=True):
    return None


def replacements():
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Prefill

    place = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
    return {
        f"{place}._send_kv_chunk": _without_pinned_memory(Prefill._send_kv_chunk),
        f"{place}.maybe_send_cached_prefix_chunk": _not_early,
    }


def prepare():
    """Nothing else."""
