"""KV-cache page integrity: a plug-in for the server's environment, and what is measured with it.

`site/` is the plug-in (see `site/moepress_kv_integrity`): put on PYTHONPATH of SGLang 0.5.23 or installed there, it
imports nothing of moepress. Nothing here imports it: the two meet in environment variables and in /server_info.
"""

from __future__ import annotations

from pathlib import Path

SITE = Path(__file__).parent / "site"
"""The folder for PYTHONPATH."""

MODE_VARIABLE = "MOEPRESS_KV_INTEGRITY"
LOG_VARIABLE = "MOEPRESS_KV_INTEGRITY_LOG"
STATUS_KEY = "moepress_kv_integrity"
MODES = ("off", "observe", "enforce", "strict")
