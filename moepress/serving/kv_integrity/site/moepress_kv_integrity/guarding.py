"""Hooks around the forward: check before attention reads, quarantine on the device, abort when the result is read.

    ModelRunner.forward            check; bad requests are pointed at the padding row       forward stream, no waiting
    Scheduler.run_batch            the answer, on its way to the host, goes with the result
    Scheduler.process_batch_result the host reads it, before any token is appended          one step later under overlap

A request that is found wrong reads nothing but zeros of the padding page, writes nothing but that page, and ends with its
token cut. On several ranks the answers are reduced by maximum first: a rank that decided alone would leave the others
waiting in a collective.

Streams: the check is the first thing on the forward stream, which at launch has waited for the scheduler's writes; the
scheduler's next writes wait for an event that is recorded later on the forward stream (shared_read_done_event). So the
check sees the tags as they are for this batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from . import careful
from .reporting import violation
from .tags import EVENTS
from .verify import verify
from .watch import watch_of

ERROR_TYPE = "KVIntegrityError"
MESSAGE = "KV cache page integrity check failed; the request was ended before a token made from a wrong page was sent"


@dataclass
class Answer:
    """A check on its way to the host. `numbers` int64 [3 * batch + events], there once `ready` has passed."""

    numbers: torch.Tensor
    ready: torch.cuda.Event | None
    batch: int

    def read(self) -> tuple[list[list[int]], list[int]]:
        """(one [column, expected, found] a request, the pool's events). Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        numbers = self.numbers.tolist()
        return [numbers[3 * i : 3 * i + 3] for i in range(self.batch)], numbers[3 * self.batch :]


def forward(original, self, forward_batch, *args, **kwargs):
    """ModelRunner.forward, of the target model."""
    watch = watch_of(self)
    if watch is None or self.is_draft_worker or forward_batch.forward_mode.is_idle() or not forward_batch.batch_size:
        return original(self, forward_batch, *args, **kwargs)
    began = time.perf_counter()
    wrong = check(watch, forward_batch)
    if watch.acts:
        quarantine(watch, forward_batch, wrong)
    watch.counters.check_seconds += time.perf_counter() - began
    return original(self, forward_batch, *args, **kwargs)


def check(watch, forward_batch) -> torch.Tensor:
    """Launch the check of one batch and the copy of its answer. Returns bool [batch] on the device."""
    lengths = forward_batch.seq_lens_cpu
    size, context = watch.page_size, watch.pool.req_to_token.shape[1]
    longest = context if lengths is None else int(lengths.max())
    report = verify(
        watch.pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens, watch.record, longest
    )
    numbers = torch.cat([report.view(-1), watch.tags.events])
    if watch.group is not None:
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=watch.group)
    batch = report.shape[0]
    wrong = numbers[: 3 * batch].view(batch, 3)[:, 0] >= 0
    watch.unread = _send(numbers, batch)
    counters = watch.counters
    counters.checks += 1
    counters.requests += batch
    if lengths is not None:
        counters.pages += int(((lengths + size - 1) // size).sum())
    if watch.mode == "strict" and watch.unread.ready is not None:
        watch.unread.ready.synchronize()
    return wrong


def quarantine(watch, forward_batch, wrong: torch.Tensor) -> None:
    """Wrong requests read row 0 and write slot 0, which SGLang keeps for padding. New tensors: the batch keeps its own."""
    rows, slots = forward_batch.req_pool_indices, forward_batch.out_cache_loc
    forward_batch.req_pool_indices = torch.where(wrong, 0, rows)
    per_token = wrong
    if forward_batch.extend_seq_lens is not None:
        owner = torch.cumsum(forward_batch.extend_seq_lens, 0)
        tokens = torch.arange(slots.numel(), device=slots.device)
        owner = torch.searchsorted(owner, tokens, right=True).clamp_(max=wrong.numel() - 1)
        per_token = wrong[owner]
        # What a chunked prompt computed may reach the tree before the host knows; whoever meets it there is stopped.
        begins = per_token & (slots % watch.page_size == 0)
        watch.tags.tainted(torch.where(begins, slots // watch.page_size, 0), begins)
    forward_batch.out_cache_loc = torch.where(per_token, 0, slots)


def run_batch(original, self, batch, *args, **kwargs):
    """Scheduler.run_batch."""
    watch = watch_of(self)
    if watch is None:
        return original(self, batch, *args, **kwargs)
    if watch.faults is not None:
        watch.faults.before_batch(batch)
    watch.unread = None
    result = original(self, batch, *args, **kwargs)
    result.moepress_kv_answer, watch.unread = watch.unread, None
    return result


def process_batch_result(original, self, batch, result):
    """Scheduler.process_batch_result."""
    watch = watch_of(self)
    answer = getattr(result, "moepress_kv_answer", None)
    if watch is not None and answer is not None:
        _act(self, watch, batch, answer)
        if watch.metrics is not None:
            watch.metrics.update(watch)
    return original(self, batch, result)


def _act(scheduler, watch, batch, answer: Answer) -> None:
    reports, events = answer.read()
    wrong = [(req, report) for req, report in zip(batch.reqs, reports, strict=False) if report[0] >= 0]
    fresh = {kind: now - seen for kind, now, seen in zip(EVENTS, events, watch.events_seen, strict=True)}
    watch.events_seen = events
    for kind, count in fresh.items():
        if count > 0:
            violation(watch, kind, count=count)
    for req, (column, expected, found) in wrong:
        if req.finished() or req.is_retracted or req.rid in watch.reported:
            continue
        if not watch.acts:
            # It is not ended, so the same page is found again at every step.
            watch.reported[req.rid] = None
            while len(watch.reported) > 4096:
                watch.reported.pop(next(iter(watch.reported)))
        violation(
            watch,
            "page_mismatch",
            request=req.rid,
            position=column * watch.page_size,
            expected=_describe(expected),
            found=_describe(found),
            action="ended" if watch.acts else "none",
        )
    if watch.acts and (wrong or any(count > 0 for count in fresh.values())):
        careful.enter(watch)
        for req, _ in wrong:
            if not req.finished() and not req.is_retracted:
                end(scheduler, watch, batch, req)


def end(scheduler, watch, batch, req) -> None:
    """End one request before the token of this forward is appended; its neighbours are not touched."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(MESSAGE, 500, ERROR_TYPE)
    watch.counters.aborted += 1
    req.skip_radix_cache_insert = True
    if batch.forward_mode.is_extend():
        req.discard_output_reason = reason
        if scheduler.chunked_req is req:
            # Between two chunks: SGLang ends it at the next scheduling step, as it does when a client leaves.
            scheduler._pending_chunked_abort_req = req
        return
    # The processor appends the token, sees the finish, and sends what lies before finished_len.
    req.to_finish = reason
    req.finished_len = len(req.output_ids)


def _send(numbers: torch.Tensor, batch: int) -> Answer:
    if not numbers.is_cuda:
        return Answer(numbers, None, batch)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Answer(host, ready, batch)


def _describe(packed: int) -> dict[str, int] | None:
    return None if packed < 0 else {"page": packed & 0xFFFFFFFF, "generation": packed >> 32}
