"""What the commands after ``convert`` found out about an output, kept beside it for the report and the model card.

    OUT/moepress_report.json            what convert did (published with the weights)
    OUT/.moepress/results/NAME.json     what NAME (verify, fidelity, validate, evaluate, ...) found

A result belongs to one output: it carries the digest of the ``moepress_report.json`` it was made for, which holds every
shard's SHA-256. After another conversion into the same folder the old results are stale, and are not shown as if they
were of the new one.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from moepress import __version__
from moepress.errors import MoepressError

REPORT_NAME = "moepress_report.json"
SIGNATURE_NAME = "model.sig"
"""A signature over what `convert` wrote (`publish.signing`); published with the weights where there is one."""

RESULTS_FOLDER = Path(".moepress") / "results"


def output_digest(out: Path) -> str:
    """SHA-256 of ``moepress_report.json``: one value for all bytes of an output.

    Raises:
        MoepressError: the folder holds no finished conversion.
    """
    try:
        return hashlib.sha256((out / REPORT_NAME).read_bytes()).hexdigest()
    except OSError as error:
        raise MoepressError(
            f"there is no {REPORT_NAME}: this is not a finished conversion",
            where=str(out),
            hint="moepress convert SRC OUT --recipe NAME",
        ) from error


def write_result(out: Path, name: str, verdict: str, found: dict[str, Any]) -> Path:
    """Keeps what command ``name`` found about ``out``; replaces what it found before.

    Args:
        verdict: ``pass``, ``fail`` or ``not judged``.
        found: plain JSON data.
    """
    # Imported here: atomic writing belongs to formats, and this module is read by everything above it.
    from moepress.formats.atomic import atomic_write_json

    path = out / RESULTS_FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(
        path,
        {
            "result": name,
            "verdict": verdict,
            "output": output_digest(out),
            "moepress": __version__,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "found": found,
        },
    )
    return path


def read_results(out: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Results by name that belong to the present output, and the names of the stale ones.

    Raises:
        MoepressError: a result is not readable.
    """
    digest = output_digest(out)
    fresh: dict[str, dict[str, Any]] = {}
    stale: list[str] = []
    for path in sorted((out / RESULTS_FOLDER).glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            mine = data["output"] == digest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MoepressError(f"not a result of ours: {error}", where=str(path), hint=f"rm {path}") from error
        if mine:
            fresh[path.stem] = data
        else:
            stale.append(path.stem)
    return fresh, stale
