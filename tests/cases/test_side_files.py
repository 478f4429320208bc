"""SC: the output is used as the source is, by a process that has only the output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.rewritten import rewrite_json
from tests.pressing import press
from tests.tiny_checkpoints import build

READ = """
import importlib, json, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
conversation = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "Hi"}]
answers = []
for number, folder in enumerate(sys.argv[1:]):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    sys.path.insert(0, str(Path(folder).parent))
    code = importlib.import_module(Path(folder).name + ".tokenization_tiny")
    assert Path(code.__file__).parent == Path(folder)
    answers.append([text, tokenizer.encode("def f(x): 你好"), list(code.roles())])
    for name in [name for name in sys.modules if name.startswith(("src", "out"))]:
        del sys.modules[name]
print(json.dumps(answers))
"""

OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.mark.slow
def test_tokenizer_code_and_template_work_from_the_output_alone(tmp_path: Path) -> None:
    """SC-01, SC-04: in a process of its own, without the network; the template in either place, or in both and different."""
    folders = []
    for place in ("jinja", "tokenizer_config", "both"):
        source, out = build("kimi", tmp_path / place / "src").folder, tmp_path / place / "out"
        if place != "jinja":
            rewrite_json(source / "tokenizer_config.json", lambda config: config.update(chat_template=OTHER))
        if place == "tokenizer_config":
            (source / "chat_template.jinja").unlink()
        press(source, out, "kimi")
        assert present(out) == present(source)
        folders += [source, out]
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_TORCH": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == 6
    for before, after in zip(answers[::2], answers[1::2], strict=True):
        assert before == after
        assert "Grüße" in after[0]


def present(folder: Path) -> dict[str, Any]:
    """Where the template stands, and what it says."""
    jinja = folder / "chat_template.jinja"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return {"jinja": jinja.read_text() if jinja.exists() else None, "config": config.get("chat_template")}
