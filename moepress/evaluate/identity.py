"""Which weights gave an answer: the name under which a checkpoint's answers are kept.

A finished conversion is named by the digest of its report, which holds every shard's SHA-256. A source of 700 GB is not
hashed for this: its configuration, and name, size and time of every weight file, tell it apart from whatever else was or
will be in that folder. Copying it costs asking again, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from moepress.errors import EvaluateError
from moepress.results import REPORT_NAME, output_digest


def checkpoint_identity(checkpoint: str) -> str:
    """SHA-256 that stands for a folder's weights, or for a name that is no folder here (a Hub id behind a URL).

    Raises:
        EvaluateError: a folder without weights.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return hashlib.sha256(f"name {checkpoint}".encode()).hexdigest()
    if (folder / REPORT_NAME).is_file():
        return output_digest(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise EvaluateError("no checkpoint: config.json and *.safetensors are needed", where=checkpoint)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        facts = file.stat()
        digest.update(json.dumps([file.name, facts.st_size, facts.st_mtime_ns]).encode())
    return digest.hexdigest()


def answers_identity(checkpoint: str, *how: str) -> str:
    """The checkpoint together with how it was served (software, KV type, flags): what its answers are kept under."""
    return hashlib.sha256(json.dumps([checkpoint_identity(checkpoint), *how]).encode()).hexdigest()
