"""What each request was given: one record a row of SGLang's page table.

    expected  int64 [rows, ceil(context / page_size)]   generation << 32 | page

At 256 rows of 128k tokens and 64 tokens a page that is 4 MiB. A record is written from what the allocator returned or
the tree vouches for, never from the page table it is later compared with. Rows are not cleaned when a request
ends: the next one writes every column it will be checked on.
"""

from __future__ import annotations

import torch

from .tags import PageTags

NOBODY = -1  # an expectation that no page can meet
PAGE_MASK = 0xFFFFFFFF


class RowRecord:
    """Records of all rows of one page table.

    Args:
        rows: rows of req_to_token, the padding row 0 included.
        context: its columns, in tokens.
        tags: the pages' tags.
    """

    def __init__(self, rows: int, context: int, tags: PageTags) -> None:
        self.tags = tags
        columns = -(-context // tags.page_size)
        self.expected = torch.full((rows, columns), NOBODY, dtype=torch.int64, device=tags.device)

    def given_prefix(self, row: int, length: int, slots: torch.Tensor | None) -> None:
        """A new request starts on `length` tokens of the tree.

        `slots` int64 [>= length]: the tree's slots from position 0; None when nobody saw the tree name them, and then no
        page will do.
        """
        size = self.tags.page_size
        if slots is None:
            self.expected[row, : -(-length // size)] = NOBODY
            return
        pages = slots[:length:size] // size
        self.expected[row, : pages.numel()] = self.tags.pack(pages, self.tags.tree[pages])

    def given_extend(self, row: int, start: int, slots: torch.Tensor) -> None:
        """A prefill was given `slots` int64 [n] for the positions `start`, `start` + 1, ...

        A chunk that begins inside a page must go on in the page the request already has.
        """
        size = self.tags.page_size
        if slots.numel() == 0:
            return
        if start % size:
            column = start // size
            same = (self.expected[row, column] & PAGE_MASK) == slots[0] // size
            self.expected[row, column] = torch.where(same, self.expected[row, column], NOBODY)
        skip = -start % size
        pages = slots[skip::size] // size
        first = (start + skip) // size
        self.expected[row, first : first + pages.numel()] = self.tags.pack(pages, self.tags.generation[pages])

    def given_decode(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """One token each: `rows`, `positions`, `slots` int64 [batch]. Writes where a new page begins."""
        size = self.tags.page_size
        columns, pages = positions // size, slots // size
        fresh = self.tags.pack(pages, self.tags.generation[pages])
        self.expected[rows, columns] = torch.where(positions % size == 0, fresh, self.expected[rows, columns])

    def moved_to_tree(self, row: int, start: int, slots: torch.Tensor) -> None:
        """The tree took over, or gave other pages for, the positions from `start` (a page boundary) on.

        Args:
            row: the request's row.
            start: first position whose page table entries were rewritten.
            slots: int64 [n], the tree's slots from `start` on, whole pages.
        """
        size = self.tags.page_size
        pages = slots[::size] // size
        first = start // size
        before = self.expected[row, first : first + pages.numel()]
        given = torch.where((before & PAGE_MASK) == pages, before >> 32, 0).to(torch.int32)
        self.expected[row, first : first + pages.numel()] = self.tags.pack(pages, self.tags.adopted(pages, given))

    def proven(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Pages of the positions [start, stop) that this row demonstrably still owns alone: int64 [m], m data-dependent.

        Theirs is the generation on record, they are not broken and not the tree's. Waits for the device.
        """
        size = self.tags.page_size
        expected = self.expected[row, start // size : -(-stop // size)]
        expected = expected[expected >= 0]
        pages, generation = expected & PAGE_MASK, expected >> 32
        own = (self.tags.generation[pages] == generation) & (generation & 1 == 1)
        own &= (self.tags.poison[pages] < 2) & (self.tags.tree[pages] == 0)
        return torch.unique(pages[own])
