"""Which of SGLang's parsers turns a family's text into tool calls: what `--tool-call-parser` has to be.

Without it the calls stay in the text, markup and all, and the answer holds none. The names are those of SGLang 0.5.23
(``sglang/srt/function_call/function_call_parser.py``). Where two versions of a model share a ``model_type`` and differ in
their markup (GLM-4.5 and 4.7, DeepSeek V3 and V3.1), the table has the first, and the user's own flag goes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOOL_CALL_PARSERS = {
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "deepseek_v3": "deepseekv3",
    "deepseek_v32": "deepseekv32",
    "glm4_moe": "glm45",
    "glm_moe_dsa": "glm47",
    "minimax_m2": "minimax-m2",
    "qwen3_moe": "qwen25",
}
"""``model_type`` in config.json -> SGLang's name of the parser."""


def tool_call_flags(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The flag for a checkpoint, or nothing where no parser is known."""
    parser = TOOL_CALL_PARSERS.get(str(config.get("model_type")))
    return ("--tool-call-parser", parser) if parser else ()
