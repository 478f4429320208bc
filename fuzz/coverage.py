"""Coverage-guided: atheris changes an input where that reaches a line it has not seen, and stops at the first finding.

atheris is no dependency of moepress (35 MB, Python 3.11 only): ``pip install atheris`` in the same environment. Inputs that
reach something new are kept in ``fuzz/corpus/<target>``, from which the next run goes on; it is in nobody's repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.bounded import TooLong
from moepress.errors import MoepressError


def run(target: str, seconds: int) -> int:
    """Fuzzes one campaign for some time; libFuzzer prints what it found and ends the process with its own code."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: pip install atheris (Python 3.11)", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["moepress.formats", "moepress.convert.receipts", "moepress.recipe"]):
        from fuzz import headers, texts

    def one(data: bytes) -> None:
        try:
            if target == "headers":
                headers.judge(data)
            elif data:
                texts.judge((texts.READERS[data[0] % len(texts.READERS)], data[1:]))
        except MoepressError:
            pass
        except TooLong as error:
            raise AssertionError(str(error)) from error

    corpus = Path(__file__).parent / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    if target == "headers":
        for number, raw in enumerate(headers.seeds_for_coverage()):
            (corpus / f"seed-{number}").write_bytes(raw)
    else:
        for number in range(200):
            reader, raw = texts.case(0, number)
            (corpus / f"seed-{number}").write_bytes(bytes([texts.READERS.index(reader)]) + raw)
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-max_len=20000",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *limits], one)
    atheris.Fuzz()
    return 0
