"""Where a campaign writes the files of its cases."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def scratch_folder() -> Path:
    """One for the process, removed when it ends; in memory, where the machine has such a place."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="moepress-fuzz-", dir=shared if shared.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
