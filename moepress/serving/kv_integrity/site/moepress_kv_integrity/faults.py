"""Faults on purpose: the bookkeeping errors that this package is for, made in SGLang's own structures.

Each function does to one running request what a bug would do, through the allocator, the page table or the tree, and
nothing to tags or records beyond what the hooks see. It returns False where the request offers no place for the fault
(a swap needs two pages).

On a server they are armed by file, and only where MOEPRESS_KV_INTEGRITY_FAULTS names a folder:

    FOLDER/fault.json      {"kind": "wrong_mapping", "rid": "...", "after": 5}     made once `rid` has 5 output tokens
                           {..., "prefilled": 64}          or at the chunk of its prompt that begins at 64 tokens or later
    FOLDER/injected.json   {"kind": ..., "rid": ..., "made": true}                 written when it was
"""

# ruff: noqa: ARG001 - faults have one signature
from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch

from . import FAULTS_VARIABLE

log = logging.getLogger("sglang.moepress_kv_integrity")


def use_after_free(watch, req, others) -> bool:
    """A page goes back to the free list while the request still uses it."""
    pages = _own_pages(watch, req)
    if not pages:
        return False
    watch.allocator.free_page_ids(_tensor(watch, pages[len(pages) // 2]))
    return True


def reuse(watch, req, others) -> bool:
    """As above, and the page is handed to somebody else at once."""
    pages = _own_pages(watch, req)
    if not pages:
        return False
    page = pages[len(pages) // 2]
    watch.allocator.free_page_ids(_tensor(watch, page))
    _hand_out(watch, page)
    return True


def double_allocation(watch, req, others) -> bool:
    """The free list holds a page that is in use, and hands it out."""
    pages = _own_pages(watch, req)
    if not pages:
        return False
    _hand_out(watch, pages[len(pages) // 2])
    return True


def double_free(watch, req, others) -> bool:
    """A page goes back twice: the free list holds it two times."""
    pages = _own_pages(watch, req)
    if not pages:
        return False
    page = _tensor(watch, pages[len(pages) // 2])
    watch.allocator.free_page_ids(page)
    watch.allocator.free_page_ids(page)
    return True


def wrong_mapping(watch, req, others) -> bool:
    """An entry of the request's row names a page of another request."""
    table, size = watch.pool.req_to_token, watch.page_size
    mine = set(_all_pages(watch, req))
    for other in others:
        for page in _own_pages(watch, other):
            if page not in mine:
                column = len(mine) // 2
                table[req.kv.req_pool_idx, column * size : (column + 1) * size] = _slots(watch, page)
                return True
    return False


def swapped_pages(watch, req, others) -> bool:
    """Two pages of the request's row change places."""
    table, size, row = watch.pool.req_to_token, watch.page_size, req.kv.req_pool_idx
    pages = _all_pages(watch, req)
    if len(pages) < 2 or pages[0] == pages[-1]:
        return False
    last = len(pages) - 1
    table[row, :size] = _slots(watch, pages[last])
    table[row, last * size : (last + 1) * size] = _slots(watch, pages[0])
    return True


def missing_lock(watch, req, others) -> bool:
    """The request's prefix is not locked in the tree, and is evicted under it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if not req.kv.cache_protected_len or req.lock is None:
        return False
    held = _all_pages(watch, req)[: req.kv.cache_protected_len // watch.page_size]
    before = watch.tags.generation[held].clone()
    watch.tree.unlock(req.lock)
    watch.tree.evict(EvictParams(num_tokens=watch.allocator.size))
    if bool((watch.tags.generation[held] != before).any()):
        req.lock = None
        return True
    # Another request's lock kept all of them.
    req.lock = watch.tree.lock(req.last_node)
    return False


def stale_tree(watch, req, others) -> bool:
    """A page goes back to the free list while the tree still names it; the request got it from there."""
    protected = _all_pages(watch, req)[: req.kv.cache_protected_len // watch.page_size]
    if not protected:
        return False
    watch.allocator.free_page_ids(_tensor(watch, protected[len(protected) // 2]))
    return True


KINDS = {
    function.__name__: function
    for function in (
        use_after_free,
        reuse,
        double_allocation,
        double_free,
        wrong_mapping,
        swapped_pages,
        missing_lock,
        stale_tree,
    )
}


class Armed:
    """Makes the faults that appear in `folder`, between batches of a running server."""

    def __init__(self, watch, folder: Path) -> None:
        self.watch, self.folder = watch, folder

    def before_batch(self, batch) -> None:
        asked = self.folder / "fault.json"
        if not asked.exists():
            return
        fault = json.loads(asked.read_text())
        for req in batch.reqs:
            if req.rid == fault["rid"] and not req.finished() and _is_due(fault, batch, req):
                asked.unlink()
                others = [other for other in batch.reqs if other is not req and not other.finished()]
                made = KINDS[fault["kind"]](self.watch, req, others)
                log.warning("moepress KV integrity: fault %s made in %s: %s", fault["kind"], req.rid, made)
                report = {**fault, "made": made, "output_ids": len(req.output_ids), "prefix": req.prefix_len}
                draft = self.folder / "injected.tmp"
                draft.write_text(json.dumps(report))
                draft.rename(self.folder / "injected.json")
                return


def _is_due(fault: dict, batch, req) -> bool:
    if "prefilled" in fault:
        return batch.forward_mode.is_extend() and req.prefix_len >= fault["prefilled"]
    return batch.forward_mode.is_decode() and len(req.output_ids) >= fault["after"]


def armed(watch) -> Armed | None:
    """Ready to make faults, or None: only where the environment names a folder."""
    named = os.environ.get(FAULTS_VARIABLE)
    if not named:
        return None
    log.error("moepress KV integrity: FAULT INJECTION IS ALLOWED from %s; never in production", named)
    return Armed(watch, Path(named))


def _all_pages(watch, req) -> list[int]:
    """The pages that the row names up to the allocated length, in order."""
    heads = watch.pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len : watch.page_size]
    return (heads // watch.page_size).tolist()


def _own_pages(watch, req) -> list[int]:
    """Those that are not the tree's."""
    return _all_pages(watch, req)[req.kv.cache_protected_len // watch.page_size :]


def _slots(watch, page: int) -> torch.Tensor:
    table = watch.pool.req_to_token
    return torch.arange(page * watch.page_size, (page + 1) * watch.page_size, dtype=table.dtype, device=table.device)


def _tensor(watch, page: int) -> torch.Tensor:
    return torch.tensor([page], dtype=torch.int64, device=watch.allocator.device)


def _hand_out(watch, page: int) -> None:
    """The allocator's next page is `page`, and somebody takes it."""
    allocator = watch.allocator
    allocator.merge_and_sort_free()
    rest = allocator.free_pages[allocator.free_pages != page]
    allocator.free_pages = torch.cat([_tensor(watch, page), rest])
    allocator.alloc(watch.page_size)
