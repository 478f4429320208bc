"""The record of one load: tensors that carry their names, and the places they are copied to."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import torch

_WRITES = {torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.set_}
_READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__int__}


class Record:
    """What has been seen: names offered, names used, and for each parameter the places written.

    Loaders may copy from several threads, so notes are taken under a lock.
    """

    def __init__(self, model) -> None:
        self.parameters = dict(model.named_parameters())
        self._owner = {p.untyped_storage().data_ptr(): name for name, p in self.parameters.items() if p.numel()}
        self._lock = threading.Lock()
        self.offered: dict[str, list] = {}
        self.used: set[str] = set()
        self.scalars: set[str] = set()
        self.elsewhere: set[str] = set()
        self.writes: dict[str, dict[tuple, set[str]]] = {name: {} for name in self.parameters}
        self.casts: dict[tuple[str, str, str], str] = {}

    def wrote(self, target: torch.Tensor, value: torch.Tensor, sources: frozenset[str]) -> None:
        """A copy from tensors `sources` into `target`."""
        name = self._owner.get(target.untyped_storage().data_ptr())
        with self._lock:
            if name is None:
                self.elsewhere |= sources
                return
            self.used |= sources
            place = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
            self.writes[name].setdefault(place, set()).update(sources)
            if value.dtype != target.dtype:
                self.casts.setdefault((str(value.dtype), str(target.dtype), name), min(sources))

    def read(self, sources: frozenset[str]) -> None:
        """A value taken out as a Python number: where it goes from there is not seen."""
        with self._lock:
            self.scalars |= sources

    def as_json(self, model) -> dict:
        parameters = {}
        for name, parameter in self.parameters.items():
            places = self.writes[name]
            parameters[name] = {
                "dtype": _dtype(parameter.dtype),
                "shape": list(parameter.shape),
                "filled": sum(torch.Size(shape).numel() for _, shape, _ in places),
                "sources": sorted(set().union(*places.values())) if places else [],
            }
        return {
            "model_class": type(model).__name__,
            "offered": self.offered,
            "unused": sorted(set(self.offered) - self.used - self.scalars),
            "scalars": sorted(self.scalars - self.used),
            "elsewhere": sorted(self.elsewhere - self.used),
            "parameters": parameters,
            "casts": [
                {"from": _dtype(source), "to": _dtype(target), "parameter": name, "example": example}
                for (source, target, name), example in sorted(self.casts.items())
            ],
        }


class Followed(torch.Tensor):
    """A tensor that knows the checkpoint tensors it was made from (`sources`) and notes where it is copied to."""

    sources: frozenset[str] = frozenset()
    record: Record | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        followed = [value for value in _tensors((args, kwargs)) if isinstance(value, Followed)]
        sources = frozenset().union(*(value.sources for value in followed))
        record = next((value.record for value in followed if value.record is not None), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if record is not None and func in _READS:
                record.read(sources)
            elif record is not None and func in _WRITES:
                target = args[0][args[1]] if func is torch.Tensor.__setitem__ else args[0]
                record.wrote(target, args[-1], sources)
        if func in _WRITES:
            if isinstance(args[0], Followed):
                args[0].sources |= sources
            return result
        return _mark(result, sources, record)


def _mark(value, sources, record):
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_mark(item, sources, record) for item in value) if type(value) in (tuple, list) else value
    if type(value) in (torch.Tensor, Followed):
        value = value if type(value) is Followed else value.as_subclass(Followed)
        value.sources, value.record = sources, record
    return value


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextlib.contextmanager
def record(model, folder: str):
    """Follow one load. Yields a function that wraps the loader's iterator of (name, tensor).

    The report goes to `folder`, one file for each load and process, also when the load fails.
    """
    notes = Record(model)

    def follow(weights):
        for name, tensor in weights:
            notes.offered[name] = [_dtype(tensor.dtype), list(tensor.shape)]
            marked = tensor.as_subclass(Followed)
            marked.sources, marked.record = frozenset((name,)), notes
            yield name, marked

    failure = None
    try:
        yield follow
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        report = notes.as_json(model) | {"failure": failure, "process": os.getpid()}
        target = Path(folder) / f"{type(model).__name__}-{os.getpid()}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report))


def _dtype(dtype) -> str:
    return str(dtype).removeprefix("torch.")
