"""What a conversion shows while it runs: three lines on a terminal, one line in a log, the same facts in both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from moepress.commands import convert_view
from moepress.commands.convert_view import ConvertView
from moepress.convert.run import convert
from tests.pressing import recipe_for
from tests.tiny_checkpoints import TinyCheckpoint


class Looking(ConvertView):
    """A view that is read whenever a shard is done and in the middle of each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.screens: list[str] = []

    def look(self) -> None:
        self.lines.append(self.line())
        console = Console(width=120)
        with console.capture() as seen:
            console.print(self._render())
        self.screens.append(seen.get())

    def advance(self, source_bytes: int) -> None:
        super().advance(source_bytes)
        self.look()

    def unit_done(self, receipt: dict[str, object]) -> None:
        super().unit_done(receipt)
        self.look()


@pytest.mark.parametrize(
    "overrides", [(), ("weights.algorithm=gptq", "calibration.samples=8", "calibration.length=32")]
)
@pytest.mark.slow
def test_layer_experts_shards_and_the_worst_error_are_shown(
    overrides: tuple[str, ...], tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    view = Looking()
    assert "reading headers" in view.line()
    recipe = recipe_for("kimi", "output.shard_size=1MB", *overrides)
    with view:
        result = convert(tiny("kimi").folder, tmp_path / "out", recipe, threads=1, watcher=view)
    shards, worst = len(result.plan.shards), result.report["quantized"]["relative_error_max"]
    experts = max(d.identity.expert or 0 for d in result.plan.decisions.values()) + 1
    last = view.lines[-1]
    assert re.match(r"\d\d:\d\d:\d\d 100%", last)
    assert f"{shards} of {shards} shards done" in last
    assert f"worst error {worst:.4f} (layer " in last
    assert any(re.search(rf"pressing layer \d of \d, {experts} of {experts} experts", line) for line in view.lines)
    shares = [int(match[1]) for line in view.lines if (match := re.search(r"(\d+)%", line))]
    assert shares == sorted(shares)
    assert all(line.count("\n") == 0 for line in view.lines)
    for screen in view.screens:
        assert len(screen.splitlines()) <= 3
    assert f"worst error so far {worst:.4f}: layer " in view.screens[-1]


@pytest.mark.slow
def test_without_a_terminal_lines_come_by_themselves(
    tiny: Callable[[str], TinyCheckpoint],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing advances: a log that is silent for an hour looks like a run that hangs."""
    monkeypatch.setattr(convert_view, "LOG_EVERY", (0.05, 0.05))
    with ConvertView() as view:
        convert(tiny("kimi").folder, tmp_path / "out", recipe_for("kimi"), threads=1, watcher=view)
    said = capsys.readouterr().err.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d ", said[0])
    assert not any("\x1b" in line for line in said)
    assert view.finished == view.shards
