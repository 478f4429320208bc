"""The comparison: what attention is about to read, against what each request was given. One call for a whole batch.

For every request and every page up to its length:

    slot = req_to_token[row, column * page_size]        4 bytes, strided
    page = slot // page_size
    good = expected[row, column] == generation[page] << 32 | page     8 + 4 bytes
         & slot % page_size == 0 & generation[page] odd & poison[page] == 0    4 bytes

and for its newest token, that its slot lies in the page of its column, at its place. 20 bytes a page and 4 a request.
`req_to_token[rows][:, ::page_size]` would copy whole rows first: 32 MiB instead of half a one at 64 × 128k tokens.

Layout of the answer, int64 [batch, 3]: column of the first page that is wrong or -1; what was expected; what was
found (generation << 32 | page). Blind to slots inside a page other than its first and the newest one.
"""

from __future__ import annotations

import torch

from .rows import PAGE_MASK, RowRecord

FINE = -1


def verify_torch(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    record: RowRecord,
    longest: int,
) -> torch.Tensor:
    """The check, in torch operations of fixed shape.

    Args:
        req_to_token: int32 [rows, context], SGLang's page table.
        rows: int64 [batch], the requests' rows.
        lengths: int [batch], tokens that attention will read, the new ones included.
        record: what the rows were given, with the pages' tags.
        longest: an upper limit of `lengths` that the host knows.

    Returns:
        int64 [batch, 3]: (first wrong column or -1, expected, found).
    """
    tags = record.tags
    size = tags.page_size
    rows = rows.to(torch.int64)
    lengths = lengths.to(torch.int64)
    count = max(1, min(-(-longest // size), record.expected.shape[1]))
    columns = torch.arange(count, device=req_to_token.device)
    slots = req_to_token[rows[:, None], columns[None, :] * size].to(torch.int64)
    pages = (slots // size).clamp_(0, tags.num_pages)
    generation = tags.generation[pages]
    found = tags.pack(pages, generation)
    expected = record.expected[rows[:, None], columns[None, :]]
    good = (found == expected) & (slots == pages * size) & (generation & 1 == 1) & (tags.poison[pages] == 0)

    last = (lengths - 1).clamp_(min=0)
    newest = req_to_token[rows, last].to(torch.int64)
    should = (record.expected[rows, last // size] & PAGE_MASK) * size + last % size
    good &= (columns[None, :] != (last // size)[:, None]) | (newest == should)[:, None]

    good |= columns[None, :] * size >= lengths[:, None]
    first = torch.where(good, count, columns).amin(1)
    wrong = first < count
    at = first.clamp(max=count - 1)[:, None]
    report = torch.stack([first, expected.gather(1, at)[:, 0], found.gather(1, at)[:, 0]], 1)
    return torch.where(wrong[:, None], report, FINE)


def verify(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    record: RowRecord,
    longest: int,
) -> torch.Tensor:
    """The check, by the kernel that suits the device; same arguments and answer as `verify_torch`."""
    if req_to_token.is_cuda:
        from .verify_triton import verify_triton

        return verify_triton(req_to_token, rows, lengths, record, longest)
    return verify_torch(req_to_token, rows, lengths, record, longest)


def bytes_read(lengths: list[int], page_size: int) -> int:
    """Bytes that one check of requests of these lengths must read."""
    return sum(20 * -(-length // page_size) + 4 for length in lengths)
