"""`grpo init`: whatever it writes passes the checks of a run, and trains."""

import asyncio
import io
import itertools
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.command_line.options import ask_for_init
from flows.init import CONFIGS, InitRequest, Kind, write_folder
from flows.preflight.inputs import run_checks
from grpo_core.errors import InputError
from tests.flows.conftest import Runs, refused

REWARDS = {
    "image": ("own", "jpeg", "sharpness"),
    "diffusers": ("own", "jpeg"),
    "text": ("own", "format"),
    "vision": ("own", "format"),
}
MODELS = {
    "image": "data/models/tiny-glm-image",
    "diffusers": "data/models/tiny-sd3",
    "text": "data/models/tiny-text",
    "vision": "data/models/tiny-vision",
}
KINDS = {"image": "glm_image", "diffusers": "diffusers", "text": "causal_lm", "vision": "vision_lm"}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of two prompts, and two images for them."""
    (tmp_path / "mine.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "images").mkdir()
    for index in range(2):
        Image.new("RGB", (64, 64), "red").save(tmp_path / "images" / f"{index:05d}.png")
    return tmp_path


def write(folder: Path, **given: Any) -> Path:
    write_folder(InitRequest(folder=str(folder), **given))
    return folder / "config.yaml"


@pytest.mark.parametrize("kind", MODELS)
def test_every_combination_can_be_trained(own: Path, kind: str) -> None:
    choices = itertools.product(REWARDS[kind], (None, str(own / "mine.txt")), (None, MODELS[kind]))
    for number, (reward, prompts, model) in enumerate(choices):
        config = read_config(write(own / f"{kind}-{number}", kind=kind, reward=reward, prompts=prompts, model=model))
        assert config.run.name == f"{kind}-{number}"
        assert len(run_checks(config).usable("data")[0].prompts) == (2 if prompts else 12)
        assert bool(config.evaluate.sets) == (prompts is None)


@pytest.mark.parametrize("kind", MODELS)
def test_the_configurations_for_models_of_full_size_are_valid(kind: Kind) -> None:
    assert read_config(CONFIGS / f"{kind}.yaml").policy.kind == KINDS[kind]


def test_held_out_prompts_that_are_the_training_prompts_are_refused(own: Path) -> None:
    (own / "link.txt").symlink_to(own / "mine.txt")
    for heldout in (own / "mine.txt", own / "images" / ".." / "mine.txt", own / "link.txt"):
        with pytest.raises(InputError) as refusal:
            write(own / "run", prompts=str(own / "mine.txt"), heldout=str(heldout))
        assert [(each.place, each.value) for each in refusal.value.errors] == [("--heldout", str(heldout))]
        assert not (own / "run").exists()


def test_commands_name_a_folder_with_a_blank_as_a_shell_reads_it(own: Path) -> None:
    folder = own / "sp dir" / "f"
    result = CliRunner().invoke(application, ["init", str(folder), "--kind", "text"])
    assert shlex.split(result.stderr.splitlines()[-1])[3] == f"{folder}/config.yaml,"
    comment = (folder / "config.yaml").read_text().splitlines()[1]
    assert shlex.split(comment)[1:] == ["grpo", "doctor", f"{folder}/config.yaml"]


def test_an_own_function_is_named_by_its_file(own: Path) -> None:
    (own / "mine.py").write_text("def redness(images, **columns):\n    return [1.0 for image in images]\n")
    (reward,) = read_config(write(own / "run", reward=f"{own / 'mine.py'}:redness")).rewards
    assert (reward.reward, reward.settings["function"]) == ("function", f"{own / 'mine.py'}:redness")
    assert reward.label == "redness"


def example(folder: Path, kind: Kind) -> Callable[..., list[float]]:
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
    scores = example(tmp_path / "image", "image")(["a red circle in the center"] * 2, images)
    assert scores == pytest.approx([1, 1 / 3])
    texts = ["aelp", " aelp\n", "", "aexp"]
    assert example(tmp_path / "text", "text")(["sort the letters of pale"] * 4, texts) == [1, 1, 0, 0.75]
    boxes = ["4 8 20 24", "[4, 8, 20, 14]", "4 8 20", "50 60 70 80"]
    assert example(tmp_path / "vision", "vision")(boxes, [[4, 8, 20, 24]] * 4) == pytest.approx([1, 0.9, 0, 0])


def text_model(folder: Path, positions: int) -> str:
    """A text model of one's own that reads and writes so many ids."""
    shutil.copytree(MODELS["text"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return str(folder)


@pytest.mark.parametrize(("positions", "length"), [(256, 128), (384, 192), (32768, 256)])
def test_completions_have_room_in_the_model(tmp_path: Path, positions: int, length: int) -> None:
    file = write(tmp_path / "run", kind="text", model=text_model(tmp_path / "model", positions))
    assert read_config(file).rollout.max_completion_length == length


def test_defaults_that_a_model_does_not_take_can_be_changed_in_the_file(tmp_path: Path) -> None:
    """The tiny model has positions for images of up to 256 pixels a side, and the default is 512."""
    shutil.copytree(MODELS["diffusers"], tmp_path / "model")
    file = tmp_path / "run" / "config.yaml"
    (error,) = refused(lambda: write(tmp_path / "run", kind="diffusers", model=str(tmp_path / "model")))
    assert (error.place, error.value) == ("rollout.width and height", "512x512")
    assert str(file) in error.hint
    run_checks(read_config(file, ["rollout.width=64", "rollout.height=64"]))


def test_the_first_targets_are_shown(own: Path) -> None:
    given = ["--prompts", str(own / "mine.txt"), "--targets", str(own / "images"), "--reward", "r2"]
    result = CliRunner().invoke(application, ["init", str(own / "run"), *given])
    assert result.exit_code == 0
    assert "data.targets: a red circle -> 00000.png; a blue square -> 00001.png\n" in result.stderr


def test_own_images_are_targets(own: Path) -> None:
    config = read_config(write(own / "run", prompts=str(own / "mine.txt"), targets=str(own / "images"), reward="r2"))
    assert [target is not None for target in run_checks(config).usable("data")[0].targets] == [True, True]


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
        ({"kind": "text", "reward": "jpeg"}, "--reward"),
        ({"model": "./nowhere"}, "--model"),
        ({"reward": "nowhere.py:score"}, "--reward"),
        ({"targets": "images"}, "--targets"),
        ({"heldout_targets": "images"}, "--heldout-targets"),
        ({"heldout": "missing.txt"}, "--heldout"),
        ({"kind": "text", "prompts": "mine.txt", "targets": "images"}, "--targets"),
    ],
)
def test_what_cannot_be_used_leaves_nothing_behind(tmp_path: Path, given: dict[str, Any], place: str) -> None:
    errors = refused(lambda: write(tmp_path / "a" / "b", **given))
    assert place in [error.place for error in errors]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    result = CliRunner().invoke(application, ["init", str(tmp_path), "--kind", "text"])
    assert result.exit_code == 2
    assert "DIR" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_questions_are_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kind, model, prompts, held-out prompts, reward; the first answer is none of the choices.
    monkeypatch.setattr("sys.stdin", io.StringIO("video\ntext\n\nmine.txt\nnew.txt\nformat\n"))
    request = ask_for_init(InitRequest(folder="x"))
    assert request == InitRequest(folder="x", kind="text", prompts="mine.txt", heldout="new.txt", reward="format")


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_what_it_writes_trains(kind: str, empty: Runs, tmp_path: Path) -> None:
    from flows.training.train import train

    file = write(tmp_path / "first", kind=kind)
    summary = asyncio.run(train(read_config(file, [f"storage.root={empty.root}", "run.iterations=2"])))
    assert summary.iterations == 2
    assert summary.heldout_after != summary.heldout_before
