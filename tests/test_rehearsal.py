"""A GLM-5.2 of true size, in headers: bookkeeping must stay in seconds and below 1 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rehearsal import rehearse


@pytest.mark.slow
def test_bookkeeping_of_a_full_size_glm_5_2_stays_below_one_gigabyte(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "glm-5.2", ["inspect", "plan", "journal and index", "verify"])
    assert report["source_tensors"] == 118_629
    assert round(report["source_bytes"] / 2**30, 1) == 703.7
    steps = {step["step"]: step for step in report["steps"]}
    assert steps["plan"]["quantized"] == 76 * 256 * 3
    assert steps["journal and index"]["receipts"] == steps["plan"]["output_shards"]
    assert steps["verify"]["source_weights"] == steps["inspect"]["tensors"]
    assert {name: step["peak_bytes"] for name, step in steps.items() if step["peak_bytes"] > 1e9} == {}
