"""Onto the Hub, so that main is either as it was or whole: never a mix.

    1  YAML      the Hub's own check of the card, before anything else is asked
    2  repo      made if it is not there (private unless asked otherwise); what main holds is compared with what is sent
    3  pull      a pull request of this output: found again by its title, or by .moepress/publish.json, after any stop
    4  upload    huggingface_hub's upload_folder onto the request's branch; what is there already is not sent again
    5  compare   the branch's listing against our checksums: every name, size and SHA-256, and nothing else
    6  merge     main moves, in one step; then main is compared too

Stopped, cut off or refused between any two of these, main has not moved, and the same command goes on where it was. Files
on main that are not of this output are removed by the same merge, which is only done if that was allowed (``replace``):
old and new shards in one repository are the mix that this is about. An upload that dies for the Hub's reasons is begun
again a few times by itself; 401, 403 and a card that is refused are final.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, enable_progress_bars, get_session

from moepress.convert.journal import STATE_FOLDER
from moepress.errors import HubError, MoepressError, VerifyFailed
from moepress.formats.atomic import atomic_write_json
from moepress.formats.shard_index import list_some
from moepress.hub.connection import HubUnreachable, endpoint, explained
from moepress.hub.listing import RemoteFile, list_commit
from moepress.publish.contents import CARD_NAME, Contents

UPLOADS = 4
"""Times an upload is begun before an error of the Hub's or of the way there ends it."""

LEDGER = Path(STATE_FOLDER) / "publish.json"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """What the Hub's listing and what is sent do not agree on, by name."""

    missing: tuple[str, ...]
    other: tuple[str, ...]
    strangers: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not (self.missing or self.other or self.strangers)

    @property
    def to_send(self) -> tuple[str, ...]:
        return (*self.missing, *self.other)

    def words(self) -> str:
        parts = []
        for names, what in ((self.missing, "missing"), (self.other, "with other bytes"), (self.strangers, "not ours")):
            if names:
                parts.append(f"{len(names)} {what}: {list_some(names, 3)}")
        return "; ".join(parts)


def difference(contents: Contents, remote: Mapping[str, RemoteFile]) -> Difference:
    """Holds a listing of the Hub against what is sent."""
    missing = [name for name in contents.files if name not in remote]
    other = [name for name, file in contents.files.items() if name in remote and not file.is_there(remote[name])]
    strangers = [name for name in remote if name not in contents.files]
    return Difference(tuple(missing), tuple(other), tuple(strangers))


@dataclass(frozen=True)
class Destination:
    """A repository before the push. ``main`` and ``difference`` are None where it does not exist yet."""

    repo: str
    exists: bool
    main: str | None
    difference: Difference


@dataclass(frozen=True)
class Published:
    """What a push did. ``merged`` is False where the pull request was left open."""

    repo: str
    pull_request: str | None
    commit: str | None
    merged: bool
    sent: tuple[str, ...]
    removed: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "repo": self.repo,
            "pull_request": self.pull_request,
            "commit": self.commit,
            "merged": self.merged,
            "sent": list(self.sent),
            "removed": list(self.removed),
            "seconds": round(self.seconds, 3),
        }


def look(api: HfApi, repo: str, contents: Contents) -> Destination:
    """What is in the repository now, compared with what is to be sent.

    Raises:
        HubError: it cannot be asked.
    """
    with explained(repo, writing=True):
        try:
            main = api.model_info(repo).sha
        except RepositoryNotFoundError as error:
            if type(error) is not RepositoryNotFoundError:  # gated: it is there
                raise
            return Destination(repo, False, None, difference(contents, {}))
    return Destination(repo, True, main, difference(contents, list_commit(api, repo, str(main))))


def push(
    api: HfApi,
    out: Path,
    contents: Contents,
    digest: str,
    repo: str,
    *,
    private: bool = True,
    replace: bool = False,
    merge: bool = True,
    message: str | None = None,
    quiet: bool = False,
    tell: Tell = lambda _: None,
) -> Published:
    """Publishes; see the module's docstring.

    Args:
        out: the output folder, for the ledger.
        contents: from `contents.stage`.
        digest: of the output; names the pull request.
        private: of a repository that is made now.
        replace: files on main that are not of this output may be removed.
        merge: False leaves the pull request open, for somebody to look at.
        message: of the commits.
        quiet: no progress bars.

    Raises:
        HubError: refused, unreachable, or main holds other files; main has not moved.
        VerifyFailed: what arrived is not what was sent; main has not moved.
    """
    started = time.monotonic()
    validate_card(contents.files[CARD_NAME].path.read_text(encoding="utf-8"))
    place = look(api, repo, contents)
    if place.exists and place.difference.empty:
        return Published(repo, None, place.main, True, (), (), time.monotonic() - started)
    _refuse_mixing(place.difference, repo, replace)
    if not place.exists:
        with explained(repo, writing=True):
            api.create_repo(repo, private=private, exist_ok=True)
        tell(f"made {'private' if private else 'public'} repository {endpoint()}/{repo}")
    number = _pull_request(api, out, repo, digest, tell)
    branch, page = f"refs/pr/{number}", f"{endpoint()}/{repo}/discussions/{number}"
    before = difference(contents, list_commit(api, repo, branch))
    if not before.empty:
        tell(f"sending {len(before.to_send)} of {len(contents.files)} files to {page}")
        _upload(api, contents, repo, branch, message or f"Pressed by moepress ({digest[:12]})", quiet, tell)
    _compare(api, contents, repo, branch, f"pull request {number}", page)
    if not merge:
        return Published(repo, page, None, False, before.to_send, before.strangers, time.monotonic() - started)
    _refuse_mixing(difference(contents, list_commit(api, repo, "main")), repo, replace)
    _merge(api, repo, number, page)
    commit = _compare(api, contents, repo, "main", "main after the merge", page)
    (out / LEDGER).unlink(missing_ok=True)
    return Published(repo, page, commit, True, before.to_send, before.strangers, time.monotonic() - started)


def validate_card(text: str) -> None:
    """The Hub's own check of the card's YAML.

    Raises:
        MoepressError: with what the Hub says.
    """
    with explained("the Hub's check of the card"):
        response = get_session().post(
            f"{endpoint()}/api/validate-yaml",
            json={"content": text, "repoType": "model"},
            headers=build_hf_headers(library_name="moepress"),
        )
    if response.status_code == 400:
        errors = [str(error.get("message")) for error in response.json().get("errors", [])]
        raise MoepressError("the Hub refuses the card's metadata:\n  " + "\n  ".join(errors), where=CARD_NAME)


def _refuse_mixing(found: Difference, repo: str, replace: bool) -> None:
    if found.strangers and not replace:
        raise HubError(
            f"main holds {len(found.strangers)} files that are not of this output: {list_some(found.strangers)}",
            where=f"{endpoint()}/{repo}",
            hint="publish to another repository, or --replace: the same merge then removes them (the history keeps them)",
        )


def _pull_request(api: HfApi, out: Path, repo: str, digest: str, tell: Tell) -> int:
    """The open pull request of this output: the ledger's, one with its title, or a new one."""
    title = f"Pressed by moepress: {digest[:12]}"
    known = _recorded(out, repo, digest)
    with explained(repo, writing=True):
        if known is not None:
            with contextlib.suppress(HfHubHTTPError):
                if api.get_discussion_details(repo, known).status in ("draft", "open"):
                    tell(f"going on with pull request {known}")
                    return known
        for discussion in api.get_repo_discussions(repo, discussion_type="pull_request"):
            if discussion.title == title and discussion.status in ("draft", "open"):
                number = discussion.num
                tell(f"going on with pull request {number}")
                break
        else:
            number = api.create_pull_request(repo, title, description="Made by `moepress publish`.").num
    atomic_write_json(out / LEDGER, {"repo": repo, "endpoint": endpoint(), "digest": digest, "pull_request": number})
    return number


def _recorded(out: Path, repo: str, digest: str) -> int | None:
    try:
        data = json.loads((out / LEDGER).read_text(encoding="utf-8"))
        same = (data["repo"], data["endpoint"], data["digest"]) == (repo, endpoint(), digest)
        return int(data["pull_request"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _upload(api: HfApi, contents: Contents, repo: str, branch: str, message: str, quiet: bool, tell: Tell) -> None:
    if quiet:
        disable_progress_bars()
    try:
        for left in reversed(range(UPLOADS)):
            try:
                with explained(repo, branch, writing=True):
                    api.upload_folder(
                        repo_id=repo,
                        folder_path=contents.folder,
                        revision=branch,
                        commit_message=message,
                        delete_patterns="*",
                    )
            except HubUnreachable as error:
                if not left:
                    raise
                tell(f"the upload was cut off ({error.what}); going on with what is missing")
            else:
                return
    finally:
        if quiet:
            enable_progress_bars()


def _compare(api: HfApi, contents: Contents, repo: str, revision: str, what: str, page: str) -> str:
    """The commit that a revision is at, when its listing is just what was sent.

    Raises:
        VerifyFailed: with what differs.
    """
    with explained(repo, revision):
        commit = str(api.model_info(repo, revision=revision).sha)
    found = difference(contents, list_commit(api, repo, commit))
    if not found.empty:
        raise VerifyFailed(
            f"{what} is not what was sent: {found.words()}",
            where=page,
            hint="main was not moved; run the same command again: only what differs is sent"
            if revision != "main"
            else f"somebody pushed at the same moment: look at {endpoint()}/{repo}/commits/main",
        )
    return commit


def _merge(api: HfApi, repo: str, number: int, page: str) -> None:
    try:
        with explained(repo, writing=True):
            if api.get_discussion_details(repo, number).status == "draft":
                api.change_discussion_status(repo, number, "open")
            api.merge_pull_request(repo, number)
    except HubError as error:
        with explained(repo):
            if api.get_discussion_details(repo, number).status == "merged":  # it worked, and the answer was lost
                return
        raise HubError(
            f"everything arrived and is right, and the merge was refused: {error.what}",
            where=page,
            hint=f"run the same command again, or merge it on {page}",
        ) from error
