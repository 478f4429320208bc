"""Talk to a running SGLang server: the few HTTP calls that a validation needs; errors say which one failed."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moepress.errors import ServingError


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        tokens: generated token ids.
        logprobs: natural-log probability of each generated token; empty when not asked for.
        prompt_logprobs: of the prompt's tokens from `logprobs_from` on, given those before; empty when not asked for.
        top: per generated token, the most likely tokens and their log-probabilities; empty when not asked for.
        prompt_top: the same for the prompt's tokens from `logprobs_from` on.
        text: decoded text; empty when the server runs without a tokenizer.
        finish_reason: ``length``, ``stop``, ``abort``.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    top: tuple[dict[int, float], ...] = ()
    prompt_top: tuple[dict[int, float], ...] = ()


@dataclass(frozen=True)
class Memory:
    """What /server_info says about memory, in GiB per GPU, and tokens per replica."""

    weights_gib: float
    kv_gib: float
    kv_tokens: int


class SGLangClient:
    """A server at `url`, e.g. ``http://127.0.0.1:30000``. Holds no connection; safe to use from threads.

    Every method raises `ServingError` when the server does not answer or answers with an error.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def healthy(self, *, timeout_s: float = 20.0) -> bool:
        """True when the server has just generated a token (/health_generate). Never raises."""
        try:
            with urllib.request.urlopen(f"{self.url}/health_generate", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def server_info(self) -> dict[str, Any]:
        """/server_info: the resolved arguments, `version`, `max_total_num_tokens`, `internal_states`."""
        return self._object("GET", "/server_info")

    def model_info(self) -> dict[str, Any]:
        """/model_info: path, tokenizer path, whether it generates."""
        return self._object("GET", "/model_info")

    def memory(self) -> Memory:
        """Memory per GPU as the server counts it (on a CPU the figures are differences of free memory: rough)."""
        info = self.server_info()
        try:
            usage = info["internal_states"][0]["memory_usage"]
            return Memory(float(usage["weight"]), float(usage["kvcache"]), int(info["max_total_num_tokens"]))
        except (KeyError, IndexError, TypeError) as error:
            raise ServingError(
                f"/server_info has no memory figures ({error!r})",
                where=self.url,
                hint="moepress reads SGLang 0.5.23's form; this server is another version",
            ) from error

    def checksums(self) -> dict[str, dict[str, str]]:
        """Hash of every parameter that was loaded: rank (``tp0``, ``tp1-pp0``) → parameter name → hash.

        A draft model's parameters are in its rank, their names marked by SGLang. Block-FP8 weights are hashed
        dequantized, together with their scales; all else as stored.
        """
        answer = self._object("POST", "/weights_checker", {"action": "checksum"})
        if not answer.get("success"):
            raise ServingError(f"/weights_checker failed: {answer.get('message')}", where=self.url)
        found: dict[str, dict[str, str]] = {}
        for rank in answer.get("ranks", []):
            place = rank["parallelism_info"][0]
            name = f"tp{place['tp_rank']}"
            name += f"-pp{place['pp_rank']}" if place["pp_size"] > 1 else ""
            name += f"-dp{place['dp_rank']}" if place["dp_size"] > 1 else ""
            found[name] = dict(rank["checksums"])
        return found

    def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        logprobs: bool = False,
        logprobs_from: int | None = None,
        top_logprobs: int = 0,
    ) -> Generation:
        """Complete one prompt.

        Args:
            prompt: token ids, or text if the server has a tokenizer.
            max_new_tokens: how many tokens to generate (fewer if the model stops, unless `ignore_eos`).
            temperature: 0 = greedy.
            ignore_eos: go on after the end token.
            logprobs: return log-probabilities of the generated tokens.
            logprobs_from: also return those of the prompt's tokens from this index on (>= 1: a first token has none).
            top_logprobs: how many of the most likely tokens to return wherever log-probabilities are returned.
        """
        body: dict[str, Any] = {
            "text" if isinstance(prompt, str) else "input_ids": prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        if logprobs or logprobs_from is not None:
            body["return_logprob"] = True
        if logprobs_from is not None:
            if logprobs_from < 1:
                raise ValueError(f"logprobs_from={logprobs_from}: a prompt's first token has no probability")
            body["logprob_start_len"] = logprobs_from - 1
        if top_logprobs:
            body["top_logprobs_num"] = top_logprobs
        answer = self._object("POST", "/generate", body)
        facts = answer["meta_info"]
        # The first entry stands for the token at logprob_start_len, which has no predecessor in the window.
        asked = facts.get("input_token_logprobs", [])[1:] if logprobs_from is not None else []
        return Generation(
            tokens=tuple(answer.get("output_ids", ())),
            logprobs=tuple(float(entry[0]) for entry in facts.get("output_token_logprobs", [])) if logprobs else (),
            prompt_logprobs=tuple(float(entry[0]) for entry in asked),
            text=answer.get("text") or "",
            finish_reason=str((facts.get("finish_reason") or {}).get("type", "")),
            top=_by_token(facts.get("output_top_logprobs") or ()) if top_logprobs else (),
            prompt_top=_by_token((facts.get("input_top_logprobs") or ())[1:]) if top_logprobs else (),
        )

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Waits for running requests, up to half a minute."""
        request = urllib.request.Request(f"{self.url}/flush_cache?timeout=30", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s):
                return
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"POST /flush_cache: {error}", where=self.url) from error

    def _object(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                value = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise ServingError(f"{method} {path}: HTTP {error.code}: {said}", where=self.url) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServingError(
                f"{method} {path}: no answer: {error}", where=self.url, hint="is the server up? see its log"
            ) from error
        if not isinstance(value, dict):
            raise ServingError(f"{method} {path}: expected an object, got {type(value).__name__}", where=self.url)
        return value


def _by_token(positions: Sequence[Sequence[Sequence[Any]] | None]) -> tuple[dict[int, float], ...]:
    """SGLang's [log-probability, token id, text] entries, per position."""
    return tuple({int(entry[1]): float(entry[0]) for entry in position or ()} for position in positions)
