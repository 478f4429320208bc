"""SGLang in a container: the same command, put behind the words that start one.

    --container 'docker run --rm -i --gpus all --network host --ipc host {mounts} lmsysorg/sglang:v0.5.23'

``{mounts}`` becomes one ``-v PATH:PATH`` for each folder that the server has to see under its own name (docker, podman and
nerdctl take these); words without it must mount them themselves. The container must share the host's network, for the
server listens on 127.0.0.1, and its standard input must stay open (``-i``): a container outlives the client that
started it, so a keeper runs inside as well, and ends with the pipe.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moepress.errors import ServingError
from moepress.serving import keeper
from moepress.serving.launch import Launch

PYTHON = "python3"
_EXAMPLE = "for example 'docker run --rm -i --gpus all --network host --ipc host {mounts} lmsysorg/sglang:v0.5.23'"
_GRACE_S = 15.0


def container_words(text: str) -> tuple[str, ...]:
    """The words of ``--container``.

    Raises:
        ServingError: not a command.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ServingError(f"not a command line: {error}", where="--container", hint=_EXAMPLE) from error
    if not words or shutil.which(words[0]) is None:
        raise ServingError(
            f"there is no program {words[0] if words else ''!r} here", where="--container", hint=_EXAMPLE
        )
    return words


def enclose(launch: Launch, words: Sequence[str], *, folders: Sequence[Path], work: Path) -> Launch:
    """The launch as it runs inside a container.

    Args:
        launch: made for an interpreter called `PYTHON`.
        words: from `container_words`.
        folders: what the server reads or writes; the same paths inside.
        work: a folder among them, for the keeper's own file.
    """
    inside = work / "keeper.py"
    shutil.copyfile(keeper.__file__, inside)
    mounts = [word for folder in dict.fromkeys(folders) for word in ("-v", f"{folder}:{folder}")]
    outer = [part for word in words for part in (mounts if word == "{mounts}" else [word])]
    variables = ["env", *(f"{name}={value}" for name, value in launch.variables.items())] if launch.variables else []
    kept = [PYTHON, str(inside), str(_GRACE_S)]
    return replace(launch, command=(*outer, *variables, *kept, *launch.command), variables={})
