"""The trained tiny Kimi as it is published, pressed to INT4, and pressed and damaged; each behind a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moepress.convert.run import convert
from moepress.recipe import load_recipe
from tests.evaluate.damage import damage
from tests.evaluate.served_model import ServedModel, load, serve

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``fp8``: as published; ``int4``: pressed by rounding; and the same files with coarser codes.

    ``int3``: every second code, what 3 bits hold; ``erased``: all codes 0, experts that answer nothing.
    """
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tiny_kimi")]
    import export

    work = tmp_path_factory.mktemp("evaluated")
    source, pressed = export.export(work / "fp8"), work / "int4"
    convert(source, pressed, load_recipe("kimi-k2-bf16", ["serving.tensor_parallel=1"]))
    return {
        "fp8": source,
        "int4": pressed,
        "int3": damage(pressed, work / "int3", 2),
        "erased": damage(pressed, work / "erased", 16),
    }


@dataclass(frozen=True)
class Servers:
    """The models by name, served. `again` is the source in a process of answers of its own."""

    folders: dict[str, Path]
    served: dict[str, ServedModel]


@pytest.fixture(scope="session")
def servers(folders: dict[str, Path]) -> Iterator[Servers]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import judge

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products of 16 experts: a second thread waits more than it works
    with ExitStack() as stack:
        models = {
            name: load(folder, judge.load_pressed if name != "fp8" else lambda _: judge.load_source(), sglang=True)
            for name, folder in folders.items()
        }
        yield Servers(folders, {name: stack.enter_context(serve(model)) for name, model in models.items()})
    torch.set_num_threads(before)
