"""Pressing a source that is still arriving: the same bytes, in less space, and a stopped run fetches what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moepress.convert.arrivals import in_order_of_arrival, peak_bytes, shards_needed
from moepress.convert.plan import make_plan
from moepress.convert.run import Conversion, convert
from moepress.convert.streaming import StreamedSource
from moepress.convert.watcher import Silent as NobodyLooks
from moepress.errors import HubError, PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.hub.address import Address
from moepress.hub.arriving import Arriving
from moepress.hub.ledger import read_ledger
from moepress.hub.pulling import Silent
from moepress.hub.reading import open_hub_checkpoint
from moepress.verify.run import verify
from tests.hub.local_hub import Fault, LocalHub
from tests.pressing import StopAfter, press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build

REPO = "press/tiny-kimi"
ONE_PASS = ("kv_cache.scales=none", "output.shard_size=1MB")


@pytest.fixture
def source(hub: LocalHub, tmp_path: Path) -> Path:
    """Eight shards, with every FP8 scale in another shard than its weight: the last."""
    folder = build("kimi", tmp_path / "src", shards=8, scales_apart=True).folder
    hub.repository(REPO).add_folder(folder)
    return folder


def stream(
    out: Path, folder: Path, *overrides: str, delete: bool = False, watcher: Any = None, ahead: int | None = 2
) -> Conversion:
    checkpoint, snapshot = open_hub_checkpoint(Address(REPO))
    with Arriving(checkpoint, snapshot, folder, Silent(), ahead=ahead) as arriving:
        arriving.fetch_small_files()
        arrivals = StreamedSource(arriving, out, delete=delete)
        return convert(str(folder), out, recipe_for("kimi", *overrides), threads=1, watcher=watcher, arrivals=arrivals)


def weights_sent(hub: LocalHub) -> list[str]:
    """Whole shards that were fetched, not ranges of them."""
    return [line.path for line in hub.requests("GET /cdn/") if not line.range]


class LooksAtTheDisk(NobodyLooks):
    """A watcher that counts source bytes on the disk whenever a unit is done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def unit_done(self, receipt: dict[str, Any]) -> None:
        self.most = max(self.most, sum(path.stat().st_size for path in self.folder.glob("*.safetensors")))


def test_streamed_and_local_give_the_same_bytes(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    stream(tmp_path / "streamed", tmp_path / "arrived", *ONE_PASS)
    press(source, tmp_path / "local", "kimi", *ONE_PASS, threads=1)
    streamed, local = shard_bytes(tmp_path / "streamed"), shard_bytes(tmp_path / "local")
    assert streamed.pop("moepress_report.json") != local.pop(
        "moepress_report.json"
    )  # the first knows its source's name
    assert streamed == local
    assert len(weights_sent(hub)) == 8


def test_the_report_names_repository_and_commit(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    result = stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS)
    commit = hub.repositories[REPO].refs["refs/heads/main"]
    assert result.report["source"] == {"repo": REPO, "commit": commit}


def test_source_and_output_are_never_both_whole(hub: LocalHub, tmp_path: Path) -> None:
    folder = build("kimi", tmp_path / "src", shards=8, layers=6).folder
    hub.repository(REPO).add_folder(folder)
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    look = LooksAtTheDisk(tmp_path / "arrived")
    stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS, delete=True, watcher=look, ahead=1)
    assert list((tmp_path / "arrived").glob("*.safetensors")) == []
    assert look.most < 0.75 * whole
    assert (tmp_path / "arrived" / "tokenizer.json").exists()
    assert not verify(tmp_path / "out").problems
    ledger = read_ledger(tmp_path / "arrived")
    assert ledger is not None
    assert not [name for name in ledger.files if name.endswith(".safetensors")]


def test_the_peak_is_known_before(hub: LocalHub, tmp_path: Path) -> None:
    folder = build("kimi", tmp_path / "src", shards=8, layers=6).folder
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint, recipe_for("kimi", *ONE_PASS))
    units = in_order_of_arrival(plan, plan.shards)
    sizes = {name: header.file_bytes for name, header in checkpoint.shards.items()}
    both = sum(sizes.values()) + plan.output_bytes
    assert peak_bytes(plan, units, sizes, delete=False) == both
    assert peak_bytes(plan, units, sizes, delete=True) < 0.85 * both
    assert {shard for unit in units for shard in shards_needed(plan, unit)} == set(sizes)


def test_a_weight_waits_for_its_scale_in_another_shard(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, recipe_for("kimi", *ONE_PASS))
    experts = [unit for unit in plan.shards if unit.layer is not None]
    assert all(len(shards_needed(plan, unit)) > 1 for unit in experts)


def test_a_stopped_run_fetches_only_what_is_missing(hub: LocalHub, tmp_path: Path) -> None:
    folder = build("kimi", tmp_path / "src", shards=8, layers=6).folder
    hub.repository(REPO).add_folder(folder)
    with pytest.raises(KeyboardInterrupt):
        stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS, delete=True, watcher=StopAfter(3), ahead=0)
    first = weights_sent(hub)
    gone = set(first) - {path.name for path in (tmp_path / "arrived").glob("*.safetensors")}
    assert gone
    result = stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS, delete=True, ahead=0)
    assert result.resumed == 3
    press(folder, tmp_path / "local", "kimi", *ONE_PASS, threads=1)
    streamed, local = shard_bytes(tmp_path / "out"), shard_bytes(tmp_path / "local")
    assert {**streamed, "moepress_report.json": b""} == {**local, "moepress_report.json": b""}
    assert (
        len(weights_sent(hub)) <= 8 + 2
    )  # one or two were on their way, or needed by a unit on either side of the stop


def test_a_shard_that_cannot_be_fetched_stops_the_run_and_keeps_what_is_done(
    hub: LocalHub, source: Path, tmp_path: Path
) -> None:
    hub.faults.append(Fault("HEAD .*00006-of", times=99, status=404))
    with pytest.raises(HubError):
        stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS)
    assert not (tmp_path / "out" / "config.json").exists()
    hub.faults.clear()
    before = len(weights_sent(hub))
    stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS)
    assert len(weights_sent(hub)) - before < 8
    assert not verify(tmp_path / "out", tmp_path / "arrived").problems


@pytest.mark.parametrize(
    ("override", "why"),
    [("weights.algorithm=gptq", "kept tensors come after them"), ("kv_cache.scales=folded", "second pass")],
)
def test_a_source_that_is_read_twice_is_not_removed(
    hub: LocalHub, source: Path, tmp_path: Path, override: str, why: str
) -> None:
    small = ("calibration.samples=2", "calibration.length=32", "kv_cache.samples=2")
    with pytest.raises(PlanRefused, match=why):
        stream(tmp_path / "out", tmp_path / "arrived", override, *small, delete=True)
    assert not (tmp_path / "out").exists()
    assert weights_sent(hub) == []


@pytest.mark.slow
def test_a_calibrated_recipe_presses_layers_as_they_land(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    small = ("weights.algorithm=gptq", "calibration.samples=4", "calibration.length=64", "output.shard_size=1MB")
    small += ("kv_cache.samples=2",)
    stream(tmp_path / "streamed", tmp_path / "arrived", *small)
    press(source, tmp_path / "local", "kimi", *small, threads=1)
    streamed, local = shard_bytes(tmp_path / "streamed"), shard_bytes(tmp_path / "local")
    assert {**streamed, "moepress_report.json": b""} == {**local, "moepress_report.json": b""}


def test_a_disk_that_is_too_small_is_seen_before(
    hub: LocalHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HB-11: source and output together, at the moment of their peak."""
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("moepress.convert.streaming.shutil.disk_usage", lambda _: usage(10, 9, 70 << 20))
    monkeypatch.setattr("moepress.convert.prepare.check_disk", lambda *_, **__: None)
    monkeypatch.setattr("moepress.convert.streaming.SLACK_BYTES", (70 << 20) - 1000)
    with pytest.raises(PlanRefused, match="source shards and output together need"):
        stream(tmp_path / "out", tmp_path / "arrived", *ONE_PASS)
    assert weights_sent(hub) == []
