"""One case within its bounds: a limit on the address space, a clock, and a list of what may come out.

The address space is limited once, to what the process has plus ``MEMORY_BYTES``: an allocation of what the file does not
hold fails with MemoryError at once, instead of filling the machine. A case that does not end is interrupted by a timer of
processor time, so that a machine busy with other work makes no findings, or, if it only waits, by the clock; one that hangs
inside compiled code, where no signal of Python's arrives, ends the process with a traceback of all threads.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moepress.errors import MoepressError

MEMORY_BYTES = 512 << 20
SECONDS = 10.0
"""Of processor time. By the clock a case may take `PATIENCE` times that."""
PATIENCE = 12


class TooLong(BaseException):
    """A case did not end in time. No Exception: nothing may catch it on the way."""


class Wrong(AssertionError):
    """A case ended in a result that is not right."""


def limit_memory(extra: int = MEMORY_BYTES) -> None:
    """No allocation may take the process more than ``extra`` bytes above what it has now. Lasts as long as the process."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, resource.getrlimit(resource.RLIMIT_AS)[1]))


def peak_bytes() -> int:
    """The most memory the process ever had (VmHWM)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the main thread after ``seconds`` of processor time, or `PATIENCE` times that by the clock."""

    def too_long(number: int, _: object) -> None:
        worked = number == signal.SIGPROF
        raise TooLong(f"more than {seconds:g} s of work" if worked else f"waits for more than {PATIENCE * seconds:g} s")

    before = {number: signal.signal(number, too_long) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    faulthandler.dump_traceback_later(2 * PATIENCE * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Tally:
    """What came of the cases. ``findings``: by kind, (number of cases, first case, its traceback)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    cases: int = 0
    slowest: tuple[float, int] = (0.0, -1)
    started: float = field(default_factory=time.monotonic)

    def run(self, case: int, work: Callable[[], str], seconds: float = SECONDS) -> None:
        """Runs one case. ``work`` returns a word for a right result, raises `Wrong`, or one of moepress's errors."""
        begun = time.perf_counter()
        self.cases += 1
        try:
            with time_limit(seconds):
                outcome = work()
        except MoepressError as error:
            outcome = type(error).__name__
            if not error.what.strip():
                self._found(case, f"{outcome} without a word", error)
        except (Exception, TooLong) as error:  # noqa: BLE001 (that is what is looked for)
            outcome = "finding"
            self._found(case, _kind(error), error)
        self.outcomes[outcome] += 1
        self.slowest = max(self.slowest, (time.perf_counter() - begun, case))

    def _found(self, case: int, kind: str, error: BaseException) -> None:
        if kind not in self.findings:
            text = "".join(traceback.format_exception(error))
            self.findings[kind] = (0, case, text[-3000:])
            print(f"\nFINDING {kind}\n  first case {case}\n{self.findings[kind][2]}", flush=True)
        count, first, text = self.findings[kind]
        self.findings[kind] = (count + 1, first, text)

    def lines(self) -> list[str]:
        """The figures, for people."""
        seconds = time.monotonic() - self.started
        lines = [
            f"{self.cases:,} cases in {seconds:,.0f} s ({1000 * seconds / max(1, self.cases):.2f} ms each), "
            f"slowest {self.slowest[0]:.2f} s (case {self.slowest[1]}), peak memory {peak_bytes() / 1e6:,.0f} MB"
        ]
        lines += [f"  {count:9,}  {outcome}" for outcome, count in self.outcomes.most_common()]
        lines += [f"FINDING {kind}: {count} cases, first {first}" for kind, (count, first, _) in self.findings.items()]
        return lines


def _kind(error: BaseException) -> str:
    """Two errors are of one kind if they are of one type and come from one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/moepress/" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    words = f": {str(error)[:60]}" if isinstance(error, Wrong) else ""
    return f"{type(error).__name__} at {place}{words}"
