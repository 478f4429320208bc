"""What is not covered. Each item is refused by name when the server starts; all of them are named at once.

A class is covered when its code was read and run under the hooks, so the test is for the exact class: a subclass may write
rows or free pages in places that no hook stands at, and would be seen as one false alarm after another.
"""

from __future__ import annotations

BEAM_SEARCH = "Beam search copies page-table rows, which KV integrity (MOEPRESS_KV_INTEGRITY) does not cover."

_WHY = {
    "HiSparseTokenToKVPoolAllocator": "hisparse: logical pages that move between device and host",
    "DeepSeekV4HiSparseTokenToKVPoolAllocator": "hisparse: logical pages that move between device and host",
    "PageInterleavePoolAllocator": "page_interleave: pages sharded over ranks",
    "SWATokenToKVPoolAllocator": "sliding-window pools: a second page space behind a mapping",
    "PureSWATokenToKVPoolAllocator": "sliding-window pools: a second page space behind a mapping",
    "UnifiedSWATokenToKVPoolAllocator": "unified memory: virtual ids that are compacted while in use",
    "UnifiedMambaSWATokenToKVPoolAllocator": "unified memory: virtual ids that are compacted while in use",
    "UnifiedMambaTokenToKVPoolAllocator": "unified memory: virtual ids that are compacted while in use",
    "MultiEndedAllocator": "unified memory: virtual ids that are compacted while in use",
    "FloatMultiEndedAllocator": "unified memory: virtual ids that are compacted while in use",
    "NPUPagedTokenToKVPoolAllocator": "NPU: an allocator of its own",
    "DSV4NPUTokenToKVPoolAllocator": "NPU: an allocator of its own",
    "HybridReqToTokenPool": "recurrent state (Mamba) beside the KV pages",
    "DecodeReqToTokenPool": "prefill/decode disaggregation: pages are filled by a remote write",
    "LMCacheUnifiedRadixCache": "LMCache: pages are filled from outside",
}
_COVERED = {
    "allocator": ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"),
    "page table": ("ReqToTokenPool",),
    "prefix cache": ("UnifiedRadixCache",),
}


def not_covered(scheduler) -> list[str]:
    """Reasons why this scheduler cannot be watched; empty when it can."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool, is_deepseek_dsa
    from sglang.srt.runtime_context import get_exec, get_parallel, get_serving

    parallel, tree, config = get_parallel(), scheduler.tree_cache, scheduler.model_config
    found = [
        reason
        for role, thing in (
            ("allocator", scheduler.token_to_kv_pool_allocator),
            ("page table", scheduler.req_to_token_pool),
            ("prefix cache", tree),
        )
        if (reason := of_class(role, type(thing).__name__)) is not None
    ]
    conditions = {
        f"device {scheduler.device}: read and run on cuda and cpu only": scheduler.device not in ("cuda", "cpu"),
        "pipeline parallelism: results are processed on another rank than the one that checked": parallel.pp_size > 1,
        "decode context parallelism: pages are widened": parallel.dcp_enabled,
        "prefill/decode disaggregation: pages are filled by a remote write": scheduler.disaggregation_mode.value
        != "null",
        "speculative decoding: page-table writes of the draft and metadata planned before the check": (
            not scheduler.spec_algorithm.is_none()
        ),
        "two-batch overlap: its halves keep the rows of before the quarantine": (
            get_exec().overlap.enable_two_batch_overlap
        ),
        "a pooled sparse-attention index: planned from the host's copy of the rows": (
            is_deepseek_dsa(config.hf_config) and get_dsa_index_kpool(config.hf_config) > 1
        ),
        "PD multiplexing: a prefill split over several forwards": scheduler.enable_pdmux,
        "diffusion language models: pages are kept and reused": scheduler.dllm_config is not None,
        "embedding and reward models: results have no token to cut": not scheduler.is_generation,
        "encoder-decoder models: pages of the encoder": config.is_encoder_decoder,
        "streaming sessions: a row moves from request to request": get_serving().enable_streaming_session,
        "HiCache: pages are filled from the host": getattr(tree, "cache_controller", None) is not None,
        "an external cache linker: pages are filled from outside": getattr(tree, "linker", None) is not None,
        "other tree components than full attention": len(getattr(tree, "tree_components", ())) != 1,
    }
    found += [name for name, present in conditions.items() if present]
    return list(dict.fromkeys(found))


def of_class(role: str, name: str) -> str | None:
    """Why a class is not covered in this role, or None."""
    if name in _COVERED[role]:
        return None
    return _WHY.get(name, f"{role} {name}: unknown")


def refuse_beam_search(original, self, req, recv_req):
    """BeamCoordinator.validate_and_init returns an error for the client; beam search is chosen request by request."""
    from .watch import watch_of

    return BEAM_SEARCH if watch_of(self.req_to_token_pool) is not None else original(self, req, recv_req)
