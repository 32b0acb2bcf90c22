"""No file may cause a read elsewhere, or take memory without bound."""

import asyncio
import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from configs.loader import read_config
from grpo_core import services
from grpo_core.errors import InputError
from grpo_core.rollouts.images import decode_stored
from grpo_core.rollouts.streams import MAX_PIXELS
from grpo_core.services import Service, ServiceError
from tasks.prompts.files import read_input_file
from tasks.reports.images import PromptImages, read_images
from tasks.runs.lookup import write_description
from tasks.runs.sources import read_sources
from tasks.runs.trust import remember, uses_of
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import REPOSITORY, refused
from tests.flows.test_stranger import bait
from tests.grpo_core.rewards.stub import Reply, serve
from tests.tasks.reports.made_runs import png


def refusal(action: Callable[[], object]) -> InputError:
    (error,) = refused(action)
    return error


class TestInputFiles:
    @pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
    def test_a_link_to_a_pipe_or_a_device_is_refused_at_once(self, tmp_path: Path, target: str) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "a.png").symlink_to(tmp_path / target)
        error = refusal(lambda: read_input_file(str(tmp_path / "a.png"), place="x"))
        assert (error.place, error.value) == ("x", str(tmp_path / "a.png"))


def bomb_png(width: int, height: int) -> bytes:
    """A file of some bytes that says it is an image of so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


class TestImages:
    """Pillow warns of large images and decodes them; nothing here does."""

    SIZES = ((40_000, 40_000), (8193, 8192), (2**31 - 1, 1))

    @pytest.fixture(autouse=True)
    def undecoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(self: Image.Image) -> None:
            raise AssertionError("it was decoded")

        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)

    @pytest.mark.parametrize(("width", "height"), SIZES)
    def test_a_stored_one_is_refused_with_its_sample(self, width: int, height: int) -> None:
        error = refusal(lambda: decode_stored(bomb_png(width, height), "i000001.p0000.s01"))
        assert error.place == "image of sample i000001.p0000.s01"
        assert f"at most {MAX_PIXELS} pixels" in error.hint

    def test_in_a_report(self, tmp_path: Path) -> None:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        image = pa.array([{"bytes": bomb_png(40_000, 40_000), "path": None}], kind)
        pq.write_table(pa.table({"sample_id": ["s01"], "image": image}), tmp_path / "images-00000.parquet")
        assert refusal(lambda: read_images(tmp_path, ["s01"])).place == "image of sample s01"

    def test_a_target_of_an_inspected_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.png").write_bytes(content := bomb_png(9000, 9000))
        reader = PromptImages(64)
        assert reader.target("a.png", hashlib.sha256(content).hexdigest()) is None
        assert f"at most {MAX_PIXELS} pixels" in reader.missing["a.png"]

    @pytest.mark.parametrize("content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a\1\0\1\0", b""])
    def test_a_stored_one_of_another_format_meets_no_other_decoder(self, content: bytes) -> None:
        assert "not a complete PNG" in refusal(lambda: decode_stored(content, "s")).hint


class TestTablesOfStrangers:
    """What a row names is not fetched, and not looked for anywhere on the machine."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ArtifactStore:
        (tmp_path / "runs" / "made").mkdir(parents=True)
        return ArtifactStore(str(tmp_path / "runs"), "made")

    @pytest.mark.parametrize(
        "uri",
        [
            "{url}/a.png",
            "s3://bucket/a.png",
            "filecache::{url}/a.png",
            "simplecache::file://{folder}/a.png",
            "zip://a.png::{url}/a.zip",
            "file://{folder}/a.png",
            "local://{folder}/a.png",
            "{folder}/a.png",
            "//{folder}/a.png",
            "../outside/a.png",
            "runs/made/../../../outside/a.png",
            "~/a.png",
            "runs/made/link/a.png",
            "data:image/png;base64,AAAA",
            "{folder}/pipe.png",
            "made/pipe.png",
        ],
    )
    def test_a_target_is_missing(
        self, tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, uri: str
    ) -> None:
        (outside := tmp_path / "outside").mkdir()
        content = png((1, 2, 3))
        (outside / "a.png").write_bytes(content)
        (tmp_path / "runs" / "made" / "link").symlink_to(outside)
        for folder in (outside, tmp_path / "made"):
            folder.mkdir(exist_ok=True)
            os.mkfifo(folder / "pipe.png")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(outside))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", TOKEN)
        with bait(tmp_path / "bait") as laid:
            monkeypatch.setenv("AWS_ENDPOINT_URL", laid.url)
            named = uri.format(url=laid.url, folder=outside)
            images = PromptImages(64, store)
            assert images.target(named, hashlib.sha256(content).hexdigest()) is None
            assert images.warnings()[0].startswith(f"1 target image cannot be shown, the first {named}: ")
            assert laid.traces() == []

    @pytest.mark.parametrize("place", ["data.targets", "data.prompts"])
    def test_a_target_in_a_folder_that_the_person_has_trained_with(self, tmp_path: Path, place: str) -> None:
        (folder := tmp_path / "pictures").mkdir()
        (folder / "a.png").write_bytes(content := png((1, 2, 3)))
        (folder / "p.jsonl").touch()
        values = {"data.targets": f"{folder}"} if place == "data.targets" else {"data.prompts": f"{folder}/p.jsonl"}
        config = read_config(
            REPOSITORY / "configs" / "tiny.yaml", ["data.targets=null", *(f"{k}={v}" for k, v in values.items())]
        )
        store = ArtifactStore(str(tmp_path / "runs"), "made")
        write_description(store, {}, yaml.safe_dump(config.model_dump(mode="json")).encode())
        uri, sha256 = str(folder / "a.png"), hashlib.sha256(content).hexdigest()
        assert PromptImages(64, store).target(uri, sha256) is None
        remember(uses_of(config))
        assert PromptImages(64, store).target(uri, sha256) is not None
        assert PromptImages(64, store).target(f"{folder}/../pictures-2/b.png", sha256) is None
        # The folder was elsewhere when the run was made.
        assert PromptImages(64, store).target("/before/pictures/a.png", sha256) is not None
        assert PromptImages(64, store).target("/before/pictures/a.png", "0" * 64) is None
        (tmp_path / "b.png").write_bytes(content)
        assert PromptImages(64, store).target("/before/pictures/../b.png", sha256) is None

    @pytest.mark.parametrize("digest", ["../../outside/secret", "/etc/hostname", "", "A" * 64])
    def test_a_source_is_named_by_its_digest_alone(self, store: ArtifactStore, digest: str) -> None:
        assert refusal(lambda: read_sources(store, {digest: "sample s"})).value == "no sha256"


class TestPackedAnswers:
    """An answer of a few kilobytes can unpack to gigabytes."""

    @pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "raw deflate"])
    def test_is_unpacked_up_to_the_limit(self, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(services, "MAX_ANSWER_BYTES", 10_000)
        assert ask(packed(b'"' + b"x" * 9000 + b'"', encoding), encoding) == "x" * 9000
        with pytest.raises(InputError, match="over 10000 bytes"):
            ask(packed(b'"' + b"x" * 10_000_000 + b'"', encoding), encoding)

    @pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd", "deflate, gzip", "unknown"])
    def test_is_refused_where_it_is_packed_otherwise(self, encoding: str) -> None:
        with pytest.raises(InputError) as caught:
            ask(packed(packed(b'"a"', "gzip"), "gzip"), encoding)
        assert caught.value.value == f"Content-Encoding {encoding}"

    def test_a_broken_one_may_be_better_at_the_next_attempt(self) -> None:
        with pytest.raises(ServiceError, match="cannot be unpacked"):
            ask(b"\x1f\x8bnothing", "gzip")


def packed(content: bytes, encoding: str) -> bytes:
    windows = {"gzip": 31, "x-gzip": 31, "deflate": 15, "raw deflate": -15}[encoding]
    packer = zlib.compressobj(wbits=windows)
    return packer.compress(content) + packer.flush()


def ask(body: bytes, encoding: str) -> object:
    with serve() as stub:
        stub.script(Reply(body, headers={"Content-Encoding": encoding.removeprefix("raw ")}))
        answer = asyncio.run(Service(stub.url, 30.0, None, "rewards.remote").request("/v1/describe"))
        assert stub.requested[0].headers["Accept-Encoding"] == "identity"
        return answer


TOKEN = "sk-3141592653589793-not-for-files"
