"""Hooks that keep tags and records: where pages are handed out, given back, written into rows, and taken by the tree.

Each function has the hooked function's arguments with the original in front, and returns what it returned.

    allocator.alloc, alloc_extend, alloc_decode        pages begin to be used
    paged._release_page_ids, token.free                the sinks where pages go back to the free list
    alloc_for_extend, alloc_for_decode                 rows are written: prefix from the tree, the rest from the allocator
    tree.checkpoint_into_tree                          the tree takes pages over and rewrites the row to its own
    tree._drain_device_frees                           the tree gives pages up

The tree's core is Rust and cannot be hooked; these are the places where pages cross its border. Frees made inside a
free group reach the sink later, so what the tree gives up is noted when it says so, not when the page arrives.
"""

from __future__ import annotations

import torch

from . import careful
from .watch import watch_of

_PREFIX = "_moepress_kv_prefix"


def allocate(original, self, *args, **kwargs):
    """alloc and alloc_extend of both allocators."""
    slots = original(self, *args, **kwargs)
    watch = watch_of(self)
    if watch is not None and slots is not None and slots.numel():
        watch.tags.allocated(slots)
    return slots


def allocate_decode(original, self, seq_lens, seq_lens_cpu, last_loc):
    """alloc_decode: most steps begin no page, and the host's copy of the lengths tells which do."""
    slots = original(self, seq_lens, seq_lens_cpu, last_loc)
    watch = watch_of(self)
    if watch is not None and slots is not None and _any_begins(seq_lens_cpu - 1, watch.page_size):
        watch.tags.allocated(slots)
    return slots


def release_pages(original, self, *page_ids):
    """PagedTokenToKVPoolAllocator._release_page_ids."""
    watch = watch_of(self)
    if watch is None:
        return original(self, *page_ids)
    pages = torch.cat(page_ids).to(torch.int64)
    if watch.suspect and watch.acts:
        pages = careful.releasable(watch, pages)
    watch.tags.freed(pages)
    return original(self, pages)


def release_tokens(original, self, free_index):
    """TokenToKVPoolAllocator.free: pages of one token."""
    watch = watch_of(self)
    if watch is None or self.free_group is not None or free_index.numel() == 0:
        return original(self, free_index)
    pages = free_index.to(torch.int64)
    if watch.suspect and watch.acts:
        pages = careful.releasable(watch, pages)
    watch.tags.freed(pages)
    return original(self, pages)


def clear(original, self):
    """clear of both allocators: at start (nobody watches yet), at a flush, at a resize."""
    result = original(self)
    watch = watch_of(self)
    if watch is not None:
        if self.size // self.page_size != watch.tags.num_pages:
            raise SystemExit("moepress KV integrity: the KV pool was resized while it was watched; not covered")
        watch.tags.cleared()
        watch.suspect = False
    return result


def prefix_indices(original, self, req):
    """UnifiedRadixCache.prefix_device_indices: what a new request is about to be given from the tree."""
    slots = original(self, req)
    if watch_of(self) is not None:
        setattr(req, _PREFIX, slots)
    return slots


def path_indices(original, self, node):
    """UnifiedRadixCache.path_device_indices: inside a checkpoint, what the row is rewritten to."""
    slots = original(self, node)
    watch = watch_of(self)
    if watch is not None:
        watch.path = slots
    return slots


def allocate_for_extend(original, batch):
    """alloc_for_extend: (slots int64 [tokens], rows on the device, rows int64 [batch] on the host)."""
    watch = watch_of(batch.tree_cache.token_to_kv_pool_allocator)
    if watch is None:
        return original(batch)
    new = [not req.kv.holds_kv for req in batch.reqs]
    answer = original(batch)
    slots, rows = answer[0], answer[2].tolist()
    begin = 0
    for req, row, is_new, start, count in zip(batch.reqs, rows, new, batch.prefix_lens, batch.extend_lens, strict=True):
        if is_new and start:
            watch.record.given_prefix(row, start, getattr(req, _PREFIX, None))
        watch.record.given_extend(row, start, slots[begin : begin + count])
        begin += count
        if is_new:
            setattr(req, _PREFIX, None)
    return answer


def allocate_for_decode(original, batch, token_per_req):
    """alloc_for_decode: one slot a request, at the position of its present length."""
    watch = watch_of(batch.tree_cache.token_to_kv_pool_allocator)
    if watch is None:
        return original(batch, token_per_req)
    positions, begins = batch.seq_lens, _any_begins(batch.seq_lens_cpu, watch.page_size)
    slots = original(batch, token_per_req)
    if begins:
        rows = batch.req_pool_indices.to(torch.int64)
        watch.record.given_decode(rows, positions.to(torch.int64), slots.to(torch.int64))
    return slots


def checkpoint(original, self, req, *, up_to, **kwargs):
    """UnifiedRadixCache.checkpoint_into_tree: the row is rewritten from its protected length on."""
    watch = watch_of(self)
    if watch is None:
        return original(self, req, up_to=up_to, **kwargs)
    if watch.suspect and watch.acts:
        return None  # nothing more goes into a tree that may name pages of others
    row, start = req.kv.req_pool_idx, req.kv.cache_protected_len
    watch.path = None
    result = original(self, req, up_to=up_to, **kwargs)
    path, watch.path = watch.path, None
    if path is not None and path.numel() > start:
        watch.record.moved_to_tree(row, start, path[start:].to(torch.int64))
    return result


def match(original, self, params):
    """UnifiedRadixCache._match_tree: a suspect tree is not asked."""
    result = original(self, params)
    watch = watch_of(self)
    if watch is not None and watch.suspect and watch.acts:
        from sglang.srt.mem_cache.base_prefix_cache import zero_match_result

        return zero_match_result(self, result, extra_key=params.key.extra_key)
    return result


def drain_tree_frees(original, self, device_frees):
    """UnifiedRadixCache._drain_device_frees: component → tensors of whole pages, int64 slots."""
    watch = watch_of(self)
    if watch is not None:
        for component, values in list(device_frees.items()):
            if watch.suspect and watch.acts:
                device_frees[component] = values = careful.tree_releasable(watch, values)
            for slots in values:
                watch.tags.disowned(slots[:: watch.page_size].to(torch.int64) // watch.page_size)
    return original(self, device_frees)


def release_row(original, self, kv, ranges):
    """BasePrefixCache.free_kv_row: in a suspect pool a request gives back what is provably its own, whatever its row says."""
    watch = watch_of(self)
    if watch is None or not (watch.suspect and watch.acts):
        return original(self, kv, ranges)
    for start, stop in ranges:
        if start < stop:
            watch.allocator.free_page_ids(watch.record.proven(kv.req_pool_idx, start, stop))
    return None


def _any_begins(positions, page_size) -> bool:
    """Whether a page begins at one of these positions; `positions` int [batch] on the host."""
    return page_size == 1 or bool((positions % page_size == 0).any())
