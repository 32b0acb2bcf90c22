"""Faults that somebody may plant in a stored run, under checksums made again: only computing finds them."""

import io
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from PIL import Image, ImageOps

from flows.preflight.model import trained_model
from grpo_core.rollouts.images import encode_png
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.execution.resources import run_resources
from tasks.runs import layout
from tasks.runs.layout import SamplingRound, evaluation_folder, iteration_folder, policy_folder, source_file
from tasks.runs.sources import sha256_of as digest_of_source
from tasks.runs.stored import stored_config
from tasks.runs.stored_policies import read_policy
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import use_store
from tasks.update.update_policy import update_policy_task
from tests.flows.verification.resealed import (
    Row,
    configured,
    edited,
    opened,
    repointed,
    resealed,
    unchanged,
)

FIRST = "i000001.p0000"
"""The first group of a run."""

EVALUATED = 4
"""A policy version of each run that is evaluated."""


@dataclass(frozen=True)
class Planted:
    """What a verification has to find.

    Attributes:
        root: title of the first stage that differs and follows from no other; empty for what reading finds.
        place: what its first difference names: file, column, tensor.
        sample_id: of the first row; None for what has no rows.
        cause: facts that the cause states, or the problem of what reading finds.
    """

    root: str
    place: str
    sample_id: str | None
    cause: tuple[str, ...]


Plant = Callable[[Path], Planted]
"""Plants a fault in the folder of a run."""


def score_changed(run: Path) -> Planted:
    """One score, in a table that was written long ago."""
    folder = f"{iteration_folder(2)}/rewards/brevity"
    sample = _changed_score(run, folder, 0.25)
    return Planted("iteration 2: score brevity", "value", sample, (layout.SCORES_FILE,))


def advantage_changed(run: Path) -> Planted:
    """One advantage is larger by a tenth."""

    def change(rows: list[Row]) -> None:
        rows[5]["advantage"] += 0.1

    folder = f"{iteration_folder(3)}/{layout.ADVANTAGES}"
    edited(run, folder, change, layout.ADVANTAGES_FILE)
    return Planted("iteration 3: compute advantages", "advantage", _sample(run, folder, 5), (layout.ADVANTAGES_FILE,))


def pixel_changed(run: Path) -> Planted:
    """One pixel of one image is black or white."""
    chosen = "i000002.p0001.s01"

    def change(rows: list[Row]) -> None:
        for row in rows:
            if row["sample_id"] == chosen:
                image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
                red, green, blue = image.getpixel((3, 5))
                image.putpixel((3, 5), (255 - red, green, blue))
                row["image"]["bytes"] = encode_png(image)

    edited(run, f"{iteration_folder(2)}/{layout.ROLLOUTS}", change, layout.IMAGES_FILE.format(0))
    return Planted("iteration 2: collect rollouts", "pixels", chosen, (layout.IMAGES_FILE.format(0),))


def token_changed(run: Path) -> Planted:
    """One token is the next one of the vocabulary."""
    return _row_changed(run, "token_ids", lambda row: row["token_ids"].__setitem__(1, row["token_ids"][1] + 1))


def logprob_moved(run: Path) -> Planted:
    """One log-prob is larger by a thousandth."""
    name = "rollout_logprobs"
    return _row_changed(run, name, lambda row: row[name].__setitem__(1, row[name][1] + 1e-3))


def denoising_logprob_moved(run: Path) -> Planted:
    """The same of a denoising step."""
    name = "denoising_logprobs"
    return _row_changed(run, name, lambda row: row[name].__setitem__(0, row[name][0] + 1e-3))


def row_seed_changed(run: Path) -> Planted:
    """The seed of one row is the next one."""
    return _row_changed(run, "seed", lambda row: row.__setitem__("seed", row["seed"] + 1))


def policy_replaced(run: Path) -> Planted:
    """Policy 3 stands in the place of policy 4, and every row that policy 4 sampled says so."""
    place, state = run / policy_folder(4), run / policy_folder(4) / layout.STATE_FILE
    was = json.loads(state.read_text())
    shutil.rmtree(place)
    shutil.copytree(run / policy_folder(3), place)
    digest = json.loads(state.read_text())["policy_digest"]
    state.write_text(json.dumps({**was, "policy_digest": digest}, indent=1, sort_keys=True))
    resealed(run, policy_folder(4))
    repointed(run, 4)
    return Planted(
        "iteration 4: update policy",
        "safetensors",
        None,
        ("model.safetensors", "optimizer.safetensors", "policy version 3"),
    )


def optimizer_replaced(run: Path) -> Planted:
    """The optimizer of policy 4 is that of policy 2."""
    name = "tokens/optimizer.safetensors"
    shutil.copy(run / policy_folder(2) / name, run / policy_folder(4) / name)
    resealed(run, policy_folder(4))
    return Planted(
        "iteration 4: update policy", "optimizer.safetensors", None, ("optimizer.safetensors", "policy version 2")
    )


def row_left_out(run: Path) -> Planted:
    """The last update was made without one of its rows."""
    store = opened(run)
    config, last = (
        stored_config(store),
        max(int(path.name) for path in (run / layout.POLICIES).iterdir() if path.is_dir()),
    )
    folder = iteration_folder(last)
    use_store(store)
    with unchanged(run, f"{folder}/{layout.ADVANTAGES}"):
        edited(run, f"{folder}/{layout.ADVANTAGES}", _without_a_row, layout.ADVANTAGES_FILE)
        rollouts, advantages = (_reference(run, f"{folder}/{stage}") for stage in (layout.ROLLOUTS, layout.ADVANTAGES))
        with run_resources():
            update_policy_task.fn(
                read_policy(store, last - 1),
                (rollouts,),
                advantages,
                trained_model(config),
                config.scheduled_updates,
                config.run.seed,
                config.run.staleness,
                f"iteration {last}",
                config.placement,
            )
    shutil.rmtree(run / QUARANTINE)
    resealed(run, policy_folder(last))
    repointed(run, last)
    return Planted(f"iteration {last}: update policy", "safetensors", None, ("7 rows", "have 8"))


def _without_a_row(rows: list[Row]) -> None:
    """Leave out the first row that is trained on."""
    rows.remove(next(row for row in rows if row["advantage"]))


def heldout_improved(run: Path) -> Planted:
    """A score of a held-out sample is better, and so are the held-out reward and all that follows from it."""
    store, folder = opened(run), evaluation_folder(EVALUATED)
    config = stored_config(store)
    label = config.rewards[0].label
    sample = _changed_score(run, f"{folder}/rewards/{label}", 1.0)
    stages = {each: _reference(run, f"{folder}/{each}") for each in (layout.ROLLOUTS, layout.ADVANTAGES)}
    rewards = {each.label: _reference(run, f"{folder}/rewards/{each.label}") for each in config.rewards}
    use_store(store)
    compute_advantages_task.fn(
        (SamplingRound(stages[layout.ROLLOUTS], rewards),),
        config.streams,
        config.rewards,
        config.advantages,
        folder,
        f"evaluation of policy {EVALUATED}",
        None,
        config.placement,
    )
    shutil.rmtree(run / QUARANTINE)
    resealed(run, f"{folder}/{layout.ADVANTAGES}")
    return Planted(f"evaluation of policy {EVALUATED}: score {label}", "value", sample, (layout.SCORES_FILE,))


def seed_changed(run: Path) -> Planted:
    """The seed of the run in its configuration is the next one."""
    configured(run, lambda settings: settings["run"].__setitem__("seed", settings["run"]["seed"] + 1))
    return Planted("iteration 1: collect rollouts", "seed", f"{FIRST}.s00", ("run.seed 0 -> 1",))


def weights_swapped(run: Path) -> Planted:
    """The two rewards of the mix have each other's weights in the configuration."""

    def swap(settings: dict[str, Any]) -> None:
        first, second = settings["rewards"]
        first["weight"], second["weight"] = second["weight"], first["weight"]

    configured(run, swap)
    return Planted("iteration 1: compute advantages", "reward", f"{FIRST}.s00", ("rewards.answer.weight 0.75 -> 0.25",))


def guidance_changed(run: Path) -> Planted:
    """The guidance in the configuration is stronger."""
    configured(run, lambda settings: settings["rollout"].__setitem__("guidance_scale", 1.5))
    return Planted(
        "iteration 1: collect rollouts", "guidance_scale", f"{FIRST}.s00", ("rollout.guidance_scale 1.0 -> 1.5",)
    )


def reward_edited(run: Path) -> Planted:
    """The file of a reward's function has changed since; it is not part of the run."""
    config = stored_config(opened(run))
    file = Path(config.rewards[1].settings["function"].rpartition(":")[0])
    file.write_text(file.read_text().replace("return len(completion)", "return len(completion) + 1"))
    return Planted("iteration 1: score brevity", "value", f"{FIRST}.s00", (file.name,))


def prompts_swapped(run: Path) -> Planted:
    """Two lines of the file of prompts, which is not part of the run, have changed places."""
    file = Path(str(stored_config(opened(run)).data.prompts))
    lines = file.read_text().splitlines(keepends=True)
    chosen = pl.read_parquet(run / iteration_folder(1) / layout.ROLLOUTS / layout.PART_FILE.format(0))["prompt"][0]
    index = next(number for number, line in enumerate(lines) if json.loads(line)["prompt"] == chosen)
    other = 0 if index else 1
    lines[index], lines[other] = lines[other], lines[index]
    file.write_text("".join(lines))
    return Planted("", "", None, (file.name,))


def source_replaced(run: Path) -> Planted:
    """A source image is another one, and every row that had it names that by its digest."""
    rollouts = f"{iteration_folder(2)}/{layout.ROLLOUTS}"
    old = pl.read_parquet(run / rollouts / layout.PART_FILE.format(0))["sources"][0][0]
    content = _inverted((run / source_file(old)).read_bytes())
    new = digest_of_source(content)
    (run / source_file(old)).unlink()
    (run / source_file(new)).write_bytes(content)

    def change(rows: list[Row]) -> None:
        for row in rows:
            row["sources"] = [new if each == old else each for each in row["sources"]]

    for part in sorted(run.rglob(f"{layout.ROLLOUTS}/{layout.PART_FILE.format(0)}")):
        edited(run, part.parent.relative_to(run).as_posix(), change)
    return Planted("iteration 2: collect rollouts", "token_ids", "i000002.p0000.s00", ("sources", new[:12]))


def source_overwritten(run: Path) -> Planted:
    """A source image has the content of another one, under its own name: damage, as reading finds it."""
    rollouts = f"{iteration_folder(2)}/{layout.ROLLOUTS}"
    old = pl.read_parquet(run / rollouts / layout.PART_FILE.format(0))["sources"][0][0]
    (run / source_file(old)).write_bytes(_inverted((run / source_file(old)).read_bytes()))
    return Planted("", "", None, (source_file(old),))


def _inverted(content: bytes) -> bytes:
    return encode_png(ImageOps.invert(Image.open(io.BytesIO(content)).convert("RGB")))


def _row_changed(run: Path, column: str, change: Callable[[Row], object]) -> Planted:
    """Change a value of the first row of the second prompt's group in the second iteration."""
    chosen = "i000002.p0001.s00"

    def change_row(rows: list[Row]) -> None:
        for row in rows:
            if row["sample_id"].startswith(chosen) and row[column]:
                change(row)
                found.append(row["sample_id"])
                break

    found: list[str] = []
    edited(run, f"{iteration_folder(2)}/{layout.ROLLOUTS}", change_row)
    return Planted("iteration 2: collect rollouts", column, found[0], (layout.PART_FILE.format(0),))


def _changed_score(run: Path, folder: str, more: float) -> str:
    """Add to the first score of a table, and give the manifest the statistics of the result."""
    values: list[float] = []

    def change(rows: list[Row]) -> None:
        rows[0]["value"] += more
        rows[0]["raw"] += more
        values.extend(row["value"] for row in rows)

    edited(run, folder, change, layout.SCORES_FILE)
    label = folder.rpartition("/")[2]
    said = {f"rewards/{label}/mean": statistics.fmean(values), f"rewards/{label}/std": statistics.stdev(values)}
    resealed(run, folder, metrics=said)
    return _sample(run, folder, 0)


def _sample(run: Path, folder: str, row: int) -> str:
    table = next((run / folder).glob("*.parquet"))
    return str(pl.read_parquet(table)["sample_id"][row])


def _reference(run: Path, folder: str) -> ArtifactRef:
    found = opened(run).find(folder)
    assert found is not None
    return found
