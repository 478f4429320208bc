"""The Triton kernel against its torch twin: the same answer, bit for bit, on random records with faults in them.

    TRITON_INTERPRET=1 python kernels.py --rounds 60          on a CPU, through Triton's interpreter
    python kernels.py --rounds 2000 --device cuda             on a GPU

Needs torch, triton and the plug-in's folder on PYTHONPATH; no SGLang. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from moepress_kv_integrity.rows import RowRecord
from moepress_kv_integrity.tags import PageTags
from moepress_kv_integrity.verify import verify_torch
from moepress_kv_integrity.verify_triton import BLOCK, verify_triton


def batch(page_size: int, columns: int, requests: int, generator: torch.Generator, device: str):
    """Rows of `requests` requests over shared and own pages, all in order; then a few things are made wrong."""

    def some(high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=generator)

    pages = requests * columns + 8
    tags = PageTags(pages, page_size, device)
    rows = torch.randperm(requests + 3, generator=generator)[:requests]
    table = torch.zeros(requests + 4, columns * page_size, dtype=torch.int32)
    lengths = some(columns * page_size, requests) + 1
    order = torch.randperm(pages, generator=generator) + 1
    for i, row in enumerate(rows.tolist()):
        mine = order[i * columns : (i + 1) * columns]
        slots = (mine[:, None] * page_size + torch.arange(page_size)).view(-1)
        table[row] = slots.to(torch.int32)
        tags.allocated(slots.to(device))
    record = RowRecord(requests + 4, columns * page_size, tags)
    for row in rows.tolist():
        record.given_extend(row, 0, table[row].to(torch.int64).to(device))
    for _ in range(int(some(6, 1))):
        row, page = int(rows[int(some(requests, 1))]), order[int(some(requests * columns, 1))]
        column = int(some(columns, 1))
        fault = int(some(5, 1))
        if fault == 0:
            table[row, column * page_size : (column + 1) * page_size] = page * page_size + torch.arange(page_size)
        elif fault == 1:
            tags.freed(page[None].to(device))
        elif fault == 2:
            tags.allocated((page[None] * page_size).to(device))
        elif fault == 3:
            table[row, int(some(columns * page_size, 1))] += 1
        else:
            tags.tainted(page[None].to(device), torch.ones(1, dtype=torch.bool, device=device))
    return table.to(device), rows.to(device), lengths.to(device), record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    generator = torch.Generator().manual_seed(asked.seed)
    shapes = [(1, 40, 5), (4, 17, 6), (64, 9, 4), (1, BLOCK + 77, 2), (4, 2 * BLOCK + 1, 2)]
    wrong = differing = compared = 0
    for turn in range(asked.rounds):
        arguments = batch(*shapes[turn % len(shapes)], generator, asked.device)
        longest = int(arguments[2].max())
        plain, kernel = verify_torch(*arguments, longest), verify_triton(*arguments, longest)
        compared += plain.shape[0]
        wrong += int((plain[:, 0] >= 0).sum())
        differing += int((plain != kernel).any(1).sum())
    ok = differing == 0 and 0 < wrong < compared
    print(json.dumps({"compared": compared, "wrong": wrong, "differing": differing, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
