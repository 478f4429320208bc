"""How long a conversion would take on a machine that is not here: operations and bytes over rates, on paper.

    read       source bytes from disk, once for each run of calibration                       disk
    copy       the same bytes from memory to the GPUs, and the packed ones back               PCIe
    forward    matrix products in BF16                                                        tensor cores
    moments    Hessians: BF16 products, float32 sums                                          tensor cores
    gptq       factoring, rounding, polishing, in float32                                     ordinary cores
    gather     packed experts of other machines to the one that writes                        network
    write      output bytes, with their SHA-256                                               disk

Every rate is a fact or an assumption of `MACHINES`, with what it rests on. Two totals: ``floor``, the slowest single resource
if everything else hid behind it, and ``in turn``, one after the other, as the converter works today. The truth lies at
or above the second: nothing is counted for starting up, for small matrices, or for what nobody thought of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.convert.forecast.calibration_cost import Operations, operations
from moepress.convert.plan import pressed_specs
from moepress.errors import PlanRefused
from moepress.formats.architecture import expected_weights
from moepress.formats.sizes import checkpoint_bytes
from moepress.recipe import Recipe

T, G = 1e12, 1e9


@dataclass(frozen=True)
class Machine:
    """Rates of a machine, or of several alike, in operations or bytes a second.

    Attributes:
        title: what it is.
        nodes: machines; the disk that is read and written is one, shared.
        devices: GPUs of each, or 1 for its processors together.
        product: BF16 matrix products of one device.
        plain: float32 arithmetic of one device outside its matrix units, as GPTQ gets it.
        link: host memory to one device; None = there is no other memory to copy to.
        network: between machines, of each.
        read, write: of the disk.
        press: source bytes rounded without calibration, by the processors of one machine.
        basis: what the rates rest on.
    """

    title: str
    nodes: int
    devices: int
    product: float
    plain: float
    link: float | None
    network: float
    read: float
    write: float
    press: float
    basis: str


_H200 = {"product": 790 * T, "plain": 40 * T, "link": 50 * G, "network": 40 * G, "read": 12 * G, "write": 6 * G}
_H200_BASIS = (
    "790 TFLOP/s measured by others in BF16; 40 of 67 TFLOP/s peak in float32, PCIe 5 at 50 GB/s, four NVMe drives at 12 and "
    "6 GB/s, 400 Gb/s network: assumed"
)

MACHINES: Mapping[str, Machine] = {
    "cpu64": Machine(
        "64 processor cores, four NVMe drives",
        1,
        1,
        6 * T,
        1.5 * T,
        None,
        40 * G,
        12 * G,
        6 * G,
        64 * 0.3 * G,
        "AVX-512 in float32, 95 GFLOP/s a core and a quarter of it outside products; 0.3 GB/s a core rounded (measured here)",
    ),
    "h200": Machine("one H200", 1, 1, press=16 * 0.3 * G, basis=_H200_BASIS, **_H200),
    "h200x8": Machine("eight H200 in one machine", 1, 8, press=96 * 0.3 * G, basis=_H200_BASIS, **_H200),
    "4xh200x8": Machine("four machines of eight H200", 4, 8, press=96 * 0.3 * G, basis=_H200_BASIS, **_H200),
}


@dataclass(frozen=True)
class PaperTime:
    """A conversion on paper. ``stages``: seconds by name."""

    machine: str
    stages: Mapping[str, float]
    resources: Mapping[str, float]

    @property
    def in_turn(self) -> float:
        """Seconds when every stage waits for the one before."""
        return sum(self.stages.values())

    @property
    def floor(self) -> float:
        """Seconds when everything hides behind the busiest resource."""
        return max(self.resources.values())

    @property
    def bound_by(self) -> str:
        """That resource."""
        return max(self.resources, key=lambda name: self.resources[name])

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "stages": {name: round(seconds, 2) for name, seconds in self.stages.items()},
            "seconds_in_turn": round(self.in_turn, 1),
            "seconds_floor": round(self.floor, 1),
            "bound_by": self.bound_by,
        }


def paper_time(config: Mapping[str, Any], recipe: Recipe, name: str) -> PaperTime:
    """What a conversion would take on a machine of the table.

    Args:
        config: the published ``config.json``.
        name: of `MACHINES`.

    Raises:
        PlanRefused: no such machine.
    """
    machine = MACHINES.get(name)
    if machine is None:
        raise PlanRefused(f"no machine is called {name!r}; known are {', '.join(MACHINES)}", where="--on")
    specs = expected_weights(dict(config))
    source, output = checkpoint_bytes(specs), checkpoint_bytes(pressed_specs(dict(config), recipe))
    if not recipe.calibrated:
        stages = {
            "read": source / machine.read,
            "round": source / (machine.press * machine.nodes),
            "write": output / machine.write,
        }
        return PaperTime(name, stages, {"disk": stages["read"] + stages["write"], "processors": stages["round"]})
    return _calibrated(name, machine, operations(config, recipe), source, output)


def _calibrated(name: str, machine: Machine, todo: Operations, source: int, output: int) -> PaperTime:
    devices = machine.devices * machine.nodes
    stages = {
        "read": todo.decoded / machine.read,
        "forward": todo.forward / (machine.product * devices),
        "moments": todo.moments / (machine.product * devices),
        "gptq": todo.gptq / (machine.plain * devices),
        "write": output / machine.write,
    }
    resources = {
        "disk": stages["read"] + stages["write"],
        "matrix products": stages["forward"] + stages["moments"],
        "float32": stages["gptq"],
    }
    if machine.link is not None:
        stages["copy"] = (todo.decoded + output) / (machine.link * devices)
        resources["PCIe"] = stages["copy"]
    if machine.nodes > 1:
        stages["gather"] = output * (machine.nodes - 1) / machine.nodes / machine.network
        resources["network"] = stages["gather"]
    if source > todo.decoded:  # embeddings and heads are read and carried without calibration
        stages["read"] += (source - todo.decoded) / machine.read
    return PaperTime(name, stages, resources)
