"""A source that is written to while it is read: noticed, and nothing that was pressed from it is kept.

Headers are read once, tensors over hours. Whoever downloads a newer revision into the same folder meanwhile gives us tensors
of two models under one header. Each shard's size, time of change and inode are taken when its header is read, and again
before the output becomes a checkpoint. (A change between two runs leaves the resume key as it is if no header changed;
``verify --source`` compares the contents.)
"""

from __future__ import annotations

from moepress.convert.journal import Journal
from moepress.errors import ConvertError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.shard_index import list_some

State = tuple[int, int, int]


def shard_states(checkpoint: Checkpoint) -> dict[str, State | None]:
    """(bytes, nanoseconds of the last change, inode) of every shard; None for one that is gone."""
    return {name: _state(checkpoint, name) for name in checkpoint.shards}


def refuse_changes(
    checkpoint: Checkpoint, before: dict[str, State | None], journal: Journal, pressed: set[str]
) -> None:
    """Compares with what `shard_states` gave before.

    Args:
        pressed: output shards of this run; their receipts are taken back if anything changed.

    Raises:
        ConvertError: names the shards that changed.
    """
    changed = [name for name, state in before.items() if _state(checkpoint, name) != state]
    if not changed:
        return
    for name in pressed:
        journal.forget(name)
    raise ConvertError(
        f"{len(changed)} shards of the source changed while they were read: {list_some(changed)}; "
        f"{len(pressed)} output shards of this run are not kept",
        where=checkpoint.location,
        hint="wait until nothing writes to the source, check it with moepress inspect, and run the same command again",
    )


def _state(checkpoint: Checkpoint, name: str) -> State | None:
    try:
        status = checkpoint.path(name).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
