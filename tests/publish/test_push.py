"""Onto the Hub: main is as it was, or whole; what arrived is compared; a stopped push goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepress.convert.receipts import weight_records
from moepress.errors import HubError, MoepressError, VerifyFailed
from moepress.hub.address import Address
from moepress.hub.connection import connect
from moepress.hub.pulling import pull
from moepress.hub.reading import open_hub_checkpoint
from moepress.publish.card import make_card
from moepress.publish.contents import CARD_NAME, PUBLISHED_RECEIPTS, Contents, stage
from moepress.publish.gate import check_publishable
from moepress.publish.push import Published, look, push
from moepress.report.output import read_pressed_output
from moepress.verify.run import verify
from tests.hub.local_hub import Fault, LocalHub
from tests.hub.local_hub.repositories import Stored

REPO = "press/tiny-kimi-int4"


def contents_of(out: Path) -> Contents:
    card = make_card(read_pressed_output(out), title="tiny-kimi-int4", base_model="press/tiny-kimi")
    return stage(check_publishable(out), card.text)


def publish(out: Path, **options: Any) -> Published:
    options.setdefault("quiet", True)
    return push(connect(), out, contents_of(out), check_publishable(out).digest, REPO, **options)


def on_main(hub: LocalHub) -> dict[str, str]:
    tree = hub.repositories[REPO].tree()
    return {name: hashlib.sha256(file.data).hexdigest() for name, file in tree.items() if name != ".gitattributes"}


def sent(contents: Contents) -> dict[str, str]:
    return {name: file.sha256 for name, file in contents.files.items()}


def test_a_new_repository_holds_just_what_was_sent(hub: LocalHub, out: Path) -> None:
    said: list[str] = []
    result = publish(out, tell=said.append)
    assert result.merged
    assert on_main(hub) == sent(contents_of(out))
    assert {CARD_NAME, PUBLISHED_RECEIPTS, "moepress_report.json", "LICENSE", "tokenization_tiny.py"} <= on_main(
        hub
    ).keys()
    repository = hub.repositories[REPO]
    assert repository.private
    assert [ref for ref, _ in repository.messages if ref == "refs/heads/main"] == ["refs/heads/main"] * 2
    assert repository.pulls[1].status == "merged"
    kept = "".join(path.read_text(errors="ignore") for path in (out / ".moepress").rglob("*.json"))
    assert hub.token not in kept + " ".join(said)


def test_publishing_again_sends_nothing(hub: LocalHub, out: Path) -> None:
    publish(out)
    before = len(hub.log)
    again = publish(out)
    assert again.sent == ()
    assert again.merged
    assert {line.method for line in hub.log[before:]} <= {"GET", "POST"}
    assert [line.path for line in hub.log[before:] if line.method == "POST"] == ["/api/validate-yaml"]


def test_a_published_copy_is_pulled_and_verified_with_its_receipts(
    hub: LocalHub, out: Path, pressed: tuple[Path, Path], tmp_path: Path
) -> None:
    publish(out)
    checkpoint, snapshot = open_hub_checkpoint(Address(REPO))
    pull(checkpoint, snapshot, tmp_path / "copy")
    assert not verify(tmp_path / "copy", pressed[0]).problems
    assert weight_records(tmp_path / "copy") == weight_records(out)


def test_xet_itself_sends_and_fetches(
    hub: LocalHub, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf-xet, unpatched: chunks go up, main holds what was sent, the same chunks come down and are held against SHA-256."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    assert publish(out).merged
    assert on_main(hub) == sent(contents_of(out))
    assert hub.requests("POST /xet/v1/xorbs/")
    assert not hub.requests("PUT /lfs/")
    checkpoint, snapshot = open_hub_checkpoint(Address(REPO))
    pull(checkpoint, snapshot, tmp_path / "copy")
    assert hub.requests("GET /xet-data/")
    assert {path.name for path in (tmp_path / "copy").glob("*.safetensors")} == {
        path.name for path in out.glob("*.safetensors")
    }
    before = len(hub.requests("POST /xet/v1/xorbs/"))
    (out / ".moepress" / "publish.json").unlink(missing_ok=True)
    assert publish(out).sent == ()
    assert len(hub.requests("POST /xet/v1/xorbs/")) == before


def test_a_transfer_that_xet_gives_up_is_explained(hub: LocalHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    hub.faults.append(Fault("POST /xet/v1/xorbs/", status=403, times=9999))
    with pytest.raises(HubError, match=r"the transfer broke: .*403") as caught:
        publish(out)
    assert "http" not in caught.value.what
    assert on_main(hub) == {}
    hub.faults.clear()
    assert publish(out).merged


CUTS = {
    "the card is not looked at": Fault("POST /api/validate-yaml", status=500, times=9),
    "no repository is made": Fault("POST /api/repos/create", status=403, times=9),
    "no pull request is made": Fault("POST .*/discussions$", status=500, times=9),
    "no upload modes": Fault("POST .*/preupload", status=401, times=9999),
    "objects are refused": Fault("PUT /lfs/", status=403, times=9999, after=1),
    "the line dies inside an object": Fault("PUT /lfs/", drop=True, times=9999, after=1),
    "the commit is refused": Fault("POST .*/commit/", status=403, times=9999),
    "the listing fails": Fault("GET .*/tree/.*", status=500, times=9999, after=2),
    "the merge is refused": Fault("POST .*/merge", status=403, times=9),
    "the merge breaks": Fault("POST .*/merge", drop=True, times=9),
}


@pytest.mark.parametrize("cut", CUTS)
def test_main_does_not_move_when_something_breaks_and_the_same_command_goes_on(
    hub: LocalHub, out: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """HB-10: whatever breaks, and wherever, nothing half-pushed reaches main; the rest is sent, and no more."""
    monkeypatch.setattr("moepress.hub.connection.RETRY_AFTER", (0.01,))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    fault = CUTS[cut]
    hub.faults.append(Fault(**fault.__dict__))
    with pytest.raises(HubError):
        publish(out)
    if REPO in hub.repositories:
        assert on_main(hub) == {}
    there = set(hub.objects)
    hub.faults.clear()
    before = len(hub.log)
    assert publish(out).merged
    assert on_main(hub) == sent(contents_of(out))
    put = {line.path.removeprefix("/lfs/") for line in hub.log[before:] if line.method == "PUT"}
    assert not put & there
    assert len(hub.repositories[REPO].pulls) == 1


def test_a_stop_between_two_commits(hub: LocalHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HB-10: many files go in several commits, large ones by Xet; the first of two arrives, the second is cut off."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)  # the client's several commits
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    report = json.loads((out / "moepress_report.json").read_text())
    for number in range(300):
        name = f"docs/page_{number:03d}.md"
        (out / name).write_text(f"page {number}\n")
        report["side_files"][name] = ""
    (out / "moepress_report.json").write_text(json.dumps(report))
    accept(out)
    hub.faults.append(Fault("POST .*/commit/", drop=True, after=1, times=9999))
    with pytest.raises(HubError):
        publish(out)
    repository = hub.repositories[REPO]
    half = set(repository.tree("refs/pr/1"))
    assert 200 < len(half) < 300
    assert on_main(hub) == {}
    hub.faults.clear()
    before = len(repository.messages)
    result = publish(out)
    assert set(result.sent) == sent(contents_of(out)).keys() - half
    assert on_main(hub) == sent(contents_of(out))
    assert len(repository.messages) - before == 2  # the second commit, and the merge


def accept(out: Path) -> None:
    """A verification of the changed folder, so that the gate lets it pass."""
    from moepress.results import write_result

    write_result(out, "verify", "pass", {"source": None, "problems": [], "tensors": 1, "checked": []})


def test_bytes_that_changed_on_the_way_do_not_reach_main(hub: LocalHub, out: Path) -> None:
    """HB-02 the other way round: the listing's checksums are compared before main moves."""

    committed: list[str] = []

    def spoil(line: Any) -> None:
        """After the commit, before the listing that is compared."""
        if "/commit/" in line.path:
            committed.append(line.path)
        elif committed and "/tree/" in line.path:
            tree = hub.repositories[REPO].commits[hub.repositories[REPO].refs["refs/pr/1"]]
            name = next(name for name in tree if name.endswith(".safetensors"))
            tree[name] = Stored(tree[name].data[:-1] + b"x", True)

    hub.hooks.append(spoil)
    with pytest.raises(VerifyFailed, match="1 with other bytes: model-"):
        publish(out)
    assert on_main(hub) == {}


def test_files_of_something_else_are_not_mixed_with_ours(hub: LocalHub, out: Path) -> None:
    """HB-10: old shards and new ones in one repository; the merge removes them, if that was allowed."""
    repository = hub.repository(REPO)
    old = {"model-00001-of-00009.safetensors": Stored(b"old" * 3000, True), "config.json": Stored(b"{}", False)}
    repository.commit("main", {**repository.tree(), **old}, "an older model")
    with pytest.raises(
        HubError, match="main holds 1 files that are not of this output: model-00001-of-00009"
    ) as caught:
        publish(out)
    assert "--replace" in str(caught.value.hint)
    assert not repository.pulls
    result = publish(out, replace=True)
    assert result.removed == ("model-00001-of-00009.safetensors",)
    assert on_main(hub) == sent(contents_of(out))


def test_somebody_pushes_to_main_meanwhile(hub: LocalHub, out: Path) -> None:
    repository = hub.repository(REPO)

    def intrude(line: Any) -> None:
        if line.path.endswith("/merge") or "/commit/" not in line.path or "weights.bin" in repository.tree():
            return
        repository.commit("main", {**repository.tree(), "weights.bin": Stored(b"x", False)}, "somebody else")

    hub.hooks.append(intrude)
    with pytest.raises(HubError, match=r"main holds 1 files that are not of this output: weights\.bin"):
        publish(out)
    assert on_main(hub).keys() == {"weights.bin"}


def test_a_pull_request_may_be_left_open(hub: LocalHub, out: Path) -> None:
    result = publish(out, merge=False)
    assert not result.merged
    assert result.pull_request == f"{hub.endpoint}/{REPO}/discussions/1"
    assert on_main(hub) == {}
    (out / ".moepress" / "publish.json").unlink()
    assert publish(out).sent == ()  # found again by its title
    assert on_main(hub) == sent(contents_of(out))


def test_a_merge_whose_answer_was_lost_is_no_failure(hub: LocalHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merged_before_the_answer(line: Any) -> None:
        if line.path.endswith("/merge"):
            hub.repositories[REPO].merge(1)

    hub.hooks.append(merged_before_the_answer)
    hub.faults.append(Fault("POST .*/merge", drop=True))
    assert publish(out).merged


def test_a_rate_limit_in_the_middle(hub: LocalHub, out: Path) -> None:
    """HB-05: the third call gets 429 with Retry-After; it is waited out, and nothing is asked twice for it."""
    hub.faults.append(Fault("POST |PUT ", after=2, status=429, headers=(("Retry-After", "1"),)))
    said: list[str] = []
    assert publish(out, tell=said.append).merged
    assert len(hub.requests("POST .*/discussions$")) <= 2
    shards = len(list(out.glob("*.safetensors")))
    assert len(hub.requests("PUT ")) <= shards + 3
    assert len(hub.log) < 40 + 3 * shards


def test_looking_sends_nothing(hub: LocalHub, out: Path) -> None:
    place = look(connect(), REPO, contents_of(out))
    assert not place.exists
    assert set(place.difference.to_send) == sent(contents_of(out)).keys()
    assert not hub.requests("POST|PUT|DELETE")
    publish(out)
    assert look(connect(), REPO, contents_of(out)).difference.empty


def test_a_card_that_the_hub_refuses_stops_before_the_first_byte(
    hub: LocalHub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HB-07: the YAML is checked before a repository is even made."""
    contents = contents_of(out)
    card = contents.files[CARD_NAME].path
    card.write_text("---\ndatasets: [null]\n---\n# x\n")
    with pytest.raises(MoepressError, match="datasets"):
        push(connect(), out, contents, "0" * 64, REPO, quiet=True)
    assert [line.path for line in hub.log] == ["/api/validate-yaml"]


def _touch(out: Path) -> None:
    next(out.glob("*.safetensors")).touch()


def _damage(out: Path) -> None:
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100:] = bytes(100)
    shard.write_bytes(data)


def test_a_folder_without_receipts_is_refused(out: Path) -> None:
    next((out / ".moepress" / "receipts").glob("*.json")).unlink()
    with pytest.raises(MoepressError, match="shards have no receipt: model-"):
        check_publishable(out)


def test_what_was_written_since_the_verification_is_verified_again(out: Path) -> None:
    said: list[str] = []
    check_publishable(out, tell=said.append)
    assert said == []
    _touch(out)
    import os

    shard = next(out.glob("*.safetensors"))
    os.utime(shard, (shard.stat().st_atime, shard.stat().st_mtime + 60))
    check_publishable(out, tell=said.append)
    assert "was written after the last verification" in said[0]


@pytest.mark.parametrize("damage", [_damage])
def test_a_folder_that_does_not_verify_is_refused(out: Path, damage: Callable[[Path], None]) -> None:
    damage(out)
    (out / ".moepress" / "results" / "verify.json").unlink()
    with pytest.raises(VerifyFailed, match="SHA-256"):
        check_publishable(out)


def test_a_file_that_convert_did_not_write_is_not_sent(out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    with pytest.raises(MoepressError, match=r"not of the conversion: notes\.txt"):
        contents_of(out)


def test_a_file_of_50_gb_is_refused_before_anything_is_sent(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HB-06: the limit is decimal, and 47 GiB are more than 50 GB."""
    side = next(out.glob("*.safetensors"))
    monkeypatch.setattr("moepress.publish.contents.MAX_SHARD_BYTES", side.stat().st_size)
    with pytest.raises(MoepressError, match="the Hub takes files below"):
        contents_of(out)
    assert 47 * 2**30 > 50_000_000_000


def test_receipts_travel_without_times_and_places(out: Path) -> None:
    import gzip

    data = json.loads(gzip.decompress(contents_of(out).files[PUBLISHED_RECEIPTS].path.read_bytes()))
    assert data["receipts"].keys() == {path.name for path in out.glob("*.safetensors")}
    assert "seconds" not in next(iter(data["receipts"].values()))
    assert "/" not in json.dumps(data).replace("I/O", "")
    assert contents_of(out).files[PUBLISHED_RECEIPTS].sha256 == contents_of(out).files[PUBLISHED_RECEIPTS].sha256
