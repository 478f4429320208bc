"""Many streams to one server at once, each with the tokens it was sent and how it ended."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Stream:
    """What one client saw. `status` is the HTTP status of a reply that is no stream."""

    rid: str
    tokens: list[int] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    error: str = ""


def prompts(count: int, *, groups: int, shared: int, own: int, vocabulary: int) -> list[list[int]]:
    """`count` prompts in `groups` that share their first `shared` tokens and go on with `own` different ones."""
    return [
        [(17 * (i % groups) + 5 * k) % vocabulary for k in range(shared)]
        + [(31 * i + 7 * k + 3) % vocabulary for k in range(own + i % 5)]
        for i in range(count)
    ]


def generate(url: str, prompt: Sequence[int], rid: str, new_tokens: int, *, stream: bool = True) -> Stream:
    """One greedy completion that does not stop before `new_tokens`."""
    seen = Stream(rid)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    body = {
        "input_ids": list(prompt),
        "rid": rid,
        "stream": stream,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    seen.status = answer.status
    if answer.status != 200 or not stream:
        text = answer.read().decode(errors="replace")
        if answer.status == 200:
            _take(seen, json.loads(text))
        else:
            seen.error = text
        connection.close()
        return seen
    for line in answer:
        data = line.decode(errors="replace").strip().removeprefix("data: ")
        if data.startswith("{"):
            _take(seen, json.loads(data))
    connection.close()
    return seen


def generate_all(url: str, asked: Sequence[Sequence[int]], new_tokens: int, *, run: str) -> list[Stream]:
    """All prompts at once, one connection each; stream i is called ``{run}-{i}``."""
    with ThreadPoolExecutor(len(asked)) as pool:
        jobs = [pool.submit(generate, url, prompt, f"{run}-{i}", new_tokens) for i, prompt in enumerate(asked)]
        return [job.result() for job in jobs]


def _take(seen: Stream, piece: dict[str, Any]) -> None:
    if "error" in piece:
        seen.error = json.dumps(piece["error"])
        return
    # Streamed pieces carry all tokens so far, or the new ones with incremental_streaming_output.
    seen.tokens = list(piece.get("output_ids", seen.tokens)) or seen.tokens
    seen.finish = (piece.get("meta_info") or {}).get("finish_reason") or seen.finish
