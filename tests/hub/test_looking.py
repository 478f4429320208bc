"""Looking at a checkpoint on the Hub: headers over HTTP ranges, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moepress.errors import FormatError, HubError
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.inspection import inspect_checkpoint
from moepress.hub.address import Address, hub_address, parse_address
from moepress.hub.opening import open_source
from tests.hub.local_hub import Fault, LocalHub
from tests.tiny_checkpoints import TinyCheckpoint

REPO = "press/tiny-kimi"


def test_addresses() -> None:
    assert parse_address("org/name") == Address("org/name")
    assert parse_address("org/name@v1.0") == Address("org/name", "v1.0")
    assert parse_address("https://huggingface.co/org/name/tree/main") == Address("org/name", "main")
    for text in (
        "name",
        "./org/name",
        "/org/name",
        "~/org/name",
        "a/b/c",
        "org/na--me",
        "org/..",
        "org/name.git",
        "org/",
    ):
        assert parse_address(text) is None, text


def test_a_path_that_exists_is_the_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_address("org/name") is None
    assert hub_address("org/other") == Address("org/other")


def test_inspecting_reads_headers_alone(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    source = tiny("kimi")
    hub.repository(REPO).add_folder(source.folder)
    there = open_source(REPO)
    here = open_checkpoint(source.folder)
    assert there.tensors == here.tensors
    assert there.side_files == here.side_files
    assert there.folder is None
    asked, kept = inspect_checkpoint(there).as_json(), inspect_checkpoint(here).as_json()
    assert {**asked, "location": ""} == {**kept, "location": ""}
    assert hub.sent < here.total_bytes / 4
    shards = [line for line in hub.requests(r"GET .*safetensors$") if "/resolve/" in line.path]
    assert shards
    assert all(line.range for line in shards)


def test_the_token_does_not_follow_to_another_host(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    hub.repository(REPO, private=True).add_folder(tiny("kimi").folder)
    open_source(REPO)
    assert all(line.authorized for line in hub.requests("GET /api/"))
    assert hub.requests("GET /cdn/")
    assert not any(line.authorized for line in hub.requests("GET /cdn/"))


def test_a_commit_is_asked_for_even_when_main_moves(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    repository = hub.repository(REPO)
    commit = repository.add_folder(tiny("kimi").folder)
    hub.hooks.append(
        lambda line: "/tree/" in line.path and repository.commit("main", {}, "somebody removed everything")
    )
    open_source(REPO)
    assert all(commit in line.path for line in hub.requests("GET /press/"))


@pytest.mark.parametrize("revision", ["stable", "a" * 40])
def test_a_revision_that_is_not_there(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint], revision: str) -> None:
    hub.repository(REPO).add_folder(tiny("kimi").folder)
    with pytest.raises(HubError, match=f"no revision '{revision}'"):
        open_source(f"{REPO}@{revision}")


def test_missing_private_and_gated_repositories_are_explained_once(
    hub: LocalHub, tiny: Callable[[str], TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HB-08: 401, 403 and 404 are final, and say what to do."""
    hub.repository("press/secret", private=True).add_folder(tiny("kimi").folder)
    hub.repository("press/gated", gated=True).add_folder(tiny("kimi").folder)
    monkeypatch.setenv("HF_TOKEN", "hf_notthisone0000000000")
    cases = {
        "press/nobody": ("no repository press/nobody", "check the name"),
        "press/secret": ("private and this token may not see it", "use a token that may read it"),
        "press/gated": ("is gated", "accept the licence"),
    }
    for repo, (what, hint) in cases.items():
        before = len(hub.log)
        with pytest.raises(HubError) as caught:
            open_source(repo)
        assert what in caught.value.what
        assert hint in str(caught.value.hint)
        assert "hf_notthisone" not in str(caught.value)
        assert len(hub.log) - before <= 3
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with pytest.raises(HubError, match="nobody is logged in"):
        open_source("press/secret")


def test_config_refused_where_shards_are_not(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    """HB-08: 200 for shards and 401 for config.json is no missing repository, and is not tried again."""
    hub.repository(REPO).add_folder(tiny("kimi").folder)
    hub.faults.append(Fault(r"GET .*/config\.json", times=9, status=401))
    with pytest.raises(HubError, match="refused \\(401\\) access") as caught:
        open_source(REPO)
    assert "config.json" in str(caught.value.where)
    assert len(hub.requests(r"/config\.json")) == 1


def test_a_rate_limit_is_waited_out_as_the_hub_asks(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    """HB-05: back off on 429 with the server's wait; said once, not by every thread."""
    hub.repository(REPO).add_folder(tiny("kimi").folder)
    hub.faults += [
        Fault(r"GET /api/models/[^/]+/[^/]+/tree", status=429, headers=(("Retry-After", "1"),)),
        Fault(r"GET .*safetensors", times=2, status=429, headers=(("RateLimit", '"resolvers";r=0;t=1'),)),
    ]
    said: list[str] = []
    assert open_source(REPO, tell=said.append).tensors
    assert 1 <= len(said) <= 3
    assert all("waiting" in text for text in said)


def test_a_rate_limit_of_hours_is_not_waited_out(hub: LocalHub) -> None:
    hub.repository(REPO)
    hub.faults.append(Fault("GET /api/", times=9, status=429, headers=(("Retry-After", "7200"),)))
    with pytest.raises(HubError, match="asks to wait 7,200 s"):
        open_source(REPO)
    assert len(hub.log) == 1


def test_the_hubs_own_failures_are_tried_again(
    hub: LocalHub, tiny: Callable[[str], TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepress.hub.connection.RETRY_AFTER", (0.01, 0.01))
    hub.repository(REPO).add_folder(tiny("kimi").folder)
    hub.faults += [
        Fault("GET /api/models/[^/]+/[^/]+/revision|GET /api/models/press/tiny-kimi$", status=500),
        Fault("GET .*index.json", status=503, times=2),
        Fault("GET /cdn/", drop=True),
        Fault("GET /cdn/", cut=1000, after=1),
    ]
    assert open_source(REPO).tensors
    hub.faults.append(Fault("GET /api/", times=9, status=500))
    with pytest.raises(HubError, match="answered 500"):
        open_source(REPO)


def test_bytes_that_are_not_the_commits_are_refused(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    hub.repository(REPO).add_folder(tiny("kimi").folder)
    hub.faults.append(Fault(r"GET .*/config\.json", corrupt=True))
    with pytest.raises(HubError, match="not those of commit"):
        open_source(REPO)


def test_a_shard_on_the_hub_that_is_no_safetensors_file(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> None:
    """HB-01 on the other side: somebody pushed the pointer itself."""
    repository = hub.repository(REPO)
    repository.add_folder(tiny("kimi").folder)
    tree = dict(repository.tree())
    name = next(name for name in tree if name.endswith(".safetensors"))
    pointer = tree[name].pointer
    tree[name] = type(tree[name])(pointer, False)
    repository.commit("main", tree, "oops")
    with pytest.raises(FormatError, match="Git LFS pointer"):
        open_source(REPO)


def test_offline_is_said(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        open_source(REPO)
