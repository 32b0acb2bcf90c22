"""Downloads from a server on this machine: interrupted and continued, checked, and refused in one message."""

import hashlib
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.similarity import lpips
from grpo_core.rewards.weights.fetch import Download, downloads_of
from grpo_core.rewards.weights.files import PublishedWeights
from tests.grpo_core.rewards.conftest import put_into
from tests.grpo_core.rewards.stub import Asked, Reply, Stub
from tests.grpo_core.rewards.weights.test_files import CONTENT as ON_HUB
from tests.grpo_core.rewards.weights.test_files import hub

__all__ = ["hub"]

CONTENT = bytes(range(256)) * 8
NAME = f"net-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pth"


def as_the_makers(requested: Asked) -> Reply:
    """Send one file: below `half` only its beginning, below `whole` always everything."""
    given = requested.headers.get("Range", "").removeprefix("bytes=").removesuffix("-")
    begin = int(given or 0) if "/whole" not in requested.path else 0
    if "/none" in requested.path or begin >= len(CONTENT):
        return Reply(b"", 416 if begin else 404)
    content = CONTENT[begin:] if "/other" not in requested.path else b"other"
    sent = content[:1000] if "/half" in requested.path and not begin else content
    return Reply(sent, 206 if begin else 200, {"Content-Length": str(len(content))})


@pytest.fixture
def makers(stub: Stub) -> Stub:
    stub.respond = as_the_makers
    return stub


def trunk(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    monkeypatch.setitem(lpips.TRUNKS, "alex", PublishedWeights(NAME, "the makers", url, licence="BSD"))  # type: ignore[arg-type]
    (download,) = downloads_of(build_reward("lpips"), folder)
    return download


@pytest.mark.parametrize("again", ["half", "whole"])
def test_an_interrupted_download_continues(
    again: str, makers: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trunk(f"{makers.url}/half/{NAME}", tmp_path / "new", monkeypatch)
    assert (first.present, first.size(), first.setting, first.licence) == (False, len(CONTENT), "weights", "BSD")
    with pytest.raises(InputError, match="it continues"):
        first.run()
    part = tmp_path / "new" / f"{NAME}.part"
    begun = part.stat().st_size
    assert 0 < begun <= 1000
    advanced: list[int] = []
    second = trunk(f"{makers.url}/{again}/{NAME}", tmp_path / "new", monkeypatch)
    assert Path(second.run(advanced.append)).read_bytes() == CONTENT
    assert sum(advanced) == len(CONTENT)
    assert (makers.requested[-1].method, makers.requested[-1].headers["Range"]) == ("GET", f"bytes={begun}-")
    assert (second.present, part.exists()) == (True, False)
    requests = len(makers.requested)
    second.run()
    assert len(makers.requested) == requests


def test_a_complete_part_is_only_checked(makers: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    assert Path(trunk(f"{makers.url}/{NAME}", tmp_path, monkeypatch).run()).read_bytes() == CONTENT


def test_other_content_is_deleted(makers: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=hashlib.sha256(b"other").hexdigest()):
        trunk(f"{makers.url}/other/{NAME}", tmp_path, monkeypatch).run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["{url}/none", "http://127.0.0.1:9"])
def test_no_answer_is_one_message(place: str, makers: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = trunk(f"{place.format(url=makers.url)}/{NAME}", tmp_path, monkeypatch)
    for ask in (download.size, download.run):
        with pytest.raises(InputError, match=r"rewards.lpips.weights: got .* Check the network"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_settings_decide_what_is_fetched(cache: Path, tmp_path: Path) -> None:
    own = str(tmp_path / "sub" / lpips.TRUNKS["alex"].file)
    (download,) = downloads_of(build_reward("lpips", {"weights": own}), tmp_path / "other")
    assert (download.weights.source, download.sha256) == (own, "7be5be79")
    assert downloads_of(build_reward("ssim"), tmp_path) == []
    (pickscore,) = downloads_of(build_reward("pickscore"), tmp_path)
    assert (pickscore.url, pickscore.weights.source, pickscore.present) == (None, "yuvalkirstain/PickScore_v1", False)
    for settings in ({"weights": str(tmp_path / "mine.pth")}, {"weights": "no-such-folder/mine.pth"}):
        with pytest.raises(InputError, match="There is no such file"):
            downloads_of(build_reward("lpips", settings), tmp_path)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        pickscore.size()
    with pytest.raises(InputError, match="Set a folder"):
        downloads_of(build_reward("reward_model"), tmp_path)


def test_the_hub_is_asked_for_the_size_and_keeps_the_file(hub: Stub, tmp_path: Path, cache: Path) -> None:
    (download,) = downloads_of(build_reward("lpips", {"weights": "hf://makers/net/net-7be5be79.pth"}), tmp_path)
    assert (download.size(), download.present) == (len(ON_HUB), False)
    assert Path(download.run()).read_bytes() == ON_HUB
    assert download.present
    put_into(cache, "owner/other", {"a.pth": b"here"})
    (known,) = downloads_of(build_reward("lpips", {"weights": "hf://owner/other/a.pth"}), tmp_path)
    assert known.present
