"""Where weights are: files and models, here and on the Hub, and files on a server of their maker."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from grpo_core.rewards.weights import FILE, HubName, Published, Weights
from grpo_core.seeds import file_sha256
from tests.grpo_core.rewards.conftest import put_into, refusal, refused
from tests.grpo_core.rewards.stub import (
    COMMIT,
    CONTENT,
    DIGEST,
    NET,
    Stub,
    as_the_hub,
    reach,
)

PLACE = "rewards.lpips.weights"
MODEL_PLACE = "rewards.text_model.model"
MODEL = {"config.json": b"{}", "model.safetensors": b"tensors", "tokenizer.json": b"{}"}


def weights(source: str | None, sha256: str | None = None, published: Published = NET) -> Weights:
    return Weights(PLACE, source, sha256, published)


def model(source: str | None, sha256: str | None = None) -> Weights:
    return Weights(MODEL_PLACE, source, sha256, Published("its makers", note="for example makers/net"))


@pytest.fixture
def hub(stub: Stub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    stub.respond = as_the_hub
    reach(stub, monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield stub
    huggingface_hub.close_session()


def gets(stub: Stub) -> list[str]:
    return [each.path for each in stub.requested if each.method == "GET" and "/resolve/" in each.path]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "right"),
        [
            ("hf://o/r/f.pth", ("o/r", "f.pth", None)),
            ("hf://o/r/a/b+c.pth@v1.0", ("o/r", "a/b+c.pth", "v1.0")),
            ("hf://o/r/f.pth@refs/pr/3", ("o/r", "f.pth", "refs/pr/3")),
            ("hf://o/r@main/a/f.pth", ("o/r", "a/f.pth", "main")),
        ],
    )
    def test_names_on_the_hub_are_taken_apart(self, name: str, right: tuple[str, str, str | None]) -> None:
        assert HubName.read(name, FILE) == HubName(*right)

    def test_offline_the_cache_is_all_there_is(self, cache: Path) -> None:
        source = "hf://makers/net/sub/net.pth"
        error = refused(weights(source).path)
        assert (error.place, error.value) == (PLACE, source)
        assert str(weights(source).problem()) == str(error)

        snapshot = put_into(cache, "makers/net", {"sub/net.pth": CONTENT})
        assert weights(source, DIGEST[:10].upper()).problem() is None
        found = weights(source, DIGEST)
        assert (Path(found.path()), found.digest()) == (snapshot / "sub/net.pth", DIGEST)
        assert weights(f"{source}@v2").problem() is not None
        assert weights(f"{source}@{COMMIT}").problem() is None

    def test_digests_are_checked_by_setting_and_by_published_name(self, cache: Path, tmp_path: Path) -> None:
        put_into(cache, "makers/net", {NET.file: CONTENT})
        stated = Published("them", "a+b.pth", "https://example.org", sha256=DIGEST[:16])
        right, wrong = tmp_path / "a+b.pth", tmp_path / "wrong" / "a+b.pth"
        wrong.parent.mkdir()
        right.write_bytes(CONTENT)
        wrong.write_bytes(CONTENT + b"!")
        assert weights(str(right), None, stated).problem() is None
        for source, digest, published, value in (
            (NET.hub, "0" * 8, NET, "00000000"),
            (NET.hub, None, NET, "7be5be79"),
            (str(wrong), None, stated, DIGEST[:16]),
        ):
            problem = weights(source, digest, published).problem()
            assert problem is not None
            assert (problem.place, problem.value) == (f"{PLACE}_sha256", value)
            assert file_sha256(str(wrong if published is stated else right)) in problem.hint

    def test_first_use_downloads_once_and_preflight_never(self, hub: Stub) -> None:
        source = "hf://makers/net/net.pth"
        assert weights(source, DIGEST).problem() is None
        assert hub.requested == []
        assert Path(weights(source, DIGEST).path()).read_bytes() == CONTENT
        assert gets(hub) == ["/makers/net/resolve/main/net.pth"]
        requested = len(hub.requested)
        assert weights(source).digest() == DIGEST
        assert len(hub.requested) == requested
        assert refusal(weights(source, "0" * 64).path) == (f"{PLACE}_sha256", "0" * 64)

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ("hf://closed/net/net.pth", huggingface_hub.errors.GatedRepoError),
            ("hf://makers/net/no-file.pth", huggingface_hub.errors.RemoteEntryNotFoundError),
            ("hf://gone/net/net.pth", Exception),
        ],
    )
    def test_each_refusal_of_the_hub_is_one_message(self, hub: Stub, source: str, cause: type[Exception]) -> None:
        error = refused(weights(source).path)
        assert (error.place, error.value) == (PLACE, source)
        assert isinstance(error.__cause__, cause)


class TestModels:
    def folder(self, tmp_path: Path, **others: bytes) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for name, content in {**MODEL, **others}.items():
            (folder / name).write_bytes(content)
        return folder

    def test_missing_models_are_refused(self, cache: Path, tmp_path: Path) -> None:
        sources = (None, "", str(tmp_path / "nowhere"), "./nowhere", "nowhere", "a/b/c", "makers/net", "makers/net@v2")
        for source in (*sources, str(tmp_path)):
            assert refusal(lambda named: model(named).path(), source) == (MODEL_PLACE, source)

    def test_incomplete_models_are_refused(self, cache: Path, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        index = folder / "model.safetensors.index.json"
        parts = {part: f"model-0000{part}-of-00002.safetensors" for part in "12"}
        index.write_text(json.dumps({"weight_map": parts}))
        assert parts["2"] in refused(model(str(folder)).path).hint
        index.unlink()
        (folder / parts["1"]).unlink()
        assert "model.safetensors" in refused(model(str(folder)).path).hint
        # An interrupted download.
        put_into(cache, "makers/net", {"config.json": b"{}"})
        assert refused(model("makers/net").path).value == "makers/net"

    def test_digest_is_of_the_content_in_any_place(self, cache: Path, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        digest = model(str(folder)).digest()
        snapshot = put_into(cache, "makers/net", MODEL)
        assert Path(model("makers/net").path()) == snapshot
        assert model("makers/net").digest() == model(f"makers/net@{COMMIT}").digest() == digest
        for unrelated in ("README.md", "pytorch_model.bin", ".gitattributes"):
            (folder / unrelated).write_bytes(b"...")
        assert model(str(folder), digest[:8].upper()).digest() == digest
        error = refused(model(str(folder), "0" * 8).path)
        assert (error.place, error.value, digest in error.hint) == (f"{MODEL_PLACE}_sha256", "0" * 8, True)
        (folder / "config.json").write_bytes(b"{}\n")
        assert model(str(folder)).digest() != digest

    @pytest.mark.parametrize("pickled", [False, True])
    def test_download_takes_pickles_only_where_there_is_nothing_else(self, hub: Stub, pickled: bool) -> None:
        chosen = {"config.json": b"{}", "pytorch_model.bin" if pickled else "model.safetensors": b"tensors"}
        others = ["README.md", "pytorch_model.bin", "training_args.bin", "onnx/model.onnx", "sub/config.json"]
        hub.respond = partial(as_the_hub, files={**dict.fromkeys(others, b"others"), **chosen})
        source = model("makers/net")
        assert source.problem() is None
        folder = Path(source.path())
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == chosen
        assert sorted(gets(hub)) == sorted(f"/makers/net/resolve/{COMMIT}/{name}" for name in chosen)
        assert source.path() == str(folder)
        assert len(gets(hub)) == 2
