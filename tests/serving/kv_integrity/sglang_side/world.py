"""A scheduler's cache bookkeeping without a scheduler: SGLang's own allocator, page table, radix tree and requests.

Runs in the SGLang environment. Every step calls the functions that the scheduler calls (alloc_for_extend,
alloc_for_decode, checkpoint_kv_cache, release_kv_cache, ...), with the plug-in's hooks in place; only the model is missing.
Everything random comes from one seed.
"""

from __future__ import annotations

import array
import logging
import random
from types import SimpleNamespace

import torch

logging.disable(logging.WARNING)

from moepress_kv_integrity import guarding, patching  # noqa: E402
from moepress_kv_integrity.verify import verify_torch  # noqa: E402
from moepress_kv_integrity.watch import ATTRIBUTE, attach  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.mem_cache import allocation  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

PAGES_A_PROMPT = 6
ROWS = 8


def prepare() -> None:
    """Once a process: SGLang's configuration, one thread, the hooks."""
    torch.set_num_threads(1)
    arguments = ServerArgs(model_path="none", device="cpu", attention_backend="torch_native")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    import sglang.srt.managers.scheduler  # noqa: F401 - the hooks go where it is

    patching.install()


class World:
    """One pool of `pages` pages and what runs on it.

    Attributes:
        live: requests that decode; waiting: retracted ones; chunked: the one between two chunks of its prompt.
        alarms_in_prefill: of the checks between a prefill's allocation and its insertion, where its forward would be.
        done: operations so far, by name.
    """

    def __init__(self, page_size: int, seed: int, *, pages: int = 48, mode: str = "observe") -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        context = (PAGES_A_PROMPT + 6) * page_size + 8
        size = pages * page_size
        kv = MLATokenToKVPool(
            size=size, page_size=page_size, dtype=torch.bfloat16, kv_lora_rank=2, qk_rope_head_dim=2, layer_num=1,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        need_sort = seed % 2 == 1
        self.allocator = (
            TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", kv, need_sort)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", kv, need_sort)
        )
        self.pool = ReqToTokenPool(ROWS, context, "cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.pool, token_to_kv_pool_allocator=self.allocator,
                page_size=page_size, tree_components=(ComponentType.FULL,),
            )
        )  # fmt: skip
        self.watch = attach(mode, self.allocator, self.pool, self.tree)
        self.context = context
        self.live: list[Req] = []
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.made = 0
        self.done: dict[str, int] = {}
        self.prefix_hits = 0
        self.alarms_in_prefill = 0
        self.last_prompt: list[int] = []
        length = PAGES_A_PROMPT * page_size
        self.roots = [[self.random.randrange(40) for _ in range(length)] for _ in range(3)]

    # What can happen; each returns False where there is nothing to do it to.

    def step(self) -> str:
        """One random operation, then the check of everything that runs. Returns its name."""
        while True:
            name = self.random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            if getattr(self, name)():
                self.done[name] = self.done.get(name, 0) + 1
                return name

    def prefill(self) -> bool:
        """One batch: up to three new or retracted requests, often with the same beginning; the last may be cut to a chunk.

        All of a batch look into the tree before any of it is inserted, so equal prompts miss together and their pages
        become duplicates.
        """
        reqs: list[tuple[Req, int]] = []
        need = 0
        for _ in range(self.random.choice((1, 1, 2, 3))):
            if self.chunked is not None or len(self.live) + len(reqs) >= ROWS - 1:
                break
            req = self.waiting[0] if self.waiting else self._new_request(again=self.random.random() < 0.3)
            total = len(req.origin_input_ids) + len(req.output_ids)
            need += total + 2 * self.page_size
            if not self._fits(need):
                break
            if self.waiting:
                self.waiting.pop(0)
            self._admit(req)
            reqs.append((req, total))
        if not reqs:
            return False
        req, total = reqs[-1]
        if self.random.random() < 0.3 and total - req.prefix_len > 2 * self.page_size:
            # SGLang cuts chunks at page boundaries, except where truncation is not aligned.
            end = req.prefix_len + self.random.randrange(1, total - req.prefix_len)
            if self.random.random() < 0.8:
                end = max(end // self.page_size * self.page_size, req.prefix_len + 1)
            reqs[-1] = (req, end)
        self._extend(reqs)
        return True

    def next_chunk(self) -> bool:
        """The chunked prompt goes on, to its end or by another piece."""
        req = self.chunked
        if req is None:
            return False
        total = len(req.full_untruncated_fill_ids)
        if not self._fits(total - req.prefix_len + 2 * self.page_size):
            return self._end_chunked()
        end = total if self.random.random() < 0.6 else self.random.randrange(req.prefix_len + 1, total + 1)
        self._extend([(req, end)])
        return True

    def decode(self) -> bool:
        """One token for all, or some, of the running requests."""
        able = [req for req in self.live if req.kv.kv_allocated_len < self.context - 1]
        if not able or not self._fits(len(able) * self.page_size):
            return False
        if self.random.random() < 0.2:
            able = self.random.sample(able, self.random.randrange(1, len(able) + 1))
        lengths = torch.tensor([req.kv.kv_committed_len for req in able])
        rows = torch.tensor([req.kv.req_pool_idx for req in able])
        batch = self._batch(able)
        batch.seq_lens, batch.seq_lens_cpu = lengths, lengths
        batch.req_pool_indices = batch.req_pool_indices_cpu = rows
        allocation.alloc_for_decode(batch, token_per_req=1)
        for req in able:
            req.output_ids.append(self.random.randrange(40))
        return True

    def finish(self) -> bool:
        """A request ends and leaves what it has to the tree."""
        if not self.live:
            return False
        req = self._take()
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        self._release(req, checkpoint=True)
        return True

    def abort(self) -> bool:
        """A request ends and leaves nothing."""
        if not self.live:
            return False
        req = self._take()
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        self._release(req, checkpoint=False)
        return True

    def retract(self) -> bool:
        """A request gives its pages back and waits to be computed again."""
        if not self.live:
            return False
        req = self._take()
        self._release(req, checkpoint=False)
        req.reset_for_retract()
        if len(req.origin_input_ids) + len(req.output_ids) < self.context - self.page_size:
            self.waiting.append(req)
        return True

    def evict(self) -> bool:
        self.tree.evict(EvictParams(num_tokens=self.random.choice((1, 2, 8)) * self.page_size))
        return True

    def clear(self) -> bool:
        """The server is idle and the cache is flushed; to get there, everything ends."""
        while self.live:
            self.finish()
        if self.chunked is not None:
            self._end_chunked()
        self.waiting.clear()
        self.tree.reset()
        self.pool.clear()
        self.allocator.clear()
        return True

    # What a replay does, step by step.

    def start(self, *prompts: list[int], end: int | None = None) -> list[Req]:
        """Requests with these prompts, prefilled in one batch, whole or (all) to `end`."""
        reqs = []
        for prompt in prompts:
            self.made += 1
            req = Req(f"r{self.made}", "", array.array("q", prompt), SamplingParams(max_new_tokens=1000))
            self._admit(req)
            reqs.append((req, len(prompt) if end is None else end))
        self._extend(reqs)
        return [req for req, _ in reqs]

    def go_on(self, *reqs: Req, end: int) -> None:
        """The next chunk of each, to `end`, in one batch."""
        self._extend([(req, end) for req in reqs])

    def hand_out_next(self, page: int) -> None:
        """The free list's entries of `page`, one or more, come first."""
        self.allocator.merge_and_sort_free()
        free = self.allocator.get_all_free_pages()
        self.allocator.free_pages = torch.cat([free[free == page], free[free != page]])

    def release(self, req: Req, *, checkpoint: bool) -> None:
        """It ends now."""
        self.live.remove(req)
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=checkpoint)

    def slots(self, req: Req) -> torch.Tensor:
        """The request's row up to its length, int64, a copy."""
        return self.pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].to(torch.int64)

    # What a scheduler does around it.

    def running(self) -> list[Req]:
        return [*self.live, *([self.chunked] if self.chunked is not None else [])]

    def check(self, reqs: list[Req] | None = None, verify=verify_torch) -> list[bool]:
        """The batched check: True for each request that does not read what it was given."""
        reqs = self.running() if reqs is None else reqs
        if not reqs:
            return []
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lengths = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        report = verify(self.pool.req_to_token, rows, lengths, self.watch.record, int(lengths.max()))
        return (report[:, 0] >= 0).tolist()

    def handle(self) -> list[str]:
        """One decode step's check and what the guard does with its answer, as in a server. Returns who was ended."""
        reqs = list(self.live)
        if not reqs:
            return []
        lengths = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(reqs),
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=self.pool.req_to_token[[req.kv.req_pool_idx for req in reqs], lengths - 1].to(torch.int64),
            extend_seq_lens=None,
        )
        self.forwarded = forward_batch
        runner = SimpleNamespace(is_draft_worker=False)
        scheduler = SimpleNamespace(chunked_req=self.chunked)
        for thing in (runner, scheduler):
            setattr(thing, ATTRIBUTE, self.watch)
        guarding.forward(lambda *_: None, runner, forward_batch)
        result = SimpleNamespace(moepress_kv_answer=self.watch.unread)
        batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.DECODE)
        guarding.process_batch_result(lambda *_: None, scheduler, batch, result)
        ended = [req for req in reqs if req.to_finish is not None]
        for req in ended:
            req.output_ids.append(0)  # what the result processor does with the token of this forward
            req.update_finish_state()
            self.live.remove(req)
            release_kv_cache(req, self.tree, checkpoint=True)
        return [req.rid for req in ended]

    def leaked(self) -> int:
        """Tokens that nobody holds when nothing runs: SGLang's own count."""
        held = self.allocator.available_size() + self.tree.evictable_size() + self.tree.protected_size()
        return self.allocator.size - held

    def _fits(self, tokens: int) -> bool:
        """Whether so many can be had. In a suspect pool evicting may give back less than it counts: as the scheduler does
        before a decode step, it is done first, and then looked at."""
        available = self.allocator.available_size()
        if self.watch.suspect and available < tokens:
            self.tree.evict(EvictParams(num_tokens=tokens - available))
            return self.allocator.available_size() >= tokens
        return available + self.tree.evictable_size() >= tokens

    def _new_request(self, *, again: bool) -> Req:
        """With a prompt of its own behind a shared beginning, or `again` the last one's."""
        if not again or not self.last_prompt:
            root = self.random.choice(self.roots)
            own = [self.random.randrange(40) for _ in range(self.random.randrange(1, self.page_size + 3))]
            self.last_prompt = root[: self.random.randrange(1, len(root))] + own
        self.made += 1
        parameters = SamplingParams(max_new_tokens=4 * self.page_size)
        return Req(f"r{self.made}", "", array.array("q", self.last_prompt), parameters)

    def _admit(self, req: Req) -> None:
        req.init_next_round_input(self.tree)
        req.is_retracted = False
        req.lock = self.tree.lock(req.last_node)
        self.prefix_hits += req.prefix_len > 0

    def _take(self) -> Req:
        return self.live.pop(self.random.randrange(len(self.live)))

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        grouped = self.random.random() < 0.5  # as while results are processed
        if grouped:
            self.allocator.free_group_begin()
        release_kv_cache(req, self.tree, checkpoint=checkpoint)
        if grouped:
            self.allocator.free_group_end()

    def _end_chunked(self) -> bool:
        req, self.chunked = self.chunked, None
        req.finished_reason = FINISH_LENGTH(length=0)
        self._release(req, checkpoint=False)
        return True

    def _extend(self, reqs: list[tuple[Req, int]]) -> None:
        """One prefill batch of (request, end of this chunk), and what follows when its result is processed."""
        for req, end in reqs:
            req.extend_end = end
        batch = self._batch([req for req, _ in reqs])
        batch.prefix_lens = [req.prefix_len for req in batch.reqs]
        batch.extend_lens = [end - req.prefix_len for req, end in reqs]
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([end for _, end in reqs])
        batch.extend_num_tokens = sum(batch.extend_lens)
        allocation.alloc_for_extend(batch)
        self.alarms_in_prefill += sum(self.check(batch.reqs))
        for req, end in reqs:
            checkpoint_kv_cache(req, self.tree)
            if end == len(req.full_untruncated_fill_ids):
                req.output_ids.append(self.random.randrange(40))
                self.live.append(req)
                if self.chunked is req:
                    self.chunked = None
            else:
                self.chunked = req

    def _batch(self, reqs: list[Req]) -> SimpleNamespace:
        return SimpleNamespace(
            reqs=reqs, tree_cache=self.tree, req_to_token_pool=self.pool, device="cpu", hisparse_coordinator=None,
            is_dllm=lambda: False, maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )  # fmt: skip


_WEIGHTS = {
    "prefill": 20, "next_chunk": 12, "decode": 40, "finish": 9, "abort": 4, "retract": 5, "evict": 6, "clear": 0.1,
}  # fmt: skip
