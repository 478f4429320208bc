"""The option that says where calibrated layers are computed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moepress.commands.numbers import one_of
from moepress.errors import MoepressError


class DeviceChoice(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _device(text: str) -> DeviceChoice:
    return DeviceChoice(one_of([choice.value for choice in DeviceChoice])(text))


Device = Annotated[
    DeviceChoice,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda",
        parser=_device,
        autocompletion=lambda: [choice.value for choice in DeviceChoice],
        help="Where to compute calibration and GPTQ; auto: on a CUDA device if there is one. Rounding never needs one.",
    ),
]


def device_of_this_process(wish: DeviceChoice, workers: int | None) -> str:
    """The wish as `convert` takes it; with workers this process only hands out work.

    Raises:
        MoepressError: cuda for this process and workers at once.
    """
    if workers is None:
        return wish.value
    if wish is DeviceChoice.cuda:
        raise MoepressError(
            "workers compute, this process does not",
            where="--device cuda",
            hint="give each worker one: --worker-gpus 1",
        )
    return "cpu"
