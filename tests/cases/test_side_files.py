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
from transformers import AutoTokenizer
sys.path.insert(0, sys.argv[1] + "/..")
conversation = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "Hi"}]
answers = []
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers.append([tokenizer.apply_chat_template(conversation, tokenize=False), tokenizer.encode("def f(x): 你好")])
code = importlib.import_module("out.tokenization_tiny")
print(json.dumps([answers, list(code.roles())]))
"""

OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("place", ["jinja", "tokenizer_config", "both"])
def test_tokenizer_code_and_template_work_from_the_output_alone(place: str, tmp_path: Path) -> None:
    """SC-01, SC-04: in a process of its own, without the network; the template in either place, or in both and different."""
    source = build("kimi", tmp_path / "src")
    if place != "jinja":
        rewrite_json(source.folder / "tokenizer_config.json", lambda config: config.update(chat_template=OTHER))
    if place == "tokenizer_config":
        (source.folder / "chat_template.jinja").unlink()
    press(source.folder, tmp_path / "out", "kimi")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "out"), str(tmp_path / "src"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_TORCH": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    answers, roles = json.loads(done.stdout)
    before, after = answers
    assert before == after
    assert "Grüße" in after[0]
    assert roles == ["system", "user", "assistant", "tool"]
    assert present(tmp_path / "out") == present(source.folder)


def present(folder: Path) -> dict[str, Any]:
    """Where the template stands, and what it says."""
    jinja = folder / "chat_template.jinja"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return {"jinja": jinja.read_text() if jinja.exists() else None, "config": config.get("chat_template")}
