"""Trainings whose prompts have images: the shipped one learns, MedGround-R1's reads its data, killed and replayed."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.loader import read_config
from data.recipes.edits import choose_edits, split_edits, write_edit_file
from data.recipes.grounding import PROMPT_FILES, png_of, split_scenes
from data.recipes.vision import TinyVisionRecipe
from flows import train
from flows.inspect_run import inspect_run
from flows.preflight.inputs import check_inputs
from flows.preflight.prompts import read_prompt_files
from grpo_core.rewards.registry import build_reward
from grpo_core.rollouts.images import SourceImage
from grpo_core.update.optimizer import PolicyOptimizer
from tests.flows.conftest import REPOSITORY, TINY_BOTH, Runs, Start, refused, sha256_of
from tests.flows.replaying.test_replaying import run_replay
from tests.tasks.reports.made_runs import png

GROUNDING, MEDGROUND = (REPOSITORY / "configs" / f"{name}.yaml" for name in ("tiny_grounding", "medground"))
EXAMPLE = REPOSITORY / "data" / "medground"
# A model that reads 512 ids, and the optimizer that needs no further package.
TINY = {"policy.model": "data/models/tiny-vision", "update.optimizer": "adamw", "rollout.max_pixels": 3136}
RECIPE = TinyVisionRecipe()


@pytest.mark.slow
@pytest.mark.parametrize("shapes", PROMPT_FILES)
def test_boxes_of_heldout_images_come_nearer(empty: Runs, shapes: int) -> None:
    train, heldout = (f"data/prompts/{name}" for name in PROMPT_FILES[shapes])
    settings = {"data__prompts": train, "evaluate__prompts": heldout, "evaluate__every": 0}
    empty.start_text(file=GROUNDING, run__iterations=20, **settings)
    before, after = (heldout_iou(empty, version) for version in (0, 20))
    assert before > 0.35
    assert after > before + 0.08
    # What a row names is what its prompt shows, and each image is stored once.
    rows = pl.read_parquet(empty.path("iteration_000001", "rollouts", "part-*.parquet", run="text"))
    seen, unseen = split_scenes(RECIPE.seed, train=RECIPE.train_prompts, heldout=RECIPE.heldout_prompts, shapes=shapes)
    stored = {file.name for file in empty.path("sources", run="text").iterdir()}
    assert {digest for (digest,) in rows["sources"].to_list()} <= stored
    assert stored <= {SourceImage.of(png_of(scene)).digest for scene in (*seen, *unseen)}


def heldout_iou(runs: Runs, version: int) -> float:
    scores = runs.path("evaluations", f"{version:06d}", "rewards", "box_iou", "scores.parquet", run="text")
    value = pl.read_parquet(scores)["value"].mean()
    assert isinstance(value, float)
    return value


def test_medgrounds_rows_are_read_as_published() -> None:
    config = read_config(MEDGROUND, [f"{name}={value}" for name, value in TINY.items()])
    check_inputs(config)
    (known,) = read_prompt_files(config).usable("data")
    rows = json.loads((EXAMPLE / "train.json").read_text(encoding="utf-8"))
    assert len(known.prompts) == len(rows)
    for prompt, row in zip(known.prompts, rows, strict=True):
        assert (prompt.text, prompt.columns) == (row["problem"], {"solution": row["solution"]})
        assert [source.digest for source in prompt.sources] == [
            SourceImage.of((EXAMPLE / row["image"]).read_bytes()).digest
        ]


def test_the_boxes_are_pixels_of_the_image_as_the_policy_gets_it() -> None:
    config = read_config(MEDGROUND)
    box_iou = next(each for each in config.rewards if each.reward == "box_iou")
    rollout = config.rollout.model_dump()
    settings = build_reward("box_iou", box_iou.settings).settings()
    assert {name: settings[name] for name in ("min_pixels", "max_pixels")} == {
        name: rollout[name] for name in ("min_pixels", "max_pixels")
    }


def test_a_wanted_box_beyond_its_image_is_refused_with_its_row(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "data")
    file = tmp_path / "data" / "train.json"
    rows = json.loads(file.read_text(encoding="utf-8"))
    rows[2]["solution"][2] = 449
    file.write_text(json.dumps(rows), encoding="utf-8")
    datasets = [{"name": "a", "prompts": str(file), "prompt_column": "problem", "image_column": "image"}]
    overrides = [*(f"{name}={value}" for name, value in TINY.items()), f"data={json.dumps({'datasets': datasets})}"]
    error, *_ = refused(lambda: check_inputs(read_config(MEDGROUND, overrides)))
    assert error.place == f"data.datasets.0.prompts: {file}, row 3, column solution"
    assert "448x448 pixels" in error.hint


@pytest.mark.slow
def test_medgrounds_settings_train(empty: Runs) -> None:
    small = {"rollout__prompts_per_iteration": 2, "rollout__prompts_per_batch": 2, "rollout__group_size": 2}
    changes = {name.replace(".", "__"): value for name, value in TINY.items()}
    # Its words are unknown to the tiny model: what is tested is that every setting is accepted and used.
    sizes = {"rollout__max_completion_length": 8, "update__minibatch_size": None}
    empty.start_text(file=MEDGROUND, run__iterations=1, policy__autocast=None, **small, **changes, **sizes)
    rewards = empty.path("iteration_000001", "rewards", run="text")
    assert {folder.name for folder in rewards.iterdir() if folder.is_dir()} == {"box_iou", "format"}


def mixed_prompts(folder: Path) -> Path:
    """Two edits and a caption."""
    seen, _ = split_edits(0, 0.1)
    file = folder / "edits.jsonl"
    write_edit_file(choose_edits(seen, 2, 0), file, folder / "targets")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    caption = {**rows[0], "prompt": "a red circle in the center on a white background", "image": None}
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], caption, rows[1])))
    return file


def test_prompts_with_and_without_images_train_both_streams_of_one_run(empty: Runs, tmp_path: Path) -> None:
    file = mixed_prompts(tmp_path)
    changes = {
        "run.name": "run",
        "run.iterations": 1,
        "storage.root": str(empty.root),
        "policy.model": "data/models/tiny-glm-image-edit",
        "data.prompts": str(file),
        "data.image_column": "image",
        "data.targets": str(tmp_path / "targets"),
        "rollout.prompts_per_iteration": 3,
        "rollout.prompts_per_batch": 3,
        "rollout.group_size": 2,
        "rollout.images_per_sample": 2,
        "rollout.guidance_scale": 1.5,
        "rewards": [{"reward": "ssim"}],
        "update.tokens.minibatch_size": None,
        "update.denoising.minibatch_size": None,
        "evaluate": {"every": 0},
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    summary = train(TINY_BOTH, overrides=overrides, progress=False)
    assert summary.iterations == 1
    metrics = empty.metrics(1)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["denoising/sampling/sampling_logp_difference/max"] < 1e-5
    rows = pl.read_parquet(empty.path("iteration_000001", "rollouts", "part-*.parquet"))
    of_prompts = {
        prompt: (images, length)
        for prompt, images, length in rows.select("prompt", pl.col("sources").list.len(), "length").unique().iter_rows()
    }
    assert sorted(of_prompts.values()) == [(0, 16 + 64), (1, 64), (1, 64)]


@pytest.mark.slow
def test_the_held_out_reward_of_edits_rises(empty: Runs) -> None:
    overrides = [f"storage.root={empty.root}", "run.iterations=8", "evaluate.every=8"]
    summary = train(TINY_BOTH.with_name("tiny_edit.yaml"), overrides=overrides, progress=False)
    assert summary.heldout_before is not None
    assert summary.heldout_after is not None
    assert summary.heldout_after > summary.heldout_before + 0.2


IMAGES = {f"{name}.png": png((30 * number + 20, 0, 0)) for number, name in enumerate("abc")}
PROMPTS = [
    {"prompt": "where is the red circle?", "image": "a.png"},
    {"prompt": "where is the blue square? <image> <image>", "images": ["b.png", "a.png"]},
    {"prompt": "where is the green circle?"},
]
HELDOUT = [{"prompt": "where is the blue circle?", "image": "c.png"}]
REWARD = """
def reds(completions, source_images, **columns):
    return [sum(image.getpixel((0, 0))[0] for image in images) / 255 + len(text) / 50
            for text, images in zip(completions, source_images)]
"""


def write_inputs(folder: Path) -> Path:
    """Two prompt files with their images, and the reward."""
    for name, content in IMAGES.items():
        (folder / name).write_bytes(content)
    for name, rows in (("train", PROMPTS), ("heldout", HELDOUT)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "mine.py").write_text(REWARD)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data__prompts": str(folder / "train.jsonl"),
        "evaluate__prompts": str(folder / "heldout.jsonl"),
        "evaluate__every": 2,
        "evaluate__samples_per_prompt": 2,
        "rewards": [{"reward": "function", "name": "reds", "settings": {"function": f"{folder / 'mine.py'}:reds"}}],
        "rollout__prompts_per_iteration": 3,
        "rollout__group_size": 2,
        "update__minibatch_size": 6,
        "update__micro_batch_size": 6,
        "run__iterations": 2,
        **changes,
    }


@pytest.fixture(scope="module")
def trained(server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path, Start]:
    """A finished run that no test changes, and the folder of its inputs."""
    runs, inputs = Runs(tmp_path_factory.mktemp("runs")), write_inputs(tmp_path_factory.mktemp("inputs"))
    return runs, inputs, runs.start_text("run", file=GROUNDING, **settings(inputs))


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(
    trained: tuple[Runs, Path, Start], empty: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, inputs, start = trained
    real = PolicyOptimizer.step

    def step_and_fail(self: PolicyOptimizer) -> None:
        real(self)
        if self.steps == 2:
            raise RuntimeError("power cut")

    monkeypatch.setattr(PolicyOptimizer, "step", step_and_fail)
    with pytest.raises(RuntimeError, match="power cut"):
        empty.start_text("run", file=GROUNDING, **settings(inputs))
    monkeypatch.undo()
    again = empty.start_text("run", file=GROUNDING, **settings(inputs))
    assert again.summary.policy_digest == start.summary.policy_digest
    assert empty.tables() == runs.tables()


def stored(runs: Runs, run: str = "run") -> set[str]:
    return {path.name for path in runs.path("sources", run=run).iterdir()}


def test_a_replay_reads_its_sources_from_the_run_that_has_them(
    trained: tuple[Runs, Path, Start], tmp_path: Path
) -> None:
    runs, start = trained[0].copied_to(tmp_path / "runs"), trained[2]
    assert stored(runs) == {hashlib.sha256(content).hexdigest() for content in IMAGES.values()}
    shown = inspect_run("run", root=str(runs.root))
    assert (shown.warnings, shown.summary(None).policy_digest) == ((), start.summary.policy_digest)
    before = sha256_of(runs.path())
    summary, _ = run_replay(runs, "evaluate.prompts=null")
    assert summary.policy_digest == start.summary.policy_digest
    assert sha256_of(runs.path()) == before
    assert not runs.path("sources", run="run-replay").exists()
    run_replay(runs, name="evaluated")
    assert stored(runs, "evaluated") == {hashlib.sha256(IMAGES["c.png"]).hexdigest()}
