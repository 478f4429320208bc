"""Run SGLang's bench_serving several times in one process. Runs in the server's environment; standard library and SGLang.

    python bench_client.py jobs.json        jobs: [[argument, ...], ...], one bench_serving command line each

Importing SGLang takes longer than a benchmark of a tiny model, and one client process for all runs leaves less between
them that could differ. Each run is SGLang's own command line, with its own parser, unchanged; a run that fails ends this
process with its status.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from sglang.benchmark import serving  # type: ignore[import-not-found]

    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        sys.argv = ["bench_serving", *arguments]
        print("$ python -m sglang.bench_serving", *arguments, flush=True)
        serving.cli_main()


if __name__ == "__main__":
    main()
