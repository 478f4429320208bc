"""Ctrl-C and SIGTERM: both end a command as KeyboardInterrupt, so that files are removed, locks released, and the way on shown.

Python raises it wherever the main thread happens to be. Where that is a finalizer or a weak reference's callback, which
torch has many of, the exception is printed and lost, and the run would go on. So the wish is also remembered, and whoever
is told about progress asks for it (`stop_if_asked`).
"""

from __future__ import annotations

import signal
from typing import NoReturn

_asked = False


def listen() -> None:
    """From now on both signals are a wish to stop."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)


def asked() -> bool:
    """Somebody wants this process to stop."""
    return _asked


def stop_if_asked() -> None:
    """Raises what was lost.

    Raises:
        KeyboardInterrupt: somebody wants this process to stop.
    """
    if _asked:
        raise KeyboardInterrupt


def _stop(*_: object) -> NoReturn:
    global _asked
    _asked = True
    raise KeyboardInterrupt
