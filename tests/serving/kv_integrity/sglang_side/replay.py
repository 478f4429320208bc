"""Bugs that were reported in public, done again to SGLang's own structures: who is named by the next check?

Each function makes a world, does what the bug did, and returns the requests that must be named and those that must not.
A bug of another engine, or of a pool that SGLang 0.5.23 does not let us watch, is replayed by its effect on pages and rows.

Runs in the SGLang environment. Prints one JSON line a bug.
"""

from __future__ import annotations

import json

import torch
import world as sglang_world
from world import World

PAGE = 4


def _prompt(first: int, count: int) -> list[int]:
    return [first + k for k in range(count)]


def retract_frees_pages_of_the_tree(world: World):
    """sgl-project/sglang#38319: retracting a request frees its whole row, the tree's prefix with it."""
    (first,) = world.start(_prompt(0, 4 * PAGE))
    (sharing,) = world.start([*_prompt(0, 4 * PAGE), 900])
    (apart,) = world.start(_prompt(500, 3 * PAGE))
    row = world.slots(first)
    world.live.remove(first)
    world.allocator.free_segment(row, start_pos=0)  # and not from the protected length on
    world.tree.unlock(first.lock)
    world.pool.free(first)
    (later,) = world.start([*_prompt(0, 4 * PAGE), 901, 902])
    return [sharing, later], [apart]


def extend_continues_in_a_page_of_another(world: World):
    """sgl-project/sglang#27731: alloc_extend is told a last slot that lies in somebody else's page."""
    (other,) = world.start(_prompt(0, PAGE + 1))
    (req,) = world.start(_prompt(100, 4 * PAGE), end=PAGE + 1)
    row, at = req.kv.req_pool_idx, PAGE
    right = world.pool.req_to_token[row, at].clone()
    world.pool.req_to_token[row, at] = world.pool.req_to_token[other.kv.req_pool_idx, PAGE]
    world.go_on(req, end=2 * PAGE - 1)
    world.pool.req_to_token[row, at] = right
    return [req], [other]


def a_split_inside_a_page_frees_it_twice(world: World):
    """sgl-project/sglang#38941: two ranges of one row that meet inside a page, both freed to the page's end."""
    (req,) = world.start(_prompt(0, 2 * PAGE + 2))
    (apart,) = world.start(_prompt(500, 2 * PAGE))
    row = world.slots(req)
    world.live.remove(req)
    tail = row[2 * PAGE :]
    world.allocator.free_segment(tail[:1], start_pos=0)
    world.allocator.free_segment(tail[:2], start_pos=0)
    world.tree.unlock(req.lock)
    world.pool.free(req)
    world.hand_out_next(int(tail[0]) // PAGE)
    return world.start(_prompt(200, 2), _prompt(300, 2)), [apart]


def the_boundary_page_is_freed_twice(world: World):
    """sgl-project/sglang#38840: the page at the end of the cached prefix is freed by the request too."""
    (req,) = world.start(_prompt(0, 2 * PAGE + 2))
    (apart,) = world.start(_prompt(500, 2 * PAGE))
    row, protected = world.slots(req), req.kv.cache_protected_len
    world.allocator.free_segment(row[protected - PAGE : protected], start_pos=protected - PAGE)
    world.release(req, checkpoint=False)
    (later,) = world.start([*_prompt(0, 2 * PAGE), 900])
    return [later], [apart]


def a_stale_window_frees_pages_of_another(world: World):
    """sgl-project/sglang#25805: a mapping that was not forgotten frees slots that are somebody else's by now."""
    (gone,) = world.start(_prompt(0, 2 * PAGE + 2))
    window = world.slots(gone)[2 * PAGE :]
    world.release(gone, checkpoint=False)
    world.hand_out_next(int(window[0]) // PAGE)
    (owner,) = world.start(_prompt(300, 2))
    (apart,) = world.start(_prompt(500, 2 * PAGE))
    world.allocator.free(window)
    return [owner], [apart]


def insert_frees_slots_that_are_still_read(world: World):
    """sgl-project/sglang#35769: inserting frees a request's duplicates, and a copy that was made before goes on using them."""
    first, twin = world.start(_prompt(0, 3 * PAGE), _prompt(0, 3 * PAGE), end=PAGE - 1)
    before = world.slots(twin)
    world.go_on(first, twin, end=3 * PAGE)
    (apart,) = world.start(_prompt(500, 2 * PAGE))
    world.pool.req_to_token[twin.kv.req_pool_idx, : before.numel()] = before.to(torch.int32)
    return [twin], [first, apart]


def a_window_block_is_freed_under_a_dispatched_step(world: World):
    """vllm-project/vllm-ascend#13501: the step is dispatched, then its oldest block is given back and handed out."""
    (req,) = world.start(_prompt(0, 3))
    (apart,) = world.start(_prompt(500, 2 * PAGE))
    for _ in range(PAGE):
        world.live = [req]
        world.decode()
    world.live = [req, apart]
    oldest = world.slots(req)[:1] // PAGE
    world.allocator.free_page_ids(oldest)
    world.hand_out_next(int(oldest))
    (taker,) = world.start(_prompt(300, 2))
    return [req], [apart, taker]


def offsets_are_overwritten_during_their_copy(world: World):
    """NVIDIA/TensorRT-LLM#15546: the page table that reaches the device is the next batch's."""
    (req,) = world.start(_prompt(0, 3 * PAGE))
    (apart,) = world.start(_prompt(500, 3 * PAGE))
    world.pool.req_to_token[req.kv.req_pool_idx] = world.pool.req_to_token[apart.kv.req_pool_idx]
    return [req], [apart]


BUGS = {
    "sglang#38319": retract_frees_pages_of_the_tree,
    "sglang#27731": extend_continues_in_a_page_of_another,
    "sglang#38941": a_split_inside_a_page_frees_it_twice,
    "sglang#38840": the_boundary_page_is_freed_twice,
    "sglang#25805": a_stale_window_frees_pages_of_another,
    "sglang#35769": insert_frees_slots_that_are_still_read,
    "vllm-ascend#13501": a_window_block_is_freed_under_a_dispatched_step,
    "TensorRT-LLM#15546": offsets_are_overwritten_during_their_copy,
}


def main() -> None:
    sglang_world.prepare()
    for name, bug in BUGS.items():
        for seed in (0, 1):  # the two ways in which the allocator keeps its free list
            world = World(PAGE, seed)
            victims, others = bug(world)
            named = [world.check([req])[0] for req in victims]
            hit = [world.check([req])[0] for req in others]
            events = world.watch.tags.events.tolist()
            report = {"bug": name, "seed": seed, "named": named, "hit": hit}
            print(json.dumps({**report, "events": events}))


if __name__ == "__main__":
    main()
