"""May this folder be published? Only what is whole, has receipts, and was verified as it now lies there.

    moepress_report.json   every shard's SHA-256; its own digest is what results are bound to
    receipts               one a shard, with the same SHA-256
    verify                 passed, for this digest, and no file was written since

A verification that is missing or stale is made now. Without the source it compares the output with itself alone; the card
says which of the two it was.
"""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.convert.journal import STATE_FOLDER, read_json
from moepress.convert.made_from import recorded_source
from moepress.errors import MoepressError, VerifyFailed
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.shard_index import INDEX_NAME, list_some
from moepress.formats.side_files import CONFIG_NAME
from moepress.results import REPORT_NAME, output_digest, read_results, write_result

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Publishable:
    """A folder that may be published.

    Attributes:
        report: moepress_report.json.
        digest: SHA-256 of that file.
        receipts: by shard.
        verification: what `verify` found.
    """

    folder: Path
    report: dict[str, Any]
    digest: str
    receipts: dict[str, dict[str, Any]]
    verification: dict[str, Any]


def check_publishable(folder: Path, *, source: str | None = None, tell: Tell = lambda _: None) -> Publishable:
    """Passes the folder, or says why not.

    Args:
        source: for a verification that has to be made now; None takes the one it was made from, if it is still there.
        tell: is told when one is made.

    Raises:
        MoepressError: not a finished conversion, or receipts are missing.
        VerifyFailed: the bytes are not what the receipts say.
    """
    digest = output_digest(folder)
    report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    missing = [name for name in (CONFIG_NAME, INDEX_NAME) if not (folder / name).is_file()]
    if missing:
        raise MoepressError(
            f"not a finished conversion: {', '.join(missing)} missing", where=str(folder), hint="run convert again"
        )
    receipts = _receipts(folder, report)
    source = source or _source_still_there(folder)
    return Publishable(folder, report, digest, receipts, _verification(folder, report, source, tell))


def _source_still_there(folder: Path) -> str | None:
    """The folder that the output was made from, if all of it is still there."""
    source = recorded_source(folder)
    if source is None:
        return None
    try:
        open_checkpoint(source)
    except MoepressError:
        return None
    return source


def _receipts(folder: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    place = folder / STATE_FOLDER / "receipts"
    receipts, without, other = {}, [], []
    for shard, sha256 in report["shards"].items():
        path = place / f"{shard}.json"
        if not path.is_file():
            without.append(shard)
            continue
        receipts[shard] = read_json(path)
        if receipts[shard].get("sha256") != sha256:
            other.append(shard)
    if without or other:
        problem = f"{len(without)} of {len(report['shards'])} shards have no receipt: {list_some(without)}"
        if other:
            problem = f"{len(other)} receipts are of other bytes than {REPORT_NAME} says: {list_some(other)}"
        raise MoepressError(
            problem,
            where=str(place),
            hint="publish from the folder that convert wrote; without receipts nobody can say how the weights were made",
        )
    return receipts


def _verification(folder: Path, report: dict[str, Any], source: str | None, tell: Tell) -> dict[str, Any]:
    fresh, _ = read_results(folder)
    kept = fresh.get("verify")
    touched = "" if kept is None else _written_since(folder, report, str(kept["finished"]))
    if kept is not None and kept["verdict"] == "pass" and not touched:
        return dict(kept["found"])
    reason = (
        f"{touched} was written after the last verification" if touched else "no verification of these bytes passed"
    )
    against = f"against {source}" if source else "against its receipts alone, the source is not here"
    tell(f"verifying before anything is sent, {against}: {reason}")
    from moepress.verify.run import verify

    result = verify(folder, source)
    found = {"source": source, **result.as_json()}
    write_result(folder, "verify", "fail" if result.problems else "pass", found)
    if result.problems:
        raise VerifyFailed(
            f"{len(result.problems):,} problem{'s' if len(result.problems) != 1 else ''}, first: {result.problems[0]}",
            where=str(folder),
            hint=f"moepress verify {folder}" + (f" --source {source}" if source else ""),
        )
    return found


def _written_since(folder: Path, report: dict[str, Any], finished: str) -> str:
    """A file whose time is later than the verification's end; empty if there is none. Both have seconds' resolution."""
    end = calendar.timegm(time.strptime(finished, "%Y-%m-%dT%H:%M:%SZ")) + 1
    for name in (*report["shards"], *report["side_files"], CONFIG_NAME, INDEX_NAME):
        path = folder / name
        if path.exists() and path.stat().st_mtime > end:
            return str(name)
    return ""
