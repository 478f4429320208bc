"""``make audit`` where no advisory service can be reached: nothing was audited, and that is said, not passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_an_audit_that_nobody_answers_is_no_pass() -> None:
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, str(ROOT / "requirements" / "audit.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **nowhere, "NO_PROXY": "", "no_proxy": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert done.stderr.startswith("nothing was audited: no advisory service could be asked from here\n  pypi.org: ")
    assert "  api.osv.dev: " in done.stderr
    assert "hint:  run `make audit` where" in done.stderr
