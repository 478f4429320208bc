"""Put the hooks in place, and prove that they are.

SGLang has a registry for this, which logs a target that it cannot find and goes on. A guard that may be missing is none,
so the hooks are set here: every target is resolved and its parameters compared with those of the version the hook was
written for, all of them before the first one is replaced. When the scheduler is complete it is asked again whether
each hook is still what a caller would reach, because a plug-in that came later may have replaced it.

Functions that other modules imported by name are replaced there too.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import MODE_VARIABLE, SGLANG_VERSION, careful, coverage, guarding, mode, recording, reporting, status
from .watch import ATTRIBUTE, attach

MARKER = "moepress KV integrity: active"
log = logging.getLogger("sglang.moepress_kv_integrity")

_MEMORY = "sglang.srt.mem_cache."
_PAGED = _MEMORY + "allocator.paged.PagedTokenToKVPoolAllocator."
_TOKEN = _MEMORY + "allocator.token.TokenToKVPoolAllocator."
_TREE = _MEMORY + "unified_radix_cache.UnifiedRadixCache."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


@dataclass(frozen=True)
class Hook:
    """`around(original, *arguments)` in the place of `target`, whose parameters are `parameters` in 0.5.23."""

    target: str
    parameters: str
    around: Callable


def hooks() -> tuple[Hook, ...]:
    """All hooks; what they are for is said where they are defined."""
    return (
        Hook(_PAGED + "alloc", "self need_size", recording.allocate),
        Hook(
            _PAGED + "alloc_extend",
            "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
            recording.allocate,
        ),
        Hook(_PAGED + "alloc_decode", "self seq_lens seq_lens_cpu last_loc", recording.allocate_decode),
        Hook(_PAGED + "_release_page_ids", "self page_ids", recording.release_pages),
        Hook(_PAGED + "clear", "self", recording.clear),
        Hook(_TOKEN + "alloc", "self need_size", recording.allocate),
        Hook(_TOKEN + "free", "self free_index", recording.release_tokens),
        Hook(_TOKEN + "clear", "self", recording.clear),
        Hook(_MEMORY + "base_prefix_cache.BasePrefixCache.free_kv_row", "self kv ranges", recording.release_row),
        Hook(_MEMORY + "allocation.alloc_for_extend", "batch", recording.allocate_for_extend),
        Hook(_MEMORY + "allocation.alloc_for_decode", "batch token_per_req", recording.allocate_for_decode),
        Hook(_TREE + "prefix_device_indices", "self req", recording.prefix_indices),
        Hook(_TREE + "path_device_indices", "self node", recording.path_indices),
        Hook(_TREE + "checkpoint_into_tree", "self req up_to kwargs", recording.checkpoint),
        Hook(_TREE + "_match_tree", "self params", recording.match),
        Hook(_TREE + "_drain_device_frees", "self device_frees", recording.drain_tree_frees),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.forward",
            "self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
            guarding.forward,
        ),
        Hook(_SCHEDULER + "run_batch", "self batch pp_proxy_tensors", guarding.run_batch),
        Hook(_SCHEDULER + "process_batch_result", "self batch result", guarding.process_batch_result),
        Hook(_SCHEDULER + "on_idle", "self", careful.idle),
        Hook(_SCHEDULER + "get_internal_state", "self recv_req", status.internal_state),
        Hook(_SCHEDULER + "__init__", "self server_args port_args", _watch_scheduler),
        Hook(
            "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
            "self req recv_req",
            coverage.refuse_beam_search,
        ),
    )


def problems(wanted: tuple[Hook, ...]) -> list[str]:
    """Why hooks cannot be put in place; empty when all can."""
    found = []
    for hook in wanted:
        try:
            present = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            found.append(f"{hook.target} is not there ({error})")
            continue
        parameters = " ".join(inspect.signature(present).parameters)
        if parameters != hook.parameters:
            found.append(f"{hook.target} takes ({parameters}), expected ({hook.parameters})")
    return found


def install() -> None:
    """Replace all targets, or none and end the process. Does nothing the second time."""
    wanted = hooks()
    if all(_is_ours(hook) for hook in wanted):
        return
    if found := problems(wanted):
        sys.exit(_refusal(found, f"this sglang calls itself {SGLANG_VERSION} and is another"))
    for hook in wanted:
        _replace(hook)


def _replace(hook: Hook) -> None:
    path, _, name = hook.target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, name)

    @functools.wraps(original)
    def around(*args, **kwargs):
        return hook.around(original, *args, **kwargs)

    around.moepress_kv_hook = hook.target
    setattr(owner, name, around)
    if not isinstance(owner, type):
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get(name) is original:
                setattr(module, name, around)


def _is_ours(hook: Hook) -> bool:
    """Whether a call of the target passes through our hook, possibly inside later wrappers."""
    try:
        function = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    while function is not None:
        if getattr(function, "moepress_kv_hook", None) == hook.target:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _watch_scheduler(original, self, server_args, port_args):
    """Scheduler.__init__: once all is built and before the first request, check and begin to watch."""
    original(self, server_args, port_args)
    lost = [hook.target for hook in hooks() if not _is_ours(hook)]
    if lost:
        sys.exit(_refusal([f"{target} was replaced by another plug-in" for target in lost], "take that plug-in away"))
    if found := coverage.not_covered(self):
        sys.exit(_refusal(found, f"start without these, or unset {MODE_VARIABLE}"))
    watch = attach(mode(), self.token_to_kv_pool_allocator, self.req_to_token_pool, self.tree_cache)
    for thing in (self, self.tp_worker.model_runner):
        setattr(thing, ATTRIBUTE, watch)
    group = self.attn_tp_group
    watch.group = group.device_group if group.world_size > 1 else None
    watch.writes = group.rank_in_group == 0
    if self.metrics_reporter.enable_metrics:
        watch.metrics = reporting.Metrics({"tp_rank": str(self.tp_group.rank_in_group)})
    from . import faults

    watch.faults = faults.armed(watch)
    log.warning(
        "%s (%s, %d hooks, %d pages of %d tokens)",
        MARKER,
        watch.mode,
        len(hooks()),
        watch.tags.num_pages,
        watch.page_size,
    )


def _refusal(found: list[str], hint: str) -> str:
    return f"moepress KV integrity: refused to start: {'; '.join(found)}\n  hint: {hint}"
