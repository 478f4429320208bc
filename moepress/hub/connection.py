"""One client for every request to the Hub: it waits where waiting helps, and says why where it does not.

    429                        wait as long as the Hub says, all threads together, `MAX_WAIT` at most for one request
    500 502 503 504, no line   GET and HEAD again, after 1, 2, 4 and 8 seconds; nothing else, because a POST may have worked
    401 403 404                final: explained, never repeated

huggingface_hub takes a client from us (``set_client_factory``), so its own requests are made this way too, downloads and
uploads included; only hf-xet has a client of its own. A request whose body is a stream cannot be sent twice from here:
its 429 is handed on to huggingface_hub, which rewinds the file, after the wait was found to be within bounds.

Tokens are huggingface_hub's business (``hf auth login`` or HF_TOKEN). They are never read here beyond the question
whether there is one, and no error of ours carries a header. Signed download addresses are as good as tokens for an hour,
so huggingface_hub's log, which prints them, is kept to errors.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from huggingface_hub import HfApi, get_token, set_client_factory
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from moepress import __version__
from moepress.errors import HubError, MoepressError

MAX_WAIT = 20 * 60.0
"""Seconds one request may wait for its turn. The Hub counts in windows of five minutes."""

RETRY_AFTER = (1.0, 2.0, 4.0, 8.0)
"""Seconds before a request is made again that failed on the Hub's side, or on the way."""

_FAILING = frozenset((500, 502, 503, 504))
_TIMEOUTS = httpx.Timeout(60.0, connect=20.0, read=300.0)
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)')

Tell = Callable[[str], None]


class HubUnreachable(HubError):
    """The Hub failed, or the way to it did: the same request may work later."""


class _Turn:
    """When requests may be made again: one moment for all threads, since the limit is one for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._from = 0.0
        self.tell: Tell | None = None

    def wait(self) -> None:
        while (left := self._from - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))

    def postpone(self, seconds: float) -> None:
        with self._lock:
            moment = time.monotonic() + seconds
            news = moment > self._from + 1
            self._from = max(self._from, moment)
        if news and self.tell:
            self.tell(f"the Hub's rate limit is reached: waiting {seconds:.0f} s, as it asks")


_turn = _Turn()


class PatientClient(httpx.Client):
    """httpx's client with the three rules of the module's docstring around every request."""

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        repeatable = request.method in ("GET", "HEAD")
        started, failures = time.monotonic(), 0
        while True:
            _turn.wait()
            try:
                response = super().send(request, **options)
            except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError):
                if not repeatable or failures == len(RETRY_AFTER):
                    raise
            else:
                if response.status_code == 429:
                    seconds = seconds_to_wait(response.headers)
                    if time.monotonic() - started + seconds > MAX_WAIT:
                        raise _waits_too_long(seconds)
                    if not isinstance(request.stream, httpx.ByteStream):
                        return response
                    response.close()
                    _turn.postpone(seconds)
                    continue
                if response.status_code not in _FAILING or not repeatable or failures == len(RETRY_AFTER):
                    return response
                response.close()
            time.sleep(RETRY_AFTER[failures])
            failures += 1


def seconds_to_wait(headers: httpx.Headers) -> float:
    """What a 429 asks for: ``Retry-After`` in seconds, or ``RateLimit: "api";r=0;t=SECONDS``; else five seconds."""
    if match := _RATE_LIMIT.search(headers.get("ratelimit", "")):
        return float(match[1]) + 1
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 5.0


def _waits_too_long(seconds: float) -> HubError:
    return HubError(
        f"the Hub's rate limit is reached and it asks to wait {seconds:,.0f} s; at most {MAX_WAIT:,.0f} s are waited",
        where=endpoint(),
        hint="run the same command again later: what is done is kept; a logged-in user has a higher limit (hf auth login)",
    )


def endpoint() -> str:
    """Where the Hub is: ``HF_ENDPOINT``, or huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def connect(tell: Tell | None = None) -> HfApi:
    """The Hub's API, through our client.

    Args:
        tell: is told in words when a rate limit is waited out.
    """
    _turn.tell = tell
    # what huggingface_hub does to every request (offline mode, a request's id) hangs on the client that it would make
    hooks = get_session().event_hooks
    set_client_factory(lambda: PatientClient(event_hooks=hooks, follow_redirects=True, timeout=_TIMEOUTS))
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return HfApi(endpoint=endpoint(), library_name="moepress", library_version=__version__)


@contextmanager
def explained(repo: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turns what huggingface_hub raises inside the block into one `HubError` that says what to do.

    Args:
        repo: the repository that is asked for.
        revision: the branch, tag or commit, for the message.
        writing: the block wants to change the repository.
    """
    try:
        yield
    except MoepressError:
        raise
    except Exception as error:
        cause = _http_cause(error)
        if cause is None:
            raise
        raise _explain(cause, repo, revision, writing) from None


def _http_cause(error: BaseException) -> BaseException | None:
    """The error that tells most: huggingface_hub wraps some in 'not found in the local cache', upload threads in others.

    hf-xet has a client of its own, whose failures come as Python's: looked at last, when nothing of HTTP is found.
    """
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    of_http = (HfHubHTTPError, httpx.HTTPError, OfflineModeIsEnabled, HFValidationError, MoepressError)
    for found in chain:
        if isinstance(found, of_http) and not isinstance(found, LocalEntryNotFoundError):
            return found
    of_xet = (ConnectionError, TimeoutError, RuntimeError, LocalEntryNotFoundError)
    return next((found for found in chain if isinstance(found, of_xet) or _is_xet(found)), None)


def _is_xet(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "hf_xet"


def _explain(error: BaseException, repo: str, revision: str | None, writing: bool) -> MoepressError:
    if isinstance(error, MoepressError):
        return error
    page = f"{endpoint()}/{repo}"
    login = None if get_token() else "you are not logged in: hf auth login"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{repo} is gated: its licence has to be accepted first"
            + ("" if login else ", and this token's owner has not"),
            where=page,
            hint=f"accept the licence on {page}, then {'hf auth login' if login else 'run the same command again'}",
        )
    if isinstance(error, DisabledRepoError):
        return HubError(f"{repo} was disabled by the Hub", where=page)
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{repo} has no revision {revision!r}", where=page, hint=f"see {page}/refs, or leave @{revision} out"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return HubError(f"{repo} has no such file at this revision", where=error.response.url.path)
    if isinstance(error, RepositoryNotFoundError):
        return HubError(
            f"no repository {repo} on the Hub, or it is private and "
            + ("nobody is logged in here" if login else "this token may not see it"),
            where=page,
            hint=f"check the name on {page}; if it is private, "
            + ("hf auth login" if login else "use a token that may read it: hf auth login"),
        )
    if status in (401, 403):
        right = "write to it" if writing else "read its contents (fine-grained tokens name repositories one by one)"
        return HubError(
            f"the Hub refused ({status}) access to {repo}",
            where=error.response.url.path if isinstance(error, HfHubHTTPError) else page,
            hint=login or f"the token is not valid or may not {right}: hf auth login",
        )
    if isinstance(error, OfflineModeIsEnabled):
        return HubError("HF_HUB_OFFLINE is set: nothing may be asked of the Hub", hint="unset HF_HUB_OFFLINE")
    if isinstance(error, HFValidationError):
        return HubError(f"{repo!r} is not a repository's name", hint="write org/name, or org/name@revision")
    if isinstance(error, HfHubHTTPError):
        said = (error.server_message or "").strip()
        kind = HubUnreachable if status in _FAILING else HubError
        return kind(
            f"the Hub answered {status}" + (f": {said[:300]}" if said else ""),
            where=f"{error.response.request.method} {error.response.url.path}",
            hint="run the same command again: what is done is kept",
        )
    if not isinstance(error, httpx.HTTPError | LocalEntryNotFoundError):
        said = re.sub(r"\(?https?://\S+|,? ?domain:.*", "", str(error)).strip()  # addresses may be signed
        return HubUnreachable(
            f"the transfer broke: {said[:200] or type(error).__name__}",
            where=endpoint(),
            hint="run the same command again: what is done is kept; HF_HUB_DISABLE_XET=1 goes another way",
        )
    return HubUnreachable(
        f"the Hub cannot be reached: {type(error).__name__}",
        where=endpoint(),
        hint="check the network and HTTPS_PROXY, then run the same command again: what is done is kept",
    )
