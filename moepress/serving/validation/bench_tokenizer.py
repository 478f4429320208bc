"""The tokenizer that bench_serving may load: a copy of the checkpoint's, without the checkpoint's code.

bench_serving loads tokenizer and config.json with ``trust_remote_code=True``, whatever the user said. So it is given a folder
of its own: tokenizer files only, and no word of remote code in them, unless the user allowed that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from moepress.calibration.text import TOKENIZER_FILES
from moepress.errors import CheckpointError

_BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt")


def tokenizer_copy(model: Path, folder: Path, *, trust_remote_code: bool) -> Path:
    """Makes the folder and returns it.

    Args:
        model: the checkpoint.
        folder: new; replaced where it is there.
        trust_remote_code: the checkpoint's Python files may come along.

    Raises:
        CheckpointError: a tokenizer that cannot work without its code.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = [*TOKENIZER_FILES, *_BESIDE, *(path.name for path in model.glob("*.py") if trust_remote_code)]
    for name in names:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    if trust_remote_code:
        return folder
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            "bench_serving would run the Python code of this tokenizer",
            where=str(model),
            hint="read it, then allow it with --trust-remote-code",
        )
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config.pop("auto_map", None)
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return folder
