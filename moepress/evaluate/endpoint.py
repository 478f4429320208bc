"""A server that answers over HTTP: OpenAI's API, and SGLang's own where it is there, because it says more about probabilities.

    POST /v1/completions, /v1/chat/completions      any server
    POST /generate                                  SGLang: prompts as token ids, log-probabilities of the prompt, any top-k

What passes by itself is tried again, with growing pauses and a bound (connection lost, 408, 429, 5xx; a Retry-After is
kept to); what will not (another 4xx, an answer that is not JSON) is an error at once.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Literal

from moepress.errors import EvaluateError

Kind = Literal["sglang", "openai"]
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 30.0
_FACTS = ("model_path", "dtype", "quantization", "kv_cache_dtype", "speculative_algorithm", "tool_call_parser")


class RequestRefused(EvaluateError):
    """The server understood the request and will not do it (HTTP 4xx): this API lacks what was asked for."""


class NoAnswer(EvaluateError):
    """Every try of a request failed in a way that may pass: whether the server knows it is not known."""


@dataclass(frozen=True)
class Endpoint:
    """A server and how to speak with it. Holds no connection; may be used from threads.

    Attributes:
        url: root, e.g. ``http://127.0.0.1:30000`` (a ``/v1`` at the end is cut off).
        kind: ``sglang`` when /generate and its probabilities are there.
        model: the name to send.
        software: for people: ``SGLang 0.5.23``.
        facts: what decides about its answers beside the weights, as far as it tells: KV type, quantization, speculation.
        api_key: sent as a bearer token; never stored.
        timeout_s: of one request.
        attempts: most tries of one request.
        stop: set when nobody waits for answers any more: ends pauses between tries.
    """

    url: str
    kind: Kind
    model: str
    software: str
    facts: tuple[tuple[str, str], ...] = ()
    api_key: str | None = None
    timeout_s: float = 900.0
    attempts: int = 6
    stop: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, tried again while that can help.

        Raises:
            EvaluateError: no answer after `attempts`, or one that another try will not change.
        """
        return _request(self, "POST", path, {"model": self.model, **body} if path.startswith("/v1/") else body)


def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 900.0,
    attempts: int = 6,
) -> Endpoint:
    """Finds out who answers at a URL.

    Args:
        url: root, with or without ``/v1``.
        model: which of its models; may be left out when it serves one.

    Raises:
        EvaluateError: nobody answers, or it serves several models, or not the one asked for.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EvaluateError(f"{url!r} is not the URL of a server", hint="--url http://HOST:PORT")
    root = url.rstrip("/").removesuffix("/v1")
    found = Endpoint(
        root, "openai", model or "", "", api_key=api_key, timeout_s=min(timeout_s, 30.0), attempts=min(attempts, 3)
    )
    listed = [str(entry.get("id")) for entry in _request(found, "GET", "/v1/models", None).get("data", [])]
    if model is None and len(listed) != 1:
        raise EvaluateError(
            f"the server has {len(listed)} models: {', '.join(listed)}", where=root, hint="--model NAME"
        )
    if model is not None and listed and model not in listed:
        raise EvaluateError(f"the server has no model {model!r}; it has {', '.join(listed)}", where=root)
    kind, software, facts = _software(found)
    return Endpoint(root, kind, model or listed[0], software, facts, api_key, timeout_s, attempts)


def _software(endpoint: Endpoint) -> tuple[Kind, str, tuple[tuple[str, str], ...]]:
    """SGLang answers /server_info with its version and arguments; vLLM /version; others neither.

    Raises:
        EvaluateError: no answer, which must not pass for "not there": other requests would be sent, other answers kept.
    """
    for path, name in (("/server_info", "SGLang"), ("/version", "vLLM")):
        try:
            answer = _request(endpoint, "GET", path, None)
        except NoAnswer:
            raise
        except EvaluateError:  # HTTP 4xx, or a page that is no JSON
            continue
        if "version" in answer:
            facts = tuple((fact, str(answer[fact])) for fact in _FACTS if answer.get(fact) is not None)
            return ("sglang" if name == "SGLang" else "openai"), f"{name} {answer['version']}", facts
    return "openai", "OpenAI-compatible", ()


def _request(endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    data = None if body is None else json.dumps(body).encode()
    said = ""
    for attempt in range(endpoint.attempts):
        pause = min(_LONGEST_PAUSE_S, 0.5 * 2**attempt)
        try:
            request = urllib.request.Request(endpoint.url + path, data=data, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=endpoint.timeout_s) as answer:
                content = answer.read()
            break
        except urllib.error.HTTPError as error:
            said = f"HTTP {error.code}: {error.read(500).decode(errors='replace').strip()}"
            if error.code not in _PASSING:
                raise RequestRefused(f"{method} {path}: {said}", where=endpoint.url) from error
            pause = _asked_pause(error, pause)
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
        if attempt + 1 < endpoint.attempts and endpoint.stop.wait(pause):
            raise EvaluateError(f"{method} {path}: stopped between two tries", where=endpoint.url)
    else:
        raise NoAnswer(
            f"{method} {path}: no answer after {endpoint.attempts} tries: {said}",
            where=endpoint.url,
            hint="is the server up? its log says why",
        )
    try:
        value = json.loads(content)
    except ValueError as error:
        raise EvaluateError(f"{method} {path}: the answer is not JSON: {content[:80]!r}", where=endpoint.url) from error
    if not isinstance(value, dict):
        raise EvaluateError(f"{method} {path}: expected an object, got {type(value).__name__}", where=endpoint.url)
    return value


def _asked_pause(error: urllib.error.HTTPError, otherwise: float) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(error.headers.get("Retry-After", ""))))
    except ValueError:
        return otherwise
