"""JSON that shows whether anybody changed it: an object with a digest of its own content.

    {"key": …, "shards": […], "digest": SHA-256 of the object without "digest", keys sorted, no white space}

A receipt or a report is read long after it was written, by a resumed run, by ``verify``, by the model card. A bit that
fell over on the disk, a hand that corrected a figure, or a file of another run would be believed as it stands. The digest
is of the content, not of the bytes: indentation and order may change. It guards against accidents and careless hands, not
against somebody who computes it anew; for that there are signatures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"


def content_digest(value: Any) -> str:
    """SHA-256 of what a JSON value says, whatever its formatting."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its digest."""
    content = {key: part for key, part in value.items() if key != DIGEST}
    return {**content, DIGEST: content_digest(content)}


def seal_problem(value: Mapping[str, Any]) -> str | None:
    """Why the object is not as it was written, in words that follow its name; None: it is."""
    if DIGEST not in value:
        return f"has no {DIGEST}: it was written by an older version, or by hand"
    if value != sealed(value):
        return f"was changed after it was written: its {DIGEST} is another one"
    return None
