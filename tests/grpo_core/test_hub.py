"""Downloads from the Hub: exactly the files that a model is loaded from, and one message for each failure."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import pytest
from diffusers import DiffusionPipeline
from huggingface_hub.utils import filter_repo_objects

from grpo_core.errors import InputError
from grpo_core.hub import cached_folder, download_command, fetch, loaded_files, one_message, plan_download
from grpo_core.pipeline_files import INDEX_FILE
from tests.grpo_core.rewards.stub import COMMIT, Asked, Reply, Stub, as_a_gated_repository, reach, serve

WEIGHTS = (".safetensors", ".bin", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite")


@dataclass(frozen=True)
class Listing:
    """The files of a repository as it was published: those that are loaded, and the others."""

    loaded: str
    others: str
    index: Mapping[str, object] | None = None

    @property
    def names(self) -> list[str]:
        return sorted([*self.loaded.split(), *self.others.split()])

    @property
    def files(self) -> dict[str, bytes]:
        """Each with its name for a content, except the index."""
        return {name: json.dumps(self.index).encode() if name == INDEX_FILE else name.encode() for name in self.names}


def shards(start: str, count: int) -> str:
    names = [f"{start}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return " ".join([*names, f"{start}.safetensors.index.json"])


CLIP = "{0}/merges.txt {0}/special_tokens_map.json {0}/tokenizer_config.json {0}/vocab.json"
T5 = "{0}/special_tokens_map.json {0}/spiece.model {0}/tokenizer.json {0}/tokenizer_config.json"
SD35 = Listing(
    f"model_index.json scheduler/scheduler_config.json text_encoder/config.json text_encoder/model.safetensors "
    f"text_encoder_2/config.json text_encoder_2/model.safetensors text_encoder_3/config.json "
    f"{shards('text_encoder_3/model', 2)} {CLIP.format('tokenizer')} {CLIP.format('tokenizer_2')} "
    f"{T5.format('tokenizer_3')} transformer/config.json transformer/diffusion_pytorch_model.safetensors "
    f"vae/config.json vae/diffusion_pytorch_model.safetensors",
    ".gitattributes LICENSE.md README.md sd3.5_medium.safetensors sd3.5_medium_demo.jpg text_encoders/README.md "
    "text_encoders/clip_g.safetensors text_encoders/clip_l.safetensors text_encoders/t5xxl_fp16.safetensors "
    "text_encoders/t5xxl_fp8_e4m3fn.safetensors text_encoder/model.fp16.safetensors "
    "text_encoder_3/model.fp16-00001-of-00002.safetensors text_encoder_3/model.fp16-00002-of-00002.safetensors "
    "text_encoder_3/model.safetensors.index.fp16.json",
    {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        **{f"text_encoder{each}": ["transformers", "CLIPTextModelWithProjection"] for each in ("", "_2")},
        "text_encoder_3": ["transformers", "T5EncoderModel"],
        **{f"tokenizer{each}": ["transformers", "CLIPTokenizer"] for each in ("", "_2")},
        "tokenizer_3": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "image_encoder": [None, None],
    },
)
GLM_IMAGE = Listing(
    f"model_index.json processor/chat_template.jinja processor/processor_config.json processor/tokenizer.json "
    f"processor/tokenizer_config.json scheduler/scheduler_config.json text_encoder/config.json "
    f"text_encoder/model.safetensors tokenizer/added_tokens.json tokenizer/tokenizer_config.json "
    f"transformer/config.json {shards('transformer/diffusion_pytorch_model', 3)} vae/config.json "
    f"vae/diffusion_pytorch_model.safetensors vision_language_encoder/config.json "
    f"vision_language_encoder/generation_config.json {shards('vision_language_encoder/model', 5)}",
    ".gitattributes LICENSE README.md assets/show.jpg",
    {
        "_class_name": "GlmImagePipeline",
        "processor": ["transformers", "GlmImageProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "ByT5Tokenizer"],
        "transformer": ["diffusers", "GlmImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "vision_language_encoder": ["transformers", "GlmImageForConditionalGeneration"],
    },
)
TOKENIZER = "tokenizer.json tokenizer_config.json"
LLAMA = Listing(
    f"config.json generation_config.json {shards('model', 4)} special_tokens_map.json {TOKENIZER}",
    ".gitattributes LICENSE README.md USE_POLICY.md original/consolidated.00.pth original/params.json "
    "original/tokenizer.model",
)
MISTRAL = Listing(
    f"config.json generation_config.json {shards('model', 3)} params.json tokenizer.model {TOKENIZER}",
    ".gitattributes README.md consolidated.safetensors consolidated.safetensors.index.json",
)
GPT2 = Listing(
    f"config.json generation_config.json merges.txt model.safetensors {TOKENIZER} vocab.json",
    "README.md 64.tflite flax_model.msgpack onnx/config.json onnx/decoder_model.onnx pytorch_model.bin rust_model.ot "
    "tf_model.h5 model.fp16.safetensors model-q4_k_m.gguf",
)
PICKLED = Listing(
    "config.json pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin pytorch_model.bin.index.json "
    "tokenizer.model",
    "README.md tf_model.h5 training_args.bin",
)
PIPELINES = {"sd35": SD35, "glm-image": GLM_IMAGE}
MODELS = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2, "pickled": PICKLED}
LISTINGS = {**PIPELINES, **MODELS}


def refusing(status: int, code: str) -> Callable[[Asked], Reply]:
    return lambda requested: Reply(b"", status, {"X-Error-Code": code} if code else {})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stub]:
    """The Hub, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serve() as stub:
        reach(stub, monkeypatch)
        yield stub
    huggingface_hub.close_session()


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", LISTINGS)
def test_exactly_the_wanted_files_are_downloaded_once(hub: Stub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    listing, wanted = LISTINGS[name], sorted(LISTINGS[name].loaded.split())
    hub.respond = partial(as_a_gated_repository, listing.files)
    assert cached_folder("someone/model") is None
    told: list[str] = []
    folder = fetch("someone/model", None, report=lambda download: told.append(str(download)))
    assert files_below(folder) == wanted
    assert [line.rpartition(" in ")[2] for line in told] == [f"{len(wanted) - (listing.index is not None)} files"]
    assert fetch("someone/model", None, report=lambda download: told.append("again")) == folder
    assert told[1:] == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cached_folder("someone/model") == fetch("someone/model", None) == folder
    (folder / next(each for each in wanted if each.endswith(WEIGHTS))).unlink()
    assert cached_folder("someone/model") is None


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_needs_no_other_file(hub: Stub, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path) -> None:
    """What its own download takes is in our list, and no weights are in ours alone."""
    asks = huggingface_hub.HfApi(endpoint=hub.url).model_info
    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.model_info", asks)
    hub.respond = partial(as_a_gated_repository, PIPELINES[name].files)
    theirs = files_below(Path(DiffusionPipeline.download("someone/model", cache_dir=tmp_path / "theirs")))
    ours = PIPELINES[name].loaded.split()
    assert set(theirs) <= {*ours}
    assert not [file for file in {*ours} - {*theirs} if file.endswith(WEIGHTS)]


@pytest.mark.parametrize("name", [name for name in LISTINGS if name != "pickled"])
def test_the_command_takes_the_same_weights(name: str) -> None:
    listing, words = LISTINGS[name], shlex.split(download_command("someone/model", "v2"))
    given = {option: [b for a, b in pairwise(words) if a == option] for option in words}
    patterns = {"allow_patterns": given["--include"], "ignore_patterns": given["--exclude"]}
    taken = set(filter_repo_objects(listing.names, **patterns))
    assert words[:5] == ["hf", "download", "someone/model", "--revision", "v2"]
    assert {*listing.loaded.split()} <= taken
    assert not [file for file in taken - {*listing.loaded.split()} if file.endswith(WEIGHTS)]


def test_what_describes_a_model_is_there_before_its_weights(hub: Stub) -> None:
    hub.respond = partial(as_a_gated_repository, LLAMA.files)
    folder = plan_download("someone/model").run(weights=False)
    assert files_below(folder) == sorted(name for name in LLAMA.loaded.split() if not name.endswith(WEIGHTS))
    assert cached_folder("someone/model") is None


def test_a_cache_without_a_list_of_files_is_taken_if_it_has_weights(tmp_path: Path, hub: Stub) -> None:
    root = tmp_path / "hub" / "models--someone--model"
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots" / COMMIT / "config.json").write_text("{}")
    assert cached_folder("someone/model") is None
    (root / "snapshots" / COMMIT / "model.safetensors").write_text("")
    assert cached_folder("someone/model") == root / "snapshots" / COMMIT


def test_names_of_other_files_are_no_patterns() -> None:
    assert loaded_files(["model[1].json", "a/b.json", "model.safetensors"]) == ["model[1].json", "model.safetensors"]


LOGIN = ("hf auth login", "HF_TOKEN")


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (refusing(401, "GatedRepo"), ("{page}", "consent", *LOGIN)),
        (refusing(403, "GatedRepo"), ("{page}", "consent", *LOGIN)),
        (refusing(401, "RepoNotFound"), ("{page}", *LOGIN)),
        (refusing(404, "RepoNotFound"), ("{page}", *LOGIN)),
        (refusing(401, ""), ("{page}", *LOGIN)),
        (refusing(403, ""), ("{page}", *LOGIN)),
        (refusing(404, "RevisionNotFound"), ("revision",)),
        (refusing(500, ""), ("network",)),
        (lambda requested: Reply(drop=True), ("network",)),
        (None, ("HF_HUB_OFFLINE", "`hf download someone/model`")),
    ],
)
def test_each_failure_says_what_to_do(
    hub: Stub, monkeypatch: pytest.MonkeyPatch, respond: Callable[[Asked], Reply] | None, words: tuple[str, ...]
) -> None:
    if respond is None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        hub.respond = respond
    with pytest.raises(InputError) as refusal, one_message("policy.model", "someone/model", "someone/model"):
        fetch("someone/model", None)
    assert (refusal.value.place, refusal.value.value) == ("policy.model", "someone/model")
    for word in words:
        assert word.format(page=f"{hub.url}/someone/model") in refusal.value.hint


def test_a_gated_repository_is_refused_before_the_download(hub: Stub) -> None:
    hub.respond = partial(as_a_gated_repository, SD35.files, consent=False)
    with pytest.raises(InputError, match="consent"), one_message("policy.model", "someone/model", "someone/model"):
        plan_download("someone/model")
