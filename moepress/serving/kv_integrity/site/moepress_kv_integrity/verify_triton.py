"""`verify_torch` in two launches: a scan that only reads, and one thread a request that looks up what was found.

    scan      grid [batch, ceil(longest / page_size / BLOCK)]; each program reads one block of columns, takes the minimum
              of the wrong ones and folds it into first[row] with one atomic minimum
    describe  grid [batch]; expected and found at that column

Programs past a request's length end at once, so a long context beside short ones costs its own pages only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import RowRecord

BLOCK = 512


@triton.jit
def _scan(
    table, table_stride, rows, lengths, expected, expected_stride, generation, poison, first, num_pages, size, none,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    length = tl.load(lengths + request).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    if begin * size < length:
        row = tl.load(rows + request).to(tl.int64)
        columns = begin + tl.arange(0, BLOCK).to(tl.int64)
        inside = columns * size < length
        slots = tl.load(table + row * table_stride + columns * size, mask=inside, other=0).to(tl.int64)
        promised = tl.load(expected + row * expected_stride + columns, mask=inside, other=-1)
        pages = tl.minimum(tl.maximum(slots // size, 0), num_pages)
        now = tl.load(generation + pages, mask=inside, other=0)
        bad = tl.load(poison + pages, mask=inside, other=0)
        good = ((now.to(tl.int64) << 32) | pages) == promised
        good = good & (slots == pages * size) & ((now & 1) == 1) & (bad == 0)
        last = length - 1
        newest = tl.load(table + row * table_stride + last).to(tl.int64)
        in_place = newest == (promised & 0xFFFFFFFF) * size + last % size
        good = good & ((columns != last // size) | in_place)
        wrong = tl.where(inside & (good == 0), columns, none)
        tl.atomic_min(first + request, tl.min(wrong, 0))


@triton.jit
def _describe(
    table, table_stride, rows, expected, expected_stride, generation, first, report, num_pages, size, none
):  # fmt: skip
    request = tl.program_id(0)
    column = tl.load(first + request)
    if column < none:
        row = tl.load(rows + request).to(tl.int64)
        slot = tl.load(table + row * table_stride + column * size).to(tl.int64)
        page = tl.minimum(tl.maximum(slot // size, 0), num_pages)
        now = tl.load(generation + page).to(tl.int64)
        tl.store(report + request * 3, column)
        tl.store(report + request * 3 + 1, tl.load(expected + row * expected_stride + column))
        tl.store(report + request * 3 + 2, (now << 32) | page)


def verify_triton(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    record: RowRecord,
    longest: int,
) -> torch.Tensor:
    """The check; arguments and answer as in `verify.verify_torch`."""
    tags = record.tags
    size, batch = tags.page_size, rows.numel()
    count = max(1, min(-(-longest // size), record.expected.shape[1]))
    first = torch.full((batch,), count, dtype=torch.int64, device=req_to_token.device)
    report = torch.full((batch, 3), -1, dtype=torch.int64, device=req_to_token.device)
    if batch == 0:
        return report
    table, promised = req_to_token, record.expected
    _scan[(batch, triton.cdiv(count, BLOCK))](
        table, table.stride(0), rows, lengths, promised, promised.stride(0), tags.generation, tags.poison, first,
        tags.num_pages, size, count, BLOCK=BLOCK,
    )  # fmt: skip
    _describe[(batch,)](
        table, table.stride(0), rows, promised, promised.stride(0), tags.generation, first, report,
        tags.num_pages, size, count,
    )  # fmt: skip
    return report
