"""A second device with real numbers: tensors that say they are elsewhere, and are computed on by the processor.

    register()                        the device type "elsewhere" exists in this process
    with Elsewhere() as device:       tensors are made there, moved there and back, and computed with
        x = torch.randn(3).to("elsewhere")

A machine without a GPU cannot show that code runs on one, but it can show what most often breaks there. As on CUDA,

- an operation on tensors of two devices is an error, but for copies, for numbers (tensors without dimensions) and for
  indices that are on the CPU;
- ``numpy()`` and a memory address are refused, so a compiled loop for the CPU cannot run on such a tensor;
- a tensor that was made without naming a device is on the CPU.

torch's FakeTensor checks the first of these too, but has no numbers, and this code looks at some on its way (is the factor
finite? how many tokens has each expert?). Here whole conversions run, and their bytes can be compared with the CPU's.

The device is torch's "PrivateUse1" with a Python backend: a tensor subclass around a CPU tensor. `counts` says how many
operations ran there, so that a test can tell that its subject did.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "elsewhere"

_COPIES = ("aten::copy_", "aten::_to_copy")
_CPU_INDICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_registered = False


class Tensor(torch.Tensor):
    """A tensor elsewhere; ``here`` holds its numbers."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(DEVICE, 0),
            requires_grad=False,
        )
        made.here = here
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, Counter())

    def tolist(self) -> Any:  # torch has none for subclasses
        return self.here.tolist()

    def data_ptr(self) -> int:
        raise RuntimeError("a tensor that is elsewhere has no address here")

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor that is elsewhere to numpy; copy it to the CPU first")


class Elsewhere(TorchDispatchMode):
    """While it is entered, tensors can be made elsewhere.

    Attributes:
        counts: operation -> how often it ran there.
    """

    def __init__(self) -> None:
        super().__init__()
        register()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.counts)


def register() -> None:
    """Makes the device type known to torch, once in a process."""
    global _registered
    if not _registered:
        _setup_privateuseone_for_python_backend(DEVICE)
        _registered = True


def _run(func: Any, args: Any, kwargs: dict[str, Any], counts: Counter[str]) -> Any:
    schema = func._schema
    name = schema.name
    found: list[torch.Tensor] = []
    plain_args = tuple(_here(each, found) for each in args)
    plain_kwargs = {key: _here(each, found) for key, each in kwargs.items()}
    there = any(isinstance(tensor, Tensor) for tensor in found)
    if there and name not in _COPIES:
        _refuse_mixing(name, found, args)
    target = kwargs.get("device")
    if target is not None:
        there = torch.device(target).type == DEVICE
        plain_kwargs |= {"device": torch.device("cpu")}
        plain_kwargs.pop("pin_memory", None)
    result = func(*plain_args, **plain_kwargs)
    if not there and target is None and name != "aten::copy_":
        return result
    counts[name] += there
    if schema.is_mutable:
        written = [
            args[at] if at < len(args) else kwargs.get(argument.name)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return written[0] if len(written) == 1 else tuple(written)
    return _there(result) if there else result


def _refuse_mixing(name: str, tensors: list[torch.Tensor], args: Any) -> None:
    here = [tensor for tensor in tensors if not isinstance(tensor, Tensor) and tensor.dim()]
    if here and name in _CPU_INDICES and isinstance(args[0], Tensor):
        here = [tensor for tensor in here if not any(tensor is index for index in args[1])]
    if here:
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in here)
        raise RuntimeError(f"{name}: all tensors must be on one device, but {shapes} is on the CPU")


def _here(value: Any, found: list[torch.Tensor]) -> Any:
    """The same argument with CPU tensors; all tensors met are added to ``found``."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return value.here if isinstance(value, Tensor) else value
    return [_here(each, found) for each in value] if isinstance(value, (list, tuple)) else value


def _there(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return Tensor(result)
    return type(result)(_there(each) for each in result) if isinstance(result, (list, tuple)) else result
