"""What each server really reads of our output, as data, each fact with its evidence.

A writer full of ifs about servers cannot be checked against a server. Here a fact is a row: which layouts of the
quantization config a server takes for a family, under which names it reads KV scales and what they then do, which group
sizes its kernels know, what must be on the command line, and what it drops without a word. ``plan``, ``convert``,
``verify`` and ``validate`` all read these rows.

Evidence is one of three kinds, and begins with these words:

    seen …          observed by running that version (on a CPU: names, dtypes, shapes, sharding and routing are the
                    server's own there, GPU kernels are not)
    read in F:L     read in the source of that version, at that line; not run
    not verified    believed, and to be proven before anybody relies on it

A contract is for one version. Another version is refused until somebody has looked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moepress.errors import PlanRefused
from moepress.formats.contract_types import (
    FAMILIES,
    Contract,
    LaunchFlag,
    LayoutSupport,
    Server,
    SignedScales,
)
from moepress.formats.kv_contract import KvEffect, KvEmission, KvScales
from moepress.formats.sglang_contract import sglang_contract
from moepress.formats.sizes import largest_tensor_parallel
from moepress.formats.vllm_contract import vllm_contract

__all__ = [
    "CONTRACTS",
    "FAMILIES",
    "Contract",
    "KvEffect",
    "KvEmission",
    "KvScales",
    "LaunchFlag",
    "LayoutSupport",
    "Server",
    "SignedScales",
    "check_group",
    "contract_for",
    "doubtful_signed_scales",
]

CONTRACTS: Mapping[tuple[str, str, str], Contract] = MappingProxyType(
    {
        (contract.server, contract.version, contract.family): contract
        for family in FAMILIES
        for contract in (sglang_contract(family), vllm_contract(family))
    }
)
"""Every contract, by (server, version, family)."""


def contract_for(server: str, version: str, family_key: str) -> Contract:
    """The contract of one server, version and family.

    Args:
        server: ``sglang`` or ``vllm``.
        version: exact, as ``importlib.metadata.version`` gives it; a local part (``+cpu``) is dropped.
        family_key: a key of `FAMILIES`.

    Raises:
        PlanRefused: nobody has looked at this combination.
    """
    found = CONTRACTS.get((server.lower(), version.partition("+")[0], family_key))
    if found is not None:
        return found
    servers = sorted({f"{known} {its}" for known, its, _ in CONTRACTS})
    raise PlanRefused(
        f"no contract for {server} {version} with {family_key}: nobody has looked at what it reads",
        hint=f"known are {', '.join(servers)}, with {', '.join(FAMILIES)}",
    )


def doubtful_signed_scales(contract: Contract, group_size: int, *, settings: bool = False) -> list[SignedScales]:
    """Kernels that may meet such a checkpoint and are not known to take scales below zero.

    Args:
        contract: from `contract_for`.
        group_size: columns per scale, -1 for the whole row.
        settings: those too that the server takes only when it is told to.
    """
    return [
        row
        for row in contract.signed_scales
        if row.takes is not True and group_size in row.group_sizes and (row.by_default or settings)
    ]


def check_group(
    contract: Contract,
    *,
    group_size: int,
    moe_intermediate: int,
    hidden_size: int,
    tensor_parallel: int,
    symmetric: bool = True,
) -> list[str]:
    """Refuse a grid that the server cannot serve, before anything is quantized.

    Args:
        contract: from `contract_for`.
        group_size: columns per INT4 scale, -1 for the whole row.
        moe_intermediate, hidden_size: columns of down_proj, and of gate and up.
        tensor_parallel: ranks that share every expert.
        symmetric: no zero points.

    Returns:
        Kernels that take this grid. If the contract's first is not among them, the server has to be told which to use.

    Raises:
        PlanRefused: no kernel takes the group size, groups would straddle ranks, or zero points do not load.
    """
    where = f"{contract.server} {contract.version}, {contract.family}"
    if not symmetric and contract.symmetric_only:
        raise PlanRefused(
            f"the server does not load asymmetric INT4 experts ({contract.symmetric_evidence})",
            where=where,
            hint="use symmetric: true",
        )
    kernels = [kernel for kernel, sizes in contract.group_sizes.items() if group_size in sizes]
    if not kernels:
        known = ", ".join(f"{kernel} {list(sizes)}" for kernel, sizes in contract.group_sizes.items())
        raise PlanRefused(f"no kernel takes group size {group_size}", where=where, hint=f"known sizes: {known}")
    share, rest = divmod(moe_intermediate, tensor_parallel)
    unit = 8 if group_size == -1 else group_size
    if rest or share % unit:
        fitting = [size for size in (128, 64, 32) if not rest and share % size == 0]
        better = f"group size {fitting[0]} fits TP {tensor_parallel}" if fitting else "no group size fits this TP"
        raise PlanRefused(
            f"TP {tensor_parallel} gives each rank {moe_intermediate / tensor_parallel:g} of down_proj's "
            f"{moe_intermediate} columns, which is {moe_intermediate / tensor_parallel / unit:g} groups of {unit}",
            where=where,
            hint=f"largest safe TP for group size {group_size}: {largest_tensor_parallel(moe_intermediate, group_size)}; {better}",
        )
    if hidden_size % unit:
        raise PlanRefused(f"hidden size {hidden_size} is no multiple of group size {group_size}", where=where)
    fitting_kernels = [kernel for kernel in kernels if share % contract.share_multiples[kernel] == 0]
    if not fitting_kernels:
        tiles = ", ".join(f"{kernel} {contract.share_multiples[kernel]}" for kernel in kernels)
        raise PlanRefused(
            f"TP {tensor_parallel} gives each rank {share} columns, no multiple of a kernel's tile ({tiles})",
            where=where,
        )
    return fitting_kernels
