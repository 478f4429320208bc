"""Parse command lines with the parsers of SGLang and its router. Runs in the SGLang environment, not in ours.

    python flags_parse.py commands.json      [[python, -m, sglang.launch_server, ...], ...]

Prints one JSON object a command: what the parser made of it. Ends with an error at the first flag it does not know.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def server(words: list[str]) -> dict:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = vars(parser.parse_args(words))
    return {
        name: value for name, value in found.items() if value is None or isinstance(value, bool | int | float | str)
    }


def router(words: list[str]) -> dict:
    from sglang_router.launch_router import parse_router_args

    found = parse_router_args(words)
    return {name: getattr(found, name) for name in ("pd_disaggregation", "prefill_urls", "decode_urls", "host", "port")}


PARSERS = {"sglang.launch_server": server, "sglang_router.launch_router": router}

for command in json.loads(Path(sys.argv[1]).read_text()):
    print(json.dumps({"parsed": PARSERS[command[2]](command[3:])}), flush=True)
