"""``python -m fuzz CAMPAIGN``: run it, print what came out, exit 1 if anything was found."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

from fuzz.bounded import Tally, limit_memory


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description=import_module("fuzz").__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("campaign", choices=("headers", "texts", "tokenizers", "checkpoints", "coverage"))
    parser.add_argument("target", nargs="?", default="headers", choices=("headers", "texts"), help="of coverage")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="one case, without bounds, its error as it is")
    parser.add_argument("--seconds", type=int, default=60, help="of coverage")
    options = parser.parse_args()
    if options.campaign == "coverage":
        from fuzz.coverage import run

        return run(options.target, options.seconds)
    module = import_module(f"fuzz.{options.campaign}")
    if options.only is not None:
        print(module.judge(module.case(options.seed, options.only)))
        return 0
    if hasattr(module, "warm_up"):
        module.warm_up()
    limit_memory()
    tally = Tally()
    shown = time.monotonic()
    for number in range(options.first, options.first + options.cases):
        case = module.case(options.seed, number)
        tally.run(number, lambda case=case: module.judge(case))
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"… {tally.cases:,} cases", file=sys.stderr, flush=True)
    print(f"{options.campaign}, seed {options.seed}: " + "\n".join(tally.lines()))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
