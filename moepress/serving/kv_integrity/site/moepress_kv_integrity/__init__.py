"""KV-cache page integrity for SGLang 0.5.23: no token is sent that was made from a page of somebody else.

Every physical page has a generation that moves on each time the page is handed out or given back. Every request remembers
the generation under which it was given each of its pages. Before a forward reads the cache, both are compared for
all requests at once, on the device:

    page table   req_to_token[row, column * page_size]  →  slot  →  page          what attention will read
    tags         generation[page], poison[page]                                    what that page is now
    record       expected[row, column] = generation << 32 | page                   what the request was given

A request that does not agree is pointed at the padding row before attention runs, ends with HTTP 500 and
`KVIntegrityError`, and the token of that forward is cut. Its neighbours go on with the tokens they would have had.

    tags, rows     the state and its updates, without host synchronisation
    verify         the comparison, in torch; verify_triton the same in one launch
    recording      hooks on allocators, page-table writes and the prefix tree
    guarding       hooks on the forward and its result: check, quarantine, abort
    careful        what is done with a pool whose bookkeeping has failed, until it can be rebuilt
    coverage       what is not covered, refused when the server starts
    patching       putting hooks in place, and proving that they are
    reporting      counters, metrics, one JSON line per violation
    status         the counters of every rank, as /server_info shows them
    faults         faults on purpose, for tests

Active where this folder is on PYTHONPATH (or installed) and MOEPRESS_KV_INTEGRITY names a mode:

    observe   count and log; nothing a client sees changes
    enforce   as above, and the request ends before the token is sent
    strict    enforce, and each check is waited for before the forward is launched (tests)

SGLang logs the errors of plug-ins and goes on without them. Here every doubt ends the process by SystemExit, which it does
not catch: another SGLang version, a hook target that is missing or has other parameters, a pool that is not covered.

This package imports torch and SGLang and nothing else; it is no part of moepress's own environment.
"""

from __future__ import annotations

import os
import sys

SGLANG_VERSION = "0.5.23"
MODE_VARIABLE = "MOEPRESS_KV_INTEGRITY"
LOG_VARIABLE = "MOEPRESS_KV_INTEGRITY_LOG"
FAULTS_VARIABLE = "MOEPRESS_KV_INTEGRITY_FAULTS"
MODES = ("off", "observe", "enforce", "strict")
STATUS_KEY = "moepress_kv_integrity"
"""Where /server_info shows the status: internal_states[i][STATUS_KEY]."""


def mode() -> str:
    """The mode asked for; ends the process when it is none of ours."""
    asked = os.environ.get(MODE_VARIABLE, "off")
    if asked not in MODES:
        sys.exit(f"moepress KV integrity: {MODE_VARIABLE}={asked!r} is none of {', '.join(MODES)}")
    return asked


def register() -> None:
    """Entry point, called by SGLang once in every process.

    The hooks go where the scheduler is (it hosts the model runner) and into the parent, which so fails first and in the
    foreground. The other processes (detokenizer, data-parallel controller) never import the scheduler's module.
    """
    if mode() == "off":
        if os.environ.get(FAULTS_VARIABLE):
            sys.exit(f"moepress KV integrity: {FAULTS_VARIABLE} is set and {MODE_VARIABLE} is off")
        return
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        sys.exit(
            f"moepress KV integrity: made for sglang {SGLANG_VERSION}, this is {sglang.__version__}. Its hooks stand on "
            f"that version's code; unset {MODE_VARIABLE}, or install the version it was made for."
        )
    if "sglang.srt.managers.scheduler" in sys.modules:
        from . import patching

        patching.install()
