"""The guard's decisions, one by one, on a world's real requests: what attention is given, what is ended, what is refused.

Runs in the SGLang environment. Prints one JSON line a question: {"name": ..., facts}.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import torch
import world as sglang_world
from moepress_kv_integrity import coverage, faults, guarding, patching
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from transformers import PretrainedConfig
from world import World

PAGE = 4


def decode_is_pointed_at_the_padding_row() -> dict:
    world = World(PAGE, 0, mode="enforce")
    bad, good = world.start([1] * 9, [2] * 9)
    bad_row, good_row, slot = bad.kv.req_pool_idx, good.kv.req_pool_idx, int(world.slots(good)[-1])
    faults.wrong_mapping(world.watch, bad, [good])
    table = world.pool.req_to_token.clone()
    world.handle()
    seen = world.forwarded
    return {
        "bad_row": bad_row,
        "rows": seen.req_pool_indices.tolist(),
        "slots": seen.out_cache_loc.tolist(),
        "good": [good_row, slot],
        "table_unchanged": bool((table[good_row] == world.pool.req_to_token[good_row]).all()),
    }


def _prefill(world: World, reqs: list[Req]) -> SimpleNamespace:
    lengths = torch.tensor([req.kv.kv_allocated_len for req in reqs])
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, batch_size=len(reqs), seq_lens=lengths, seq_lens_cpu=lengths,
        req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]), extend_seq_lens=lengths,
        out_cache_loc=torch.cat([world.slots(req) for req in reqs]),
    )  # fmt: skip


def prefill_writes_nothing_and_leaves_a_mark() -> dict:
    world = World(PAGE, 0, mode="enforce")
    bad, good = world.start([1] * 6, [2] * 7)
    faults.swapped_pages(world.watch, bad, [])
    batch = _prefill(world, [bad, good])
    own = world.slots(bad)[::PAGE] // PAGE
    wrong = guarding.check(world.watch, batch)
    guarding.quarantine(world.watch, batch, wrong)
    return {
        "wrong": wrong.tolist(),
        "slots": batch.out_cache_loc.tolist(),
        "good_slots": world.slots(good).tolist(),
        "marks": world.watch.tags.poison[own].tolist(),
        "marks_elsewhere": int((world.watch.tags.poison > 0).sum()) - int((world.watch.tags.poison[own] > 0).sum()),
    }


def a_request_that_reads_marked_pages_is_named() -> dict:
    world = World(PAGE, 0, mode="enforce")
    (first,) = world.start([1] * 8)
    world.watch.tags.tainted(world.slots(first)[::PAGE] // PAGE, torch.ones(2, dtype=torch.bool))
    later, apart = world.start([1] * 8 + [3], [2] * 5)
    return {"named": world.check([later, apart])}


def what_an_ended_request_looks_like() -> dict:
    world = World(PAGE, 0, mode="enforce")
    bad, good = world.start([1] * 9, [2] * 9)
    world.live = [bad, good]
    world.decode()
    sent = list(bad.output_ids)
    faults.wrong_mapping(world.watch, bad, [good])
    ended = world.handle()
    return {
        "ended": ended,
        "is": [bad.rid],
        "finish": bad.finished_reason.to_json(),
        "visible_is_what_was_before": list(bad.output_ids_through_stop) == sent,
        "appended": len(bad.output_ids) - len(sent),
        "good_goes_on": not good.finished() and world.check([good]) == [False],
        "lost": world.leaked() - PAGE,  # the good one has a page of its own beside the prompt's two
        "status": world.watch.counters.status(world.watch.suspect),
    }


def observing_changes_nothing() -> dict:
    world = World(PAGE, 0, mode="observe")
    bad, good = world.start([1] * 9, [2] * 9)
    faults.wrong_mapping(world.watch, bad, [good])
    rows = [bad.kv.req_pool_idx, good.kv.req_pool_idx]
    ended = world.handle() + world.handle()
    return {
        "ended": ended,
        "rows": world.forwarded.req_pool_indices.tolist() == rows,
        "finish": bad.to_finish is None and bad.finished_len is None and not bad.skip_radix_cache_insert,
        "suspect": world.watch.suspect,
        "violations": world.watch.counters.violations,
    }


def a_chunked_prompt_is_ended_between_its_chunks() -> dict:
    world = World(PAGE, 0, mode="enforce")
    (bad,) = world.start([1] * 20, end=8)
    scheduler = SimpleNamespace(chunked_req=bad, _pending_chunked_abort_req=None)
    guarding.end(scheduler, world.watch, SimpleNamespace(forward_mode=ForwardMode.EXTEND), bad)
    return {
        "pending": scheduler._pending_chunked_abort_req is bad,
        "reason": bad.discard_output_reason.to_json()["err_type"],
        "kept_out_of_the_tree": bad.skip_radix_cache_insert,
    }


def what_is_refused() -> dict:
    none = SimpleNamespace(is_none=lambda: True)
    world = World(PAGE, 0)
    covered = {
        "token_to_kv_pool_allocator": world.allocator, "req_to_token_pool": world.pool, "tree_cache": world.tree,
        "device": "cpu", "disaggregation_mode": SimpleNamespace(value="null"), "spec_algorithm": none,
        "enable_pdmux": False, "dllm_config": None, "is_generation": True,
        "model_config": SimpleNamespace(is_encoder_decoder=False, hf_config=PretrainedConfig()),
    }  # fmt: skip

    def refused(**changed) -> list[str]:
        return coverage.not_covered(SimpleNamespace(**{**covered, **changed}))

    def of(name: str):
        return type(name, (), {})()

    return {
        "covered": refused(),
        "everything": refused(
            token_to_kv_pool_allocator=of("UnifiedSWATokenToKVPoolAllocator"),
            req_to_token_pool=of("HybridReqToTokenPool"),
            tree_cache=of("LMCacheUnifiedRadixCache"),
            device="npu",
            disaggregation_mode=SimpleNamespace(value="decode"),
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            enable_pdmux=True,
            dllm_config=object(),
            is_generation=False,
            model_config=SimpleNamespace(is_encoder_decoder=True, hf_config=PretrainedConfig()),
        ),
        "hisparse": refused(token_to_kv_pool_allocator=of("HiSparseTokenToKVPoolAllocator")),
        "page_interleave": refused(token_to_kv_pool_allocator=of("PageInterleavePoolAllocator")),
        "unheard_of": refused(token_to_kv_pool_allocator=of("TomorrowsAllocator")),
        "beam": coverage.refuse_beam_search(None, SimpleNamespace(req_to_token_pool=world.pool), None, None),
    }


def what_the_self_check_says() -> dict:
    hooks = patching.hooks()
    changed = patching.Hook(hooks[1].target, "self prefix_lens seq_lens", hooks[1].around)
    gone = patching.Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", "self", hooks[0].around)
    missing_module = patching.Hook("sglang.srt.no_such_module.f", "self", hooks[0].around)
    return {
        "in_place": [hook.target for hook in hooks if not patching._is_ours(hook)],
        "problems": patching.problems(hooks),
        "changed": patching.problems((changed,)),
        "gone": patching.problems((gone, missing_module)),
    }


def ranks_decide_alike() -> dict:
    """Two processes of one tensor-parallel group, and a fault that only the second one's memory has."""
    processes = torch.multiprocessing.get_context("fork")
    answers = processes.Queue()
    workers = [processes.Process(target=_rank, args=(rank, answers)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(answers.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    return {"wrong": [found[0], found[1]]}


def _rank(rank: int, answers) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["KV_TEST_PORT"]), 2, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    world = World(PAGE, 0, mode="enforce")
    bad, good = world.start([1] * 9, [2] * 9)
    world.watch.group = torch.distributed.group.WORLD
    if rank == 1:
        faults.wrong_mapping(world.watch, bad, [good])
    lengths = torch.tensor([9, 9])
    batch = SimpleNamespace(
        seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=torch.tensor([bad.kv.req_pool_idx, good.kv.req_pool_idx])
    )  # fmt: skip
    answers.put((rank, guarding.check(world.watch, batch).tolist()))
    torch.distributed.barrier()


QUESTIONS = (
    decode_is_pointed_at_the_padding_row,
    prefill_writes_nothing_and_leaves_a_mark,
    a_request_that_reads_marked_pages_is_named,
    what_an_ended_request_looks_like,
    observing_changes_nothing,
    a_chunked_prompt_is_ended_between_its_chunks,
    what_is_refused,
    what_the_self_check_says,
    ranks_decide_alike,
)


def main() -> None:
    sglang_world.prepare()
    for question in QUESTIONS:
        print(json.dumps({"name": question.__name__, **question()}), flush=True)


if __name__ == "__main__":
    main()
