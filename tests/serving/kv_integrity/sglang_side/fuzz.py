"""Random operations on SGLang's own bookkeeping, with the check after each, and faults made in the middle of them.

    python fuzz.py clean  --page-size 1 4 64 --operations 350000 --seed 1
    python fuzz.py faults --page-size 1 4 64 --each 500 --seed 1
    python fuzz.py aftermath --page-size 1 4 64 --each 100 --seed 1

Runs in the SGLang environment, with the plug-in's folder on PYTHONPATH. Prints one JSON line a page size. Exits with 1 when
something was wrong: an alarm without a fault, a fault without an alarm, a bystander hit, tokens nobody holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import world as sglang_world
from moepress_kv_integrity import faults
from moepress_kv_integrity.tags import EVENTS
from world import World

WORLD_OPERATIONS = 5000  # then a new world, with the next seed


def clean(page_size: int, operations: int, seed: int) -> dict:
    """No fault is made, so every alarm is a false one."""
    found = {"operations": 0, "checks": 0, "requests_checked": 0, "prefix_hits": 0, "false_alarms": 0, "leaked": 0}
    done: dict[str, int] = {}
    events = torch.zeros(len(EVENTS), dtype=torch.int64)
    while found["operations"] < operations:
        world = World(page_size, seed)
        seed += 1
        for _ in range(min(WORLD_OPERATIONS, operations - found["operations"])):
            world.step()
            wrong = world.check()
            found["operations"] += 1
            found["checks"] += bool(wrong)
            found["requests_checked"] += len(wrong)
            found["false_alarms"] += sum(wrong)
        world.clear()
        found["leaked"] += world.leaked()
        found["false_alarms"] += world.alarms_in_prefill
        found["prefix_hits"] += world.prefix_hits
        events += world.watch.tags.events
        for name, count in world.done.items():
            done[name] = done.get(name, 0) + count
    found["false_alarms"] += int(events.sum())
    return {**found, "by_kind": done, "ok": found["false_alarms"] == 0 and found["leaked"] == 0}


def inject(page_size: int, kind: str, each: int, seed: int) -> dict:
    """`each` faults of one kind, each in a world of its own that has run a while.

    Caught: the next check names the request. A bystander is hit when it is named though it holds none of the pages
    that the fault touched.
    """
    found = {"made": 0, "caught": 0, "bystanders": 0, "bystanders_hit": 0, "worlds": 0}
    missed = []
    while found["made"] < each:
        seed += 1
        found["worlds"] += 1
        world = World(page_size, seed)
        for _ in range(world.random.randrange(20, 120)):
            world.step()
        running = world.running()
        world.random.shuffle(running)
        tags = world.watch.tags
        for victim in running:
            before = tags.generation * 4 + tags.poison
            others = [req for req in running if req is not victim]
            if not faults.KINDS[kind](world.watch, victim, others):
                continue
            found["made"] += 1
            touched = set(torch.nonzero(tags.generation * 4 + tags.poison != before)[:, 0].tolist())
            named = dict(zip((req.rid for req in running), world.check(running), strict=True))
            found["caught"] += named[victim.rid]
            if not named[victim.rid]:
                missed.append(seed)
            for other in others:
                clear = touched.isdisjoint(_pages(world, other))
                found["bystanders"] += clear
                found["bystanders_hit"] += clear and named[other.rid]
            break
    ok = found["caught"] == found["made"] and found["bystanders_hit"] == 0
    return {"kind": kind, **found, "missed_seeds": missed[:10], "ok": ok}


def aftermath(page_size: int, kind: str, each: int, seed: int) -> dict:
    """`each` faults of one kind in enforce mode, and life after them.

    Ended: the victim, by the guard. Then the world goes on with a closed tree, and once flushed with an open one: nobody
    who holds none of the pages that the fault touched may be named any more, no page may be listed as free twice or while
    in use, and after the flush none is lost.
    """
    found = {"made": 0, "ended": 0, "named_later": 0, "bad_free_lists": 0, "lost": 0, "still_suspect": 0}
    while found["made"] < each:
        seed += 1
        world = World(page_size, seed, mode="enforce")
        for _ in range(world.random.randrange(20, 120)):
            world.step()
        tags = world.watch.tags
        before = tags.generation * 4 + tags.poison
        victim = next(
            (
                req
                for req in world.live
                if faults.KINDS[kind](world.watch, req, [o for o in world.live if o is not req])
            ),
            None,
        )
        if victim is None:
            continue
        found["made"] += 1
        touched = set(torch.nonzero(tags.generation * 4 + tags.poison != before)[:, 0].tolist())
        # a prompt between two chunks that shares a touched page is ended when its next chunk reads it
        owners = {req.rid for req in world.running() if touched & set(_pages(world, req))}
        found["ended"] += victim.rid in world.handle()
        for turn in range(60):
            if turn == 30:
                world.clear()
                found["still_suspect"] += world.watch.suspect
            world.step()
            found["named_later"] += len(set(world.handle()) - owners)
            found["bad_free_lists"] += not _free_list_is_sound(world)
        world.clear()
        found["lost"] += world.leaked()
    bad = found["named_later"] + found["bad_free_lists"] + found["lost"] + found["still_suspect"]
    return {"kind": kind, **found, "ok": found["ended"] == found["made"] and bad == 0}


def _free_list_is_sound(world: World) -> bool:
    free = world.allocator.get_all_free_pages()
    in_use = world.watch.tags.generation[free] & 1
    return free.unique().numel() == free.numel() and not bool(in_use.any())


def _pages(world: World, req) -> list[int]:
    row = world.pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
    return (row // world.page_size).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("clean", "faults", "aftermath"))
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sglang_world.prepare()
    good = True
    for page_size in asked.page_size:
        began = time.perf_counter()
        if asked.what == "clean":
            result = clean(page_size, asked.operations, asked.seed)
        else:
            run = inject if asked.what == "faults" else aftermath
            kinds = [run(page_size, kind, asked.each, asked.seed) for kind in faults.KINDS]
            result = {"faults": kinds, "ok": all(kind["ok"] for kind in kinds)}
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"page_size": page_size, "seed": asked.seed, "seconds": seconds, **result}), flush=True)
        good = good and result["ok"]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
