"""A small OpenAI-compatible server over a real model: transformers on a tiny checkpoint, greedy, one request at a time.

    GET  /v1/models, /server_info                      /server_info only with ``sglang=True``
    POST /v1/completions                               token ids or text; echo, logprobs (any k), max_tokens, stop
    POST /v1/chat/completions                          chat template, tools; Kimi's markup parsed into tool calls
    POST /generate                                     with ``sglang=True``: SGLang's form of the same

Faults can be injected: the next n requests answered with a status, or the connection closed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

CALL = re.compile(
    r"<\|tool_call_begin\|>\s*([^\s<|]+)\s*<\|tool_call_argument_begin\|>\s*(.*?)\s*<\|tool_call_end\|>", re.DOTALL
)


@dataclass
class ServedModel:
    """The model, and what the server saw. `faults`: statuses to answer with before serving again; 0 = cut the line."""

    model: torch.nn.Module
    tokenizer: Any
    sglang: bool = False
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    refuses: tuple[str, ...] = ()
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    scored: tuple[list[int], torch.Tensor] = ([], torch.empty(0))

    @cached_property
    def words(self) -> list[str]:
        """Text of every token by itself."""
        return [self.tokenizer.decode([i]) for i in range(len(self.tokenizer))]

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[n, vocabulary] float32: of the token after each one. The last question's answer is remembered."""
        if self.scored[0] != ids:
            self.scored = ids, self._forward(ids)
        return self.scored[1]

    def _forward(self, ids: list[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, ids: list[int], count: int) -> tuple[list[int], bool]:
        """Up to `count` tokens, and whether the model ended by itself."""
        if count < 1:
            return [], False
        if count == 1:  # what scoring asks for: no cache, one forward
            best = int(self.logprobs(ids)[-1].argmax())
            return [best], best in self.ends()
        found = self.model.generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=self.ends(),
            pad_token_id=self.tokenizer.eos_token_id,
        )[0, len(ids) :].tolist()
        return found, bool(found) and found[-1] in self.ends()

    def ends(self) -> list[int]:
        return [self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions":
            return self._completion(body)
        if path == "/v1/chat/completions":
            return self._chat(body)
        if path == "/generate" and self.sglang:
            return self._generate(body)
        raise LookupError(path)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        ids = self.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        ids = ids[0] if ids and isinstance(ids[0], list) else ids
        new, ended = self.greedy(ids, body.get("max_tokens", 16))
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        stop = min((at for word in body.get("stop") or [] if (at := text.find(word)) >= 0), default=None)
        choice: dict[str, Any] = {"index": 0, "text": text[:stop], "logprobs": None}
        choice["finish_reason"] = "stop" if ended or stop is not None else "length"
        if (count := body.get("logprobs")) is not None:
            first = 0 if body.get("echo") else len(ids)
            choice["logprobs"] = self._openai_logprobs([*ids, *new], first, count)
        return {"object": "text_completion", "choices": [choice]}

    def _openai_logprobs(self, ids: list[int], first: int, count: int) -> dict[str, Any]:
        log = self.logprobs(ids)
        own: list[float | None] = [None if i == 0 else float(log[i - 1, ids[i]]) for i in range(len(ids))]
        top: list[dict[str, float] | None] = []
        for index in range(first, len(ids)):
            best = log[index - 1].topk(count) if index else None
            top.append(
                None
                if best is None
                else {self.words[i]: v for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
            )
        words = [self.words[i] for i in ids[first:]]
        return {"tokens": words, "token_logprobs": own[first:], "top_logprobs": top}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        new, ended = self.greedy(ids, count)
        facts: dict[str, Any] = {"finish_reason": {"type": "stop" if ended else "length"}}
        if body.get("return_logprob"):
            log, k = self.logprobs(ids), body.get("top_logprobs_num", 0)
            facts["input_token_logprobs"] = [[None, ids[0], None]] + [
                [float(log[i - 1, token]), token, None] for i, token in enumerate(ids) if i
            ]
            best = log[:-1].topk(k)
            facts["input_top_logprobs"] = [
                None,
                *(
                    [[v, i, None] for v, i in zip(vs, ix, strict=True)]
                    for vs, ix in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ),
            ]
        return {"text": self.tokenizer.decode(new, skip_special_tokens=True), "output_ids": new, "meta_info": facts}

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), tokenize=False, add_generation_prompt=True
        )
        new, ended = self.greedy(self.tokenizer.encode(text, add_special_tokens=False), body["max_tokens"])
        said = self.tokenizer.decode([i for i in new if i not in self.ends()], skip_special_tokens=False)
        calls = [
            {
                "id": name,
                "type": "function",
                "function": {"name": name.removeprefix("functions.").partition(":")[0], "arguments": arguments},
            }
            for name, arguments in CALL.findall(said)
        ]
        message = {
            "role": "assistant",
            "content": said.partition("<|tool_calls_section_begin|>")[0],
            "tool_calls": calls or None,
        }
        reason = "tool_calls" if calls else "stop" if ended else "length"
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": reason}]}


def load(folder: Path, load_weights: Callable[[Path], torch.nn.Module], *, sglang: bool = False) -> ServedModel:
    """A checkpoint in transformers' hands, with its own tokenizer and chat template."""
    from transformers import PreTrainedTokenizerFast

    return ServedModel(load_weights(folder), PreTrainedTokenizerFast.from_pretrained(folder), sglang)


@contextmanager
def serve(served: ServedModel) -> Iterator[ServedModel]:
    """Serves on a free port of 127.0.0.1 until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"data": [{"id": "tiny"}]})
            elif self.path == "/server_info" and served.sglang:
                self._send(200, {"version": "0.5.23", "kv_cache_dtype": "auto"})
            else:
                self._send(404, {"error": "not here"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.requests.append((self.path, body))
                if served.faults:
                    status = served.faults.pop(0)
                    if status == 0:
                        self.close_connection = True
                        self.connection.close()
                        return
                    self._send(status, {"error": "injected"})
                    return
                if self.path in served.refuses:
                    self._send(400, {"error": "this server does not do that"})
                    return
                try:
                    answer = served.answer(self.path, body)
                except LookupError:
                    self._send(404, {"error": "not here"})
                    return
            self._send(200, answer)

        def _send(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
