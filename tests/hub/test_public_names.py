"""What is used of huggingface_hub is what it offers: no module whose name begins with an underscore."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from huggingface_hub.utils import get_session

import moepress
from moepress.errors import HubError
from moepress.hub.connection import PatientClient, connect, explained
from tests.hub.local_hub import LocalHub


def test_no_private_module_of_huggingface_hub_is_imported() -> None:
    found = []
    for path in Path(moepress.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{module}.{name}".lstrip(".") for name in names):
                if name.startswith("huggingface_hub.") and any(part.startswith("_") for part in name.split(".")):
                    found.append(f"{path.name}: {name}")
    assert found == []


def test_its_own_hooks_hang_on_our_client_however_often_we_connect(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else HF_HUB_OFFLINE would be asked for and not kept to."""
    for _ in range(3):
        api = connect()
    session = get_session()
    assert isinstance(session, PatientClient)
    assert len(session.event_hooks["request"]) == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"), explained("a/b"):
        api.model_info("a/b")
