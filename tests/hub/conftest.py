"""A running local Hub, and this process pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from tests.hub.local_hub import LocalHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The server; HF_ENDPOINT, HF_TOKEN and an empty cache of the client's are set, and plain LFS instead of Xet."""
    with LocalHub().running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        # Read from the environment when huggingface_hub is imported, which another test may have done already.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield server
        huggingface_hub.close_session()
