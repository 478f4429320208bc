"""One watch a scheduler: what hangs together, and where the hooks find it.

The hooked objects (allocator, page table, tree, model runner, scheduler) carry the watch as an attribute. An object
without one is not watched and its hooks do nothing, so draft models, warm-up before the scheduler is complete and
anything else that uses the same classes run as they would without us.
"""

from __future__ import annotations

import torch

from .reporting import Counters
from .rows import RowRecord
from .tags import EVENTS, PageTags

ATTRIBUTE = "_moepress_kv_integrity"


class Watch:
    """State of one allocator, its page table and its prefix tree.

    Attributes:
        mode: observe, enforce or strict.
        allocator, pool, tree: SGLang's objects (`tree` may be disabled).
        tags: the pages' tags.
        record: what the rows were given.
        counters: what has been seen.
        suspect: the bookkeeping has contradicted itself and was not rebuilt since (see `careful`).
        unread: the check of the forward that is being launched, until run_batch attaches it to the result.
        path: slots that the tree returned last for a whole path; set while a checkpoint runs.
    """

    def __init__(self, mode: str, allocator, pool, tree) -> None:
        self.mode = mode
        self.allocator = allocator
        self.pool = pool
        self.tree = tree
        self.page_size = allocator.page_size
        self.tags = PageTags(allocator.size // allocator.page_size, allocator.page_size, allocator.device)
        self.record = RowRecord(*pool.req_to_token.shape, self.tags)
        self.counters = Counters(mode=mode, page_size=self.page_size)
        self.suspect = False
        self.unread = None
        self.path: torch.Tensor | None = None
        self.group = None  # torch.distributed group of the ranks that must decide alike; None = this rank alone
        self.writes = True  # False on all ranks of that group but its first: they see the same violations
        self.metrics = None  # reporting.Metrics, where the server's own are on
        self.faults = None  # faults.Armed, in tests
        self.events_seen = [0] * len(EVENTS)
        self.reported: dict[str, None] = {}  # observe: ids of requests whose line is written, oldest first

    @property
    def acts(self) -> bool:
        return self.mode != "observe"


def watch_of(thing) -> Watch | None:
    """The watch that a hooked object carries."""
    return getattr(thing, ATTRIBUTE, None)


def attach(mode: str, allocator, pool, tree) -> Watch:
    """Begin to watch. All pages must be free: a page in use has no record that could be checked.

    Raises:
        RuntimeError: pages are in use already.
    """
    if allocator.available_size() != allocator.size // allocator.page_size * allocator.page_size:
        raise RuntimeError("moepress KV integrity: attached to a pool with pages in use")
    watch = Watch(mode, allocator, pool, tree)
    for thing in (allocator, pool, tree):
        setattr(thing, ATTRIBUTE, watch)
    return watch
