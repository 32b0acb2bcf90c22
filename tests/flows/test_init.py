"""`grpo init`: whatever it writes passes the checks of a run, and trains."""

import asyncio
import io
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from PIL import Image
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.command_line.options import ask_for_init
from flows.init.starting_point import CONFIGS, choose_name, shipped_names
from flows.init.write_folder import write_folder
from flows.preflight.inputs import run_checks
from flows.preflight.machine import describe_work
from flows.preflight.prompts import check_prompts, read_prompt_files
from flows.requests import InitRequest
from grpo_core.errors import InputError
from grpo_core.pipeline_files import PolicyKind
from tests.flows.conftest import Runs, refused
from tests.grpo_core.rewards.stub import as_a_gated_repository, reach, serve

MODELS: dict[PolicyKind, str] = {
    "glm_image": "data/models/tiny-glm-image",
    "diffusers": "data/models/tiny-sd3",
    "causal_lm": "data/models/tiny-text",
    "vision_lm": "data/models/tiny-vision",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of two prompts, and two images for them."""
    (tmp_path / "mine.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "images").mkdir()
    for index in range(2):
        Image.new("RGB", (64, 64), "red").save(tmp_path / "images" / f"{index:05d}.png")
    return tmp_path


def places(call: Callable[[], object]) -> list[str]:
    return [error.place for error in refused(call)]


@pytest.fixture
def hub_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Mapping[str, bytes]], None]]:
    """Opens the Hub with someone/model of these files, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with serve() as stub:

        def open_hub(files: Mapping[str, bytes]) -> None:
            stub.respond = partial(as_a_gated_repository, files)
            reach(stub, monkeypatch)

        yield open_hub
    huggingface_hub.close_session()


def write(folder: Path, **given: Any) -> Path:
    write_folder(InitRequest(folder=str(folder), **given))
    return folder / "config.yaml"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, "nothing") for kind in MODELS),
        ("glm_image", "prompts, model and reward"),
        ("diffusers", "prompts"),
        ("causal_lm", "model"),
        ("vision_lm", "prompts, model and reward"),
    ],
)
def test_every_combination_can_be_trained(own: Path, kind: PolicyKind, given: str) -> None:
    prompts = str(own / "mine.txt") if "prompts" in given else None
    known = {"model": MODELS[kind]} if "model" in given else {"kind": kind}
    known |= {"reward": "format" if kind.endswith("_lm") else "jpeg"} if "reward" in given else {}
    config = read_config(write(own / "run", prompts=prompts, **known))
    assert (config.run.name, config.policy.kind) == ("run", kind)
    assert Path(config.policy.model).samefile(MODELS[kind])
    assert len(run_checks(config).usable("data")[0].prompts) == (2 if prompts else 12)
    assert bool(config.evaluate.sets) == (prompts is None)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_configuration_is_copied_whole(own: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its comments, wherever it is written; the name of the run apart it is the same configuration."""
    shipped = CONFIGS / f"{name}.yaml"
    monkeypatch.chdir(own)
    written = write(own / "run", template=name)
    text = written.read_text()
    assert text.count("#") >= shipped.read_text().count("#") + 4
    config = read_config(written)
    monkeypatch.chdir(CONFIGS.parent)
    expected = read_config(shipped, ["run.name=run"]).model_dump(mode="json")
    found = json.loads(json.dumps(config.model_dump(mode="json")).replace(f"{CONFIGS.parent}/", ""))
    assert found == expected
    monkeypatch.chdir(own)
    assert list(check_prompts(config, read_prompt_files(config))) == []


FULL_SIZE = [name for name in shipped_names() if name not in ("glm_image_mix", "medground")]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_own_names_take_the_places_in_every_shipped_configuration(own: Path, name: str) -> None:
    """Of the file, all that no option names stays; what says how it samples and trains among it."""
    for data in ("table", "heldout"):
        (own / f"{data}.jsonl").write_text('{"prompt": "a circle", "image": "images/00000.png", "answer": "a"}\n')
    rewards = {"causal_lm": "answer", "vision_lm": "answer"}
    shipped = read_config(CONFIGS / f"{name}.yaml")
    table, reward = str(own / "table.jsonl"), rewards.get(shipped.policy.kind, "sharpness")
    given = {"model": shipped.policy.model, "prompts": table, "heldout": str(own / "heldout.jsonl"), "reward": reward}
    config = read_config(write(own / "run", template=name, **given))
    assert (config.data.prompts, config.evaluate.prompts) == (table, str(own / "heldout.jsonl"))
    assert [each.reward for each in config.rewards] == [reward]
    assert (
        config.evaluate.model_copy(
            update={"prompts": shipped.evaluate.prompts, "targets": shipped.evaluate.targets}
            | {"target_column": shipped.evaluate.target_column}
        )
        == shipped.evaluate
    )
    for section in ("policy", "rollout", "update", "advantages", "placement", "guardrails"):
        assert getattr(config, section) == getattr(shipped, section)


@pytest.mark.parametrize("name", ["glm_image_mix", "medground"])
def test_several_data_sets_are_changed_in_the_file(own: Path, name: str) -> None:
    assert places(lambda: write(own / "run", template=name, prompts=str(own / "mine.txt"))) == ["--prompts"]
    assert not (own / "run").exists()


def described(folder: Path, **files: object) -> str:
    """A folder with the description of a model, and no weights."""
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "gpu", "name"),
    [
        ({"model_index": {"_class_name": "FluxPipeline"}}, False, "flux1_dev"),
        ({"model_index": {"_class_name": "FluxKontextPipeline"}}, False, "flux_kontext"),
        ({"model_index": {"_class_name": "StableDiffusion3Pipeline"}}, False, "sd35_medium"),
        ({"model_index": {"_class_name": "QwenImagePipeline"}}, False, "qwen_image"),
        ({"model_index": {"_class_name": "QwenImageEditPlusPipeline"}}, False, "qwen_image_edit"),
        ({"model_index": {"_class_name": "SanaPipeline"}}, False, "sd35_medium"),
        ({"model_index": {"_class_name": "GlmImagePipeline"}}, False, "glm_image_80gb"),
        ({"config": {"model_type": "qwen2"}}, True, "text_7b"),
        ({"config": {"model_type": "qwen2"}}, False, "text_laptop"),
        ({"config": {"model_type": "qwen2_5_vl", "vision_config": {}}}, False, "vision_2b"),
        ({"config": {"model_type": "llava"}, "preprocessor_config": {}}, False, "vision_2b"),
    ],
)
def test_the_models_files_choose_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, object], gpu: bool, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert choose_name(described(tmp_path / "model", **files)) == name


def test_a_model_of_the_hub_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_of: Callable[[Mapping[str, bytes]], None]
) -> None:
    """Its description is downloaded, and no weights; offline one can name a configuration."""
    hub_of({path.name: path.read_bytes() for path in Path(MODELS["causal_lm"]).iterdir()})
    config = read_config(write(tmp_path / "run", model="someone/model"))
    assert (config.policy.kind, config.policy.model) == ("causal_lm", "someone/model")
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (error,) = refused(lambda: write(tmp_path / "other", model="someone/other"))
    assert (error.place, "--from" in error.hint) == ("--model", True)
    assert read_config(write(tmp_path / "named", model="someone/other", template="text_7b")).policy.lora is not None


@pytest.mark.parametrize(
    ("rows", "in_order"),
    [
        ("caption,file\na red circle,00001.png\na blue square,00000.png\n", False),
        ("prompt\na red circle\na blue square\n", True),
    ],
)
def test_a_column_with_the_names_of_all_targets_pairs_them_and_without_one_their_numbers_do(
    own: Path, rows: str, in_order: bool
) -> None:
    (own / "mine.csv").write_text(rows)
    given = {"prompts": str(own / "mine.csv"), "targets": str(own / "images"), "reward": "r2"}
    (known,) = run_checks(read_config(write(own / "run", **given))).usable("data")
    by_number = ["00000.png", "00001.png"]
    assert [Path(target.uri).name for target in known.targets if target is not None] == (
        by_number if in_order else by_number[::-1]
    )


def test_a_target_column_is_an_option(own: Path) -> None:
    """Its files may stand beside the prompts, and two columns may name files."""
    rows = "caption,before,after\nred,00000.png,00001.png\nblue,00001.png,00000.png\n"
    (own / "images" / "mine.csv").write_text(rows)
    given = {"prompts": str(own / "images" / "mine.csv"), "reward": "r2"}
    (error,) = refused(lambda: write(own / "none", **given, targets=str(own / "images")))
    assert (error.place, "before, after" in error.hint) == ("--target-column", True)
    file = write(own / "run", **given, target_column="after")
    (known,) = run_checks(read_config(file)).usable("data")
    assert [Path(target.uri).name for target in known.targets if target is not None] == ["00001.png", "00000.png"]


def test_the_command_shows_the_first_targets_and_names_its_folder_as_a_shell_reads_it(own: Path) -> None:
    folder = own / "sp dir" / "f"
    given = ["--prompts", str(own / "mine.txt"), "--targets", str(own / "images"), "--reward", "r2"]
    result = CliRunner().invoke(application, ["init", str(folder), *given])
    assert "data.targets: a red circle -> 00000.png; a blue square -> 00001.png\n" in result.stderr
    assert shlex.split(result.stderr.splitlines()[-1])[3] == f"{folder}/config.yaml,"
    comment = (folder / "config.yaml").read_text().splitlines()[1]
    assert shlex.split(comment)[1:] == ["grpo", "doctor", f"{folder}/config.yaml"]


def test_the_work_is_said_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 iterations of 4 x 8 completions are 640; 40 of 6 x 12 images 2,880."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    laptop, tiny = (read_config(CONFIGS / f"{name}.yaml") for name in ("text_laptop", "tiny_sd3"))
    assert "20 iterations sample 640 completions of at most 64 tokens" in describe_work(laptop)
    assert "40 iterations sample 2,880 images of 64x64, each with 8 steps" in describe_work(tiny)
    assert "without a GPU" in describe_work(laptop)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False, "avx512_fp16": True})
    for dtype, slow in (("float32", False), ("bfloat16", True), ("float16", False)):
        other = laptop.model_copy(update={"policy": laptop.policy.model_copy(update={"dtype": dtype})})
        assert ("instructions for" in describe_work(other)) == slow
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "without a GPU" not in describe_work(laptop)


def test_held_out_prompts_that_are_the_training_prompts_are_refused(own: Path) -> None:
    (own / "link.txt").symlink_to(own / "mine.txt")
    for heldout in (own / "mine.txt", own / "images" / ".." / "mine.txt", own / "link.txt"):
        with pytest.raises(InputError) as refusal:
            write(own / "run", prompts=str(own / "mine.txt"), heldout=str(heldout))
        assert [(each.place, each.value) for each in refusal.value.errors] == [("--heldout", str(heldout))]
        assert not (own / "run").exists()


def test_an_own_function_is_named_by_its_file(own: Path) -> None:
    (own / "mine.py").write_text("def redness(images, **columns):\n    return [1.0 for image in images]\n")
    (reward,) = read_config(write(own / "run", reward=f"{own / 'mine.py'}:redness")).rewards
    assert (reward.reward, reward.settings["function"]) == ("function", f"{own / 'mine.py'}:redness")
    assert reward.label == "redness"


def example(folder: Path, kind: PolicyKind) -> Callable[..., list[float]]:
    """The function of the reward that is written."""
    write(folder, kind=kind)
    written: dict[str, Any] = {}
    exec((folder / "reward.py").read_text(), written)
    (reward,) = read_config(folder / "config.yaml").rewards
    function: Callable[..., list[float]] = written[str(reward.settings["function"]).rpartition(":")[2]]
    return function


def test_the_examples_reward_what_their_prompts_ask_for(tmp_path: Path) -> None:
    """Red differs from blue by two channels of three; of "pale" and "aelp" three of four letters are in order."""
    images = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    for image in images:
        # What is beside the middle does not count.
        image.paste("white", (0, 0, 3, 9))
    scores = example(tmp_path / "image", "glm_image")(["a red circle in the center"] * 2, images)
    assert scores == pytest.approx([1, 1 / 3])
    texts = ["aelp", " aelp\n", "", "aexp"]
    assert example(tmp_path / "text", "causal_lm")(["sort the letters of pale"] * 4, texts) == [1, 1, 0, 0.75]
    boxes = ["4 8 20 24", "[4, 8, 20, 14]", "4 8 20", "50 60 70 80"]
    assert example(tmp_path / "vision", "vision_lm")(boxes, [[4, 8, 20, 24]] * 4) == pytest.approx([1, 0.9, 0, 0])


@pytest.mark.parametrize(("positions", "length"), [(96, 48), (32768, 64)])
def test_completions_have_room_in_the_model(tmp_path: Path, positions: int, length: int) -> None:
    model = Path(shutil.copytree(MODELS["causal_lm"], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    file = write(tmp_path / "run", model=str(model))
    assert read_config(file).rollout.max_completion_length == length


def test_defaults_that_a_model_does_not_take_can_be_changed_in_the_file(tmp_path: Path) -> None:
    """The tiny model has positions for images of up to 256 pixels a side, and the default is 512."""
    shutil.copytree(MODELS["diffusers"], tmp_path / "model")
    file = tmp_path / "run" / "config.yaml"
    (error,) = refused(lambda: write(tmp_path / "run", model=str(tmp_path / "model")))
    assert (error.place, error.value) == ("rollout.width and height", "512x512")
    assert str(file) in error.hint
    run_checks(read_config(file, ["rollout.width=64", "rollout.height=64"]))


def test_own_prompts_are_held_out(own: Path) -> None:
    """With targets of their own, beside examples to train on, and not without what a reward compares them with."""
    (own / "new.txt").write_text("a red heart\n")
    images, prompts, heldout = str(own / "images"), str(own / "mine.txt"), str(own / "new.txt")
    (own / "new").mkdir()
    Image.new("RGB", (64, 64), "red").save(own / "new" / "0.png")
    given = {"prompts": prompts, "targets": images, "reward": "r2", "heldout": heldout}
    files = run_checks(read_config(write(own / "run", **given, heldout_targets=str(own / "new"))))
    (known,) = files.usable("evaluate")
    assert [prompt.text for prompt in known.prompts] == ["a red heart"]
    assert [target and Path(target.uri).parent.name for target in known.targets] == ["new"]
    mixed = run_checks(read_config(write(own / "mixed", heldout=heldout)))
    assert [len(mixed.usable(part)[0].prompts) for part in ("data", "evaluate")] == [12, 1]
    assert not (own / "mixed" / "heldout.txt").exists()
    assert any("evaluate" in error.hint for error in refused(lambda: write(own / "bare", **given)))


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"prompts": "missing.txt"}, "--prompts"),
        ({"reward": "jpg"}, "--reward"),
        ({"reward": "r2"}, "--reward"),
        ({"kind": "causal_lm", "reward": "jpeg"}, "--reward"),
        ({"model": "./nowhere"}, "--model"),
        ({"reward": "nowhere.py:score"}, "--reward"),
        ({"targets": "images"}, "--targets"),
        ({"heldout_targets": "images"}, "--heldout-targets"),
        ({"heldout": "missing.txt"}, "--heldout"),
        ({"template": "flux2"}, "--from"),
        ({"model": MODELS["causal_lm"], "template": "tiny"}, "--model"),
        ({"model": MODELS["causal_lm"], "kind": "causal_lm"}, "--kind"),
        ({"target_column": "file"}, "--target-column"),
        ({"kind": "causal_lm", "prompts": "mine.txt", "targets": "images"}, "--targets"),
    ],
)
def test_what_cannot_be_used_leaves_nothing_behind(tmp_path: Path, given: dict[str, Any], place: str) -> None:
    errors = refused(lambda: write(tmp_path / "a" / "b", **given))
    assert place in [error.place for error in errors]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    result = CliRunner().invoke(application, ["init", str(tmp_path), "--kind", "causal_lm"])
    assert result.exit_code == 2
    assert "DIR" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_questions_are_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    # Model, kind, prompts, held-out prompts, reward; the second answer is none of the choices.
    monkeypatch.setattr("sys.stdin", io.StringIO("\nvideo\ncausal_lm\nmine.txt\nnew.txt\nformat\n"))
    request = ask_for_init(InitRequest(folder="x"))
    assert request == InitRequest(folder="x", kind="causal_lm", prompts="mine.txt", heldout="new.txt", reward="format")
    # With a model nothing is left to ask about its kind.
    monkeypatch.setattr("sys.stdin", io.StringIO("a/b\n\n\n\n"))
    assert ask_for_init(InitRequest(folder="x")) == InitRequest(folder="x", model="a/b", reward="own")


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_what_it_writes_trains(kind: PolicyKind, empty: Runs, tmp_path: Path) -> None:
    from flows.training.train import train

    file = write(tmp_path / "first", kind=kind)
    summary = asyncio.run(train(read_config(file, [f"storage.root={empty.root}", "run.iterations=2"])))
    assert summary.iterations == 2
    assert summary.heldout_after != summary.heldout_before
