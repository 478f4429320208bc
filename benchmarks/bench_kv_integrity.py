"""What one KV-integrity check touches and takes, per decode step, for batches as they are served.

    python -m benchmarks.bench_kv_integrity                             on a CPU: torch operations
    python -m benchmarks.bench_kv_integrity --device cuda --step-ms 20  on a GPU: the Triton kernel, and its share of a step

    check         verify, the answer's copy to the host, the quarantine: what a step adds before its forward
    record        allocated and given_decode, in a step where every request begins a page (with 64 tokens a page: every
                  64th step of a request)
    whole rows    the naive gather req_to_token[rows][:, ::page_size], for comparison

On a GPU `device` is time on the stream (events) and `host` is the scheduler thread's time for launching, which overlap
scheduling hides behind the previous forward. The larger of the two, check and record together, against --step-ms is the
claim to be checked: < 1 %.
Needs torch (and triton on a GPU), not SGLang. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import machine
from moepress.serving.kv_integrity import SITE

SHAPES = ((1, 131072, 64), (64, 16384, 64), (64, 131072, 64), (256, 8192, 64), (64, 16384, 1))
"""(requests, tokens each, tokens a page)"""


class Step:
    """A batch in the middle of decoding, all pages in order."""

    def __init__(self, requests: int, tokens: int, page_size: int, device: str) -> None:
        from moepress_kv_integrity.rows import RowRecord  # type: ignore[import-not-found]
        from moepress_kv_integrity.tags import PageTags  # type: ignore[import-not-found]

        columns = -(-tokens // page_size)
        pages = requests * columns
        self.requests, self.longest, self.device = requests, tokens, device
        self.tags = PageTags(pages + requests, page_size, device)
        self.tags.generation[1 : pages + 1] = 1
        self.record = RowRecord(requests + 1, columns * page_size + page_size, self.tags)
        order = (torch.randperm(pages) + 1).view(requests, columns).to(device)
        self.record.expected[1:, :columns] = self.tags.pack(order, self.tags.generation[order])
        slots = order[:, :, None] * page_size + torch.arange(page_size, device=device)
        self.table = torch.zeros(requests + 1, (columns + 1) * page_size, dtype=torch.int32, device=device)
        self.table[1:, : columns * page_size] = slots.view(requests, -1).to(torch.int32)
        self.rows = torch.arange(1, requests + 1, device=device)
        self.lengths = torch.full((requests,), tokens, device=device)
        self.new_slots = (torch.arange(pages + 1, pages + requests + 1, device=device)) * page_size
        self.out_slots = self.table[self.rows, self.lengths - 1].to(torch.int64)

    def check(self) -> torch.Tensor:
        from moepress_kv_integrity.guarding import _send  # type: ignore[import-not-found]
        from moepress_kv_integrity.verify import verify  # type: ignore[import-not-found]

        report = verify(self.table, self.rows, self.lengths, self.record, self.longest)
        numbers = torch.cat([report.view(-1), self.tags.events])
        wrong = numbers[: 3 * self.requests].view(-1, 3)[:, 0] >= 0
        _send(numbers, self.requests)
        torch.where(wrong, 0, self.rows)
        torch.where(wrong, 0, self.out_slots)
        return wrong

    def note(self) -> None:
        self.tags.allocated(self.new_slots)
        self.record.given_decode(self.rows, self.lengths, self.new_slots)
        self.tags.freed(self.new_slots // self.tags.page_size)

    def whole_rows(self) -> torch.Tensor:
        return self.table[self.rows][:, :: self.tags.page_size] // self.tags.page_size


def timed(run: Callable[[], Any], device: str, rounds: int) -> dict[str, float]:
    """Medians in microseconds: on the host, and on the stream of a GPU."""
    run()
    host, stream = [], []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        started = time.perf_counter()
        run()
        host.append((time.perf_counter() - started) * 1e6)
        if device == "cuda":
            end.record()
            torch.cuda.synchronize()
            stream.append(begin.elapsed_time(end) * 1e3)
    found = {"host_us": round(statistics.median(host), 1)}
    return found | ({"device_us": round(statistics.median(stream), 1)} if stream else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--step-ms", type=float, help="a decode step of the model, for the share")
    options = parser.parse_args()
    sys.path.insert(0, str(SITE))
    from moepress_kv_integrity.verify import bytes_read

    torch.set_num_threads(1)
    report: dict[str, Any] = {"options": vars(options), "machine": machine(), "shapes": []}
    if options.device == "cuda":
        report["machine"]["gpu"] = torch.cuda.get_device_name()
    for requests, tokens, page_size in SHAPES:
        step = Step(requests, tokens, page_size, options.device)
        assert not bool(step.check().any()), "a sound batch raised an alarm"
        row: dict[str, Any] = {
            "requests": requests,
            "tokens": tokens,
            "page_size": page_size,
            "bytes": bytes_read([tokens] * requests, page_size),
            "check": timed(step.check, options.device, options.rounds),
            "record": timed(step.note, options.device, options.rounds),
            "whole_rows": timed(step.whole_rows, options.device, options.rounds),
        }
        if options.step_ms:
            worst = max(row["check"][clock] + row["record"][clock] for clock in row["check"])
            row["share_of_step"] = round(worst / (options.step_ms * 1e3), 5)
        report["shapes"].append(row)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
