"""Where a calibrated conversion computes: the processor, or one CUDA device of this machine.

    auto    cuda where torch sees a device, else cpu
    cuda    refused where torch sees none
    cpu     also where there is a GPU: the bytes of one do not depend on the other's driver

What runs where follows from where the tensors are, not from this word: compiled loops on the CPU, torch and Triton
elsewhere. Sums have another order there, so codes of calibrated weights differ between the two in a few places.

How much of a GPU a block of experts may fill: `device_memory`, half of what is free. The other half is the dense part of the
layer, one batch of samples, and what a step needs beside its inputs.
"""

from __future__ import annotations

from typing import Literal

import torch

from moepress.errors import PlanRefused

DeviceWish = Literal["auto", "cpu", "cuda"]

SHARE_OF_FREE = 0.5


def resolve_device(wish: str) -> str:
    """``cpu`` or ``cuda``; any other device string is taken as it is.

    Raises:
        PlanRefused: cuda where torch sees no device.
    """
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            "this torch is built without CUDA"
            if built is None
            else f"torch is built for CUDA {built} and sees no device"
        )
        raise PlanRefused(
            f"no CUDA device: {why}",
            where="--device",
            hint="nvidia-smi shows whether the driver sees one; --device cpu converts on the processor",
        )
    return wish


def device_memory(device: str) -> int | None:
    """Bytes that a block of experts may take on the device; None where main memory is the device's."""
    if torch.device(device).type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * SHARE_OF_FREE)


def stays_on_device(device: str, nbytes: int) -> bool:
    """Whether that much may stay on a device through a layer, beside its block of experts: a quarter of what is free."""
    kind = torch.device(device).type
    if kind == "cuda":
        return nbytes <= torch.cuda.mem_get_info(device)[0] // 4
    return kind != "cpu"


def device_name(device: str) -> str:
    """What the device is, for a receipt: ``cpu``, or the GPU's name."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind
