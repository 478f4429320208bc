"""One piece behind: what is finished is written by one thread while the next is computed.

    hand_over(w1)   w1 begins · hand_over(w2)   waits for w1, then w2 begins · done()   waits for w2

At most one piece is in the thread's hands, so memory holds one more of them. What a piece gives, or the error it raises, comes out
of the next call; after an error nothing more is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class OneBehind(Generic[Made]):
    """One thread, one piece of work at a time. All calls come from one thread, which is not that one."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Made] | None = None

    def hand_over(self, work: Callable[[], Made]) -> Made | None:
        """Begins a piece of work when the one before is done, and returns what that gave; None before the second.

        Raises: what the piece before raised; this one is not begun then.
        """
        before = self.done()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="one-behind")
        self._running = self._thread.submit(work)
        return before

    def done(self) -> Made | None:
        """Waits for the piece in work and returns what it gave; None if there is none.

        Raises: what it raised.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()

    def abandon(self) -> None:
        """Waits for the piece in work, whatever becomes of it, and ends the thread."""
        self._running = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
