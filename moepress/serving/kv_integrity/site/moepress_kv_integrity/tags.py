"""What each page is now: its generation, whether it is trusted, and under which generation the prefix tree holds it.

    generation  int32 [pages]   +1 when handed out, +1 when given back: odd = in use, and no two uses share a number
    poison      int32 [pages]   0 trusted; TAINTED contents made from a wrong page; BROKEN bookkeeping contradicted itself
    tree        int32 [pages]   the generation the tree took the page over with; 0 = not in the tree
    events      int64 [4]       contradictions counted so far, by kind (EVENTS)

Page 0 is SGLang's padding page: never handed out, and here the place where masked writes go. Updates have fixed
shapes and no data-dependent branch, so nothing waits for the device. A list of pages may hold one page twice (that is
one of the faults): increments add up, marks are maxima, so the order of duplicates does not matter.
"""

from __future__ import annotations

import torch

TAINTED = 1
BROKEN = 2
EVENTS = ("double_allocation", "double_free", "free_under_tree", "foreign_tree_free")


class PageTags:
    """Tags of one allocator's pages.

    Args:
        num_pages: pages that the allocator hands out, numbered 1 to num_pages.
        page_size: tokens a page.
        device: where the page table is.
    """

    def __init__(self, num_pages: int, page_size: int, device) -> None:
        self.page_size = page_size
        self.device = device
        self.generation = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        self.poison = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        self.tree = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        self.events = torch.zeros(len(EVENTS), dtype=torch.int64, device=device)
        self._count = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)

    @property
    def num_pages(self) -> int:
        return self.generation.numel() - 1

    def allocated(self, slots: torch.Tensor) -> None:
        """`slots` int64 [n]: what the allocator just returned. A page begins to be used where its first slot is in it."""
        pages = slots // self.page_size
        first = (slots % self.page_size == 0).to(torch.int32)
        live = self.generation[pages] & 1
        again = first * (live | self._repeated(pages, first))
        self._mark(pages, again, BROKEN)
        self.events[0] += again.sum()
        # A page that was in use gets +2: still odd, and its first owner's record has expired.
        self.generation.index_add_(0, pages, first + first * live)

    def freed(self, pages: torch.Tensor) -> None:
        """`pages` int64 [n]: what goes back to the allocator's free list."""
        live = self.generation[pages] & 1
        wrong = (1 - live) | self._repeated(pages, torch.ones_like(live))
        held = (self.tree[pages] != 0).to(torch.int32)
        self._mark(pages, wrong | held, BROKEN)
        self.events[1] += wrong.sum()
        self.events[2] += held.sum()
        # Written, not added: a page that is twice in the list is free once. All duplicates write the same number.
        self.generation[pages] = self.generation[pages] + live

    def disowned(self, pages: torch.Tensor) -> None:
        """`pages` int64 [n]: what the tree gives up; their free follows (at once, or at the end of a free group)."""
        foreign = (self.tree[pages] != self.generation[pages]).to(torch.int32)
        self._mark(pages, foreign, BROKEN)
        self.events[3] += foreign.sum()
        self.tree[pages] = 0

    def adopted(self, pages: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The tree now holds `pages`; those it did not hold before are taken over with the generation `given`.

        Args:
            pages: int64 [n].
            given: int32 [n], the generation that the request's record has for the page; 0 where it has another page.

        Returns:
            int32 [n]: the generation under which the tree holds each page. 0 where nobody can vouch for it, which no
            page in use ever has.
        """
        held = self.tree[pages]
        now = torch.where(held == 0, given, held)
        self.tree[pages] = now
        return now

    def tainted(self, pages: torch.Tensor, which: torch.Tensor) -> None:
        """Mark `pages` int64 [n] where `which` bool [n]: what is being written into them comes from a wrong page."""
        self._mark(pages, which.to(torch.int32), TAINTED)

    def cleared(self) -> None:
        """The allocator was reset: everything is free, nothing is suspect, and no old record fits any more."""
        self.generation += self.generation & 1
        self.poison.zero_()
        self.tree.zero_()

    def pack(self, pages: torch.Tensor, generation: torch.Tensor) -> torch.Tensor:
        """int64: generation << 32 | page."""
        return (generation.to(torch.int64) << 32) | pages

    def _mark(self, pages: torch.Tensor, which: torch.Tensor, level: int) -> None:
        self.poison.scatter_reduce_(0, pages, (which * level).to(torch.int32), "amax")

    def _repeated(self, pages: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """int32 [n]: 1 where a page is counted more than once in this list."""
        self._count.index_add_(0, pages, counted)
        repeated = (self._count[pages] > 1).to(torch.int32)
        self._count[pages] = 0
        return repeated
