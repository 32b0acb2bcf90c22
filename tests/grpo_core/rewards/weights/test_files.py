import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.weights.files import PublishedWeights, WeightFile, WeightSource, load_state_dict, load_weights
from grpo_core.rewards.weights.source import HubName
from tests.grpo_core.rewards.conftest import COMMIT, put_into
from tests.grpo_core.rewards.stub import Asked, Reply, Stub

PLACE = "rewards.lpips.weights"
NET = PublishedWeights("net-7be5be79.pth", "the makers", "https://example.org/net", "hf://makers/net/net-7be5be79.pth")
CONTENT = b"weights of the makers"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def as_the_hub(requested: Asked) -> Reply:
    """Answer like the Hub for one file of one open repository."""
    refusals: Mapping[str, tuple[int, str]] = {
        "/closed/net/": (403, "GatedRepo"),
        "/nobody/net/": (404, "RepoNotFound"),
        "/makers/net/resolve/no-branch": (404, "RevisionNotFound"),
        "/makers/net/resolve/main/no-file": (404, "EntryNotFound"),
        "/broken/net/": (500, ""),
    }
    for start, (status, code) in refusals.items():
        if requested.path.startswith(start):
            return Reply(b"", status, {"X-Error-Code": code})
    drop = requested.path.startswith("/gone/")
    return Reply(CONTENT, headers={"ETag": f'"{DIGEST}"', "X-Repo-Commit": COMMIT}, drop=drop)


@pytest.fixture
def hub(stub: Stub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A Hub on this machine."""
    stub.respond = as_the_hub
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    huggingface_hub.close_session()
    yield stub
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("hf://o/r/f.pth", HubName("o/r", None, "f.pth")),
        ("hf://o/r/a/b+c.pth@v1.0", HubName("o/r", "v1.0", "a/b+c.pth")),
        ("hf://o/r/f.pth@refs/pr/3", HubName("o/r", "refs/pr/3", "f.pth")),
        ("hf://o/r@main/a/f.pth", HubName("o/r", "main", "a/f.pth")),
    ],
)
def test_names_on_the_hub_are_taken_apart(name: str, right: HubName) -> None:
    assert WeightSource(PLACE, name, None, NET)._locate(name) == right


def test_offline_the_cache_is_all_there_is(cache: Path) -> None:
    source = "hf://makers/net/sub/net.pth"
    with pytest.raises(InputError, match="HF_HUB_OFFLINE") as caught:
        WeightSource(PLACE, source, None, NET).resolve()
    assert (caught.value.place, caught.value.value) == (PLACE, source)
    assert str(WeightSource(PLACE, source, None, NET).find_problem()) == str(caught.value)

    snapshot = put_into(cache, "makers/net", {"sub/net.pth": CONTENT})
    assert WeightSource(PLACE, source, DIGEST[:10].upper(), NET).find_problem() is None
    found = WeightSource(PLACE, source, DIGEST, NET).resolve()
    assert (Path(found.path), found.sha256) == (snapshot / "sub/net.pth", DIGEST)
    assert WeightSource(PLACE, f"{source}@v2", None, NET).find_problem() is not None
    assert WeightSource(PLACE, f"{source}@{COMMIT}", None, NET).find_problem() is None


def test_digests_are_checked_by_setting_and_by_published_name(cache: Path, tmp_path: Path) -> None:
    put_into(cache, "makers/net", {NET.file: CONTENT})
    stated = PublishedWeights("a+b.pth", "them", "https://example.org", digest=DIGEST[:16])
    right, wrong = tmp_path / "a+b.pth", tmp_path / "wrong" / "a+b.pth"
    wrong.parent.mkdir()
    right.write_bytes(CONTENT)
    wrong.write_bytes(CONTENT + b"!")
    assert WeightSource(PLACE, str(right), None, stated).find_problem() is None
    for source, digest, published, value in (
        (NET.hub, "0" * 8, NET, "00000000"),
        (NET.hub, None, NET, "7be5be79"),
        (str(wrong), None, stated, DIGEST[:16]),
    ):
        problem = WeightSource(PLACE, source, digest, published).find_problem()
        assert problem is not None
        assert (problem.place, problem.value) == (f"{PLACE}_sha256", value)
        assert file_sha256(str(wrong if published is stated else right)) in problem.hint


def test_first_use_downloads_once_and_preflight_never(hub: Stub, cache: Path) -> None:
    source = "hf://makers/net/net.pth"
    assert WeightSource(PLACE, source, DIGEST, NET).find_problem() is None
    assert hub.requested == []
    found = WeightSource(PLACE, source, DIGEST, NET).resolve()
    assert found.sha256 == DIGEST
    assert Path(found.path).read_bytes() == CONTENT
    assert [str(each) for each in hub.requested if each.method == "GET"] == ["GET /makers/net/resolve/main/net.pth"]
    requested = len(hub.requested)
    assert WeightSource(PLACE, source, DIGEST, NET).resolve() == found
    assert len(hub.requested) == requested
    with pytest.raises(InputError, match=rf"weights_sha256: got '0{{64}}'.*{DIGEST}"):
        WeightSource(PLACE, source, "0" * 64, NET).resolve()


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("hf://closed/net/net.pth", "accept the terms"),
        ("hf://nobody/net/net.pth", "no such repository"),
        ("hf://makers/net/net.pth@no-branch", "no such revision"),
        ("hf://makers/net/no-file.pth", "no such file"),
        ("hf://broken/net/net.pth", "did not return it"),
        ("hf://gone/net/net.pth", "did not return it"),
    ],
)
def test_each_refusal_of_the_hub_is_one_message(
    hub: Stub, monkeypatch: pytest.MonkeyPatch, source: str, hint: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(InputError, match=hint) as caught:
        WeightSource(PLACE, source, None, NET).resolve()
    assert (caught.value.place, caught.value.value) == (PLACE, source)


def test_a_hub_that_cannot_be_reached_or_hangs_up_over_a_file(hub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.respond = lambda requested: Reply(drop=True) if requested.method == "GET" else as_the_hub(requested)
    reachable = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
    for template in (reachable, "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"):
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with pytest.raises(InputError, match="did not return it"):
            WeightSource(PLACE, "hf://makers/net/net.pth", None, NET).resolve()


def weights(path: Path) -> WeightFile:
    return WeightFile(PLACE, str(path), "")


class TestTensors:
    @pytest.mark.parametrize("name", ["t.pt", "legacy.pt", "t.safetensors"])
    def test_truncated_and_garbled_files_are_refused(self, tmp_path: Path, name: str) -> None:
        path, tensors = tmp_path / name, {"a": torch.zeros(30, 5)}
        if name == "t.safetensors":
            safetensors.torch.save_file(tensors, path)
        else:
            torch.save(tensors, path, _use_new_zipfile_serialization=name != "legacy.pt")
        whole, random = path.read_bytes(), np.random.default_rng(0)
        for length in range(0, len(whole) - 200, 97):
            path.write_bytes(whole[:length])
            with pytest.raises(InputError, match=r"cannot be read as a state dict|does not contain named tensors"):
                load_state_dict(weights(path))
        for position in random.integers(0, min(len(whole), 1000), 200):
            garbled = bytearray(whole)
            garbled[position] ^= 0xFF
            path.write_bytes(garbled)
            # A byte that nothing depends on may be read over; every other one ends in a message and nothing else.
            with contextlib.suppress(InputError):
                load_state_dict(weights(path))

    def test_code_in_a_file_never_runs(self, tmp_path: Path) -> None:
        trace, path = tmp_path / "trace", tmp_path / "evil.pt"

        class Evil:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return Path.touch, (trace,)  # type: ignore[return-value]

        torch.save({"a": Evil()}, path)
        with pytest.raises(InputError, match="cannot be read as a state dict"):
            load_state_dict(weights(path))
        assert not trace.exists()
        torch.load(path, weights_only=False)
        assert trace.exists()

    @pytest.mark.parametrize(
        ("tensors", "hint"),
        [
            ({"weight": torch.zeros(1, 2)}, "bias is missing. Set the weights of a line"),
            ({"weight": torch.zeros(2, 1), "bias": torch.zeros(1)}, r"weight has shape \[2, 1\], not \[1, 2\]"),
            ({"weight": torch.zeros(1, 2), "bias": torch.zeros(1), "c": torch.zeros(1)}, "has c, which a line"),
        ],
    )
    def test_wrong_tensors_are_named(self, tensors: dict[str, torch.Tensor], hint: str) -> None:
        with pytest.raises(InputError, match=hint):
            load_weights(WeightFile(PLACE, "f", ""), torch.nn.Linear(2, 1), tensors, "a line")
