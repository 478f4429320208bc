"""What is done with a pool whose bookkeeping has failed, until it can be rebuilt.

One wrong entry in a free list or a tree can be met by any later request. So from the first violation on, in the modes
that act, everything is done the slow way (the host waits for the device, which it does nowhere else):

    free list     broken pages, pages in use and second entries of a page are taken out; whatever comes back is checked
    rows          give back what their record proves, not what the page table says (recording.release_row)
    prefix tree   closed: nothing is matched in it, nothing goes into it; it gives up only pages that are its own
    idle moment   the cache is flushed: free list and tree are built anew, and the pool is trusted again

Trade-off: until the next idle moment new requests compute their whole prompt, and pages that nobody can vouch for are not
used. The alternative, going on with a tree that may be wrong, aborts whoever meets it.
"""

from __future__ import annotations

import logging

import torch

from .tags import BROKEN

log = logging.getLogger("sglang.moepress_kv_integrity")


def enter(watch) -> None:
    """From now on, be careful. Called between batches, when no free group is open."""
    if watch.suspect:
        return
    watch.suspect = True
    allocator, tags = watch.allocator, watch.tags
    listed = allocator.get_all_free_pages()
    free = torch.unique(listed)
    free = free[(tags.generation[free] & 1 == 0) & (tags.poison[free] < BROKEN)]
    allocator.free_pages = free
    if hasattr(allocator, "staged_pages"):
        allocator.staged_pages, allocator.num_staged_pages = [], 0
    else:
        allocator.release_pages = free[:0]
    watch.counters.withheld_pages += listed.numel() - free.numel()
    log.error(
        "moepress KV integrity: the prefix cache is closed until the next idle moment, when it is rebuilt; "
        "%d entries taken out of the free list",
        listed.numel() - free.numel(),
    )


def releasable(watch, pages: torch.Tensor) -> torch.Tensor:
    """Those of `pages` int64 [n] that may be given back: in use, not broken, not the tree's, once each."""
    tags = watch.tags
    unique = torch.unique(pages)
    good = (tags.generation[unique] & 1 == 1) & (tags.poison[unique] < BROKEN) & (tags.tree[unique] == 0)
    kept = unique[good]
    tags.poison[kept] = 0
    watch.counters.withheld_pages += pages.numel() - kept.numel()
    return kept


def tree_releasable(watch, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the tree's slots whose page is still the tree's. Each of `values`: int64, whole pages."""
    kept = []
    for slots in values:
        by_page = slots.view(-1, watch.page_size)
        pages = by_page[:, 0].to(torch.int64) // watch.page_size
        own = (watch.tags.tree[pages] == watch.tags.generation[pages]) & (watch.tags.poison[pages] < BROKEN)
        kept.append(by_page[own].reshape(-1))
        watch.tags.tree[pages[~own]] = 0
    return [slots for slots in kept if slots.numel()]


def idle(original, self):
    """Scheduler.on_idle: before SGLang counts its pages (and would end the process), begin anew."""
    from .watch import watch_of

    watch = watch_of(self)
    if watch is not None:
        if watch.suspect and watch.acts and self.is_fully_idle():
            self.flush_cache(empty_cache=False)
            watch.counters.rebuilds += 1
            log.warning("moepress KV integrity: cache flushed, bookkeeping rebuilt; the prefix cache is open again")
        if watch.metrics is not None:
            watch.metrics.update(watch)
    return original(self)
