"""The ways to train a denoising model, compared: tiny Stable Diffusion 3, or tiny GLM-Image's decoder, over seeds.

python -m tests.bench.methods FILE [METHOD...] [--model sd3] [--seeds 0,1,2] [--iterations 40]

A run is some minutes of one core. It adds a line to FILE, which a later call goes on with, and a sheet of its last
held-out images to the folder of FILE. Then the table of all runs is printed: held-out reward, and the mean square of
the velocity's distance from the reference's, at as many images, at as many CPU seconds and at the end; and what a
method needs for the last reward of nft. Held-out images cost a method no CPU seconds.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from PIL import Image

from configs.loader import read_config
from configs.rewards.brightness import brightness
from configs.rollouts import ImageRolloutSection
from configs.schema import RunConfig
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.losses.velocity_matching import mean_square
from grpo_core.policies.protocol import policy_family
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rewards.similarity.pairs import R2Reward
from grpo_core.rollouts.records import GroupRequest
from grpo_core.update.velocity_update import ForwardProcess
from tasks.models.resident import ModelSpec, load_policy
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table

# Pulls that settle in two dimensions.
_PULLS: Mapping[str, Mapping[str, Any]] = {
    "nft": {"kl_coef": 0.4},
    "awm": {"kl_coef": 0.3},
    "v_grpo": {"kl_coef": 0.4},
    "ram": {"kl_coef": 1.0, "reward_multiplier": 1.0},
}
ITERATIONS = {"grpo": 3.0, "nft": 1.0, "awm": 1.5, "v_grpo": 1.25, "ram": 1.25}
"""As many take about as long."""
_FULL = ("grpo", *_PULLS)
METHODS = (*_FULL, "grpo, KL", *(f"{name}, previews" for name in _FULL))
"""With previews a prompt has twice as many of half the steps, of which a quarter is trained."""
EVALUATIONS, PROMPTS, IMAGES, SHOWN = 4, 12, 8, 4
_UNEVALUATED = [f"evaluate.{name}=null" for name in ("prompts", "targets", "target_column")]


class Tiny(NamedTuple):
    """A model: its shipped configuration, changes of it, and what methods have that match velocities."""

    file: str
    changes: Mapping[str, Any]
    rollout: Mapping[str, Any]
    update: Mapping[str, Any]
    matching: Mapping[str, Any]


_SIZE = {"prompts_per_iteration": 3, "group_size": 8}
_BRIGHTNESS = {"reward": "function", "settings": {"function": "configs/rewards/brightness.py:brightness"}}
MODELS: Mapping[str, Tiny] = {
    "sd3": Tiny("tiny_sd3.yaml", {"rewards": [{"reward": "r2"}]}, _SIZE, {}, {"learning_rate": 1e-3}),
    "decoder": Tiny(
        "tiny_both.yaml",
        {"policy.train": ["denoising"], "rewards": [_BRIGHTNESS]},
        {**_SIZE, "samples_with_images": 1, "images_per_sample": 1},
        {"learning_rate": 3e-4, "clip_range": 1e-4},
        {"learning_rate": 3e-4},
    ),
}


def configured(model: str, method: str, seed: int, iterations: int, root: str) -> RunConfig:
    """The configuration of a run, without held-out prompts."""
    tiny, (name, _, variant) = MODELS[model], method.partition(", ")
    shipped = yaml.safe_load((CHECKOUT / "configs" / tiny.file).read_text())
    rollout, update = {**shipped["rollout"], **tiny.rollout}, dict(tiny.update or shipped["update"])
    if name != "grpo":
        noisy = ImageRolloutSection.noise_settings - {"decode_batch_size"}
        rollout = {key: value for key, value in rollout.items() if key not in noisy} | {"sde_window_size": 0}
        update = {"algorithm": name, "timesteps_per_image": 4, **tiny.matching, **_PULLS[name]}
    if variant == "KL":
        update["kl_coef"] = 0.004
    if name != "grpo" or variant == "previews":
        rollout["shared_noise"] = False
    if variant == "previews":
        size, steps = rollout["group_size"], rollout["num_inference_steps"] // 2
        rollout |= {"group_size": size // 2, "previews": {"per_prompt": 2 * size, "steps": steps}}
    # Two optimizer steps an iteration.
    rows = rollout["prompts_per_iteration"] * rollout["group_size"] // 2
    update |= {"minibatch_size": rows, "micro_batch_size": rows * update.get("timesteps_per_image", 1)}
    changes = {**tiny.changes, "rollout": rollout, "update": update, "run.seed": seed}
    changes |= {"run.name": "run", "run.iterations": iterations, "storage.root": root}
    given = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return read_config(CHECKOUT / "configs" / tiny.file, [*given, *_UNEVALUATED])


def train_once(model: str, method: str, seed: int, iterations: int, sheets: Path) -> dict[str, Any]:
    """Train, and return the line of the run."""
    from flows import train

    marks: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        config = configured(model, method, seed, iterations, root)
        train(config, on_iteration=lambda record: marks.append(time.process_time()), progress=False)
        measured = Measured(model)
        policies, every = Path(root, "run", "policies"), iterations // EVALUATIONS
        versions = range(every, iterations + 1, every)
        curve = [measured.of(None), *(measured.of(policies / f"{each:06d}" / "denoising") for each in versions)]
        measured.sheet().save(sheets / f"{model}-{method.replace(', ', '-')}-{seed}.png")
    rewards, distances = zip(*curve, strict=True)
    # The first iteration also loads the model.
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    images = config.rollout.prompts_per_iteration * config.rollout.group_size
    kept = {"heldout": rewards, "distance": distances, "seconds": seconds, "images": images, "every": every}
    return {"model": model, "method": method, "seed": seed, **kept}


class Measured:
    """Held-out reward of weights, and mean square of the velocity's distance from the reference's at their images."""

    def __init__(self, model: str) -> None:
        with tempfile.TemporaryDirectory() as root:
            config = configured(model, "nft", 0, 1, root)
        settings = policy_family(config.policy.kind).settings(config.rollout.model_dump())
        spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references={"denoising": "device"})
        self.model, self.policy = model, load_policy(spec, settings, torch.device("cpu"))
        lines = (CHECKOUT / "data" / "prompts" / "shapes_heldout.jsonl").read_text().splitlines()[:PROMPTS]
        self.prompts = [json.loads(line) for line in lines]
        seeds = tuple(range(IMAGES))
        self.requests = [
            GroupRequest(
                prompt=line["prompt"],
                sample_ids=tuple(f"{number}.{seed}" for seed in seeds),
                seeds=seeds,
                noise_seeds=seeds,
                step_seeds=seeds,
                window_start=settings.num_inference_steps,
            )
            for number, line in enumerate(self.prompts)
        ]
        self.images: list[Any] = []

    @torch.no_grad()
    def of(self, weights: Path | None) -> tuple[float, float]:
        """Sample with these weights, and measure both; without any, with the model's."""
        component: Any = self.policy.components["denoising"]
        if weights is not None:
            component.load_weights(weights)
        groups = list(collect_rollouts(self.policy, self.requests, prompts_per_batch=6))
        self.images = [image for group in groups for image in group.outputs]
        rows = join_groups(groups, torch.zeros(len(self.images)), "denoising")
        process, found = ForwardProcess(component, rows, None, seed=0), []
        for part in process.microbatches(range(0, len(rows), IMAGES // 2), 0, 48):
            actions, _ = process.noised(part, 0)
            velocity = component.velocities(actions)
            with component.trained.reference():
                found.append(mean_square(velocity - component.velocities(actions)))
        return statistics.fmean(self._rewards()), float(torch.cat(found).mean())

    def _rewards(self) -> Sequence[float]:
        if self.model == "decoder":
            return brightness(self.images)
        folder = CHECKOUT / "data" / "targets"
        targets = [Image.open(folder / line["target"]).convert("RGB") for line in self.prompts for _ in range(IMAGES)]
        names = [str(number) for number in range(len(targets))]
        scores = R2Reward().score(ScoringBatch(names, names, images=self.images, targets=targets))
        return [score.value or 0.0 for score in scores]

    def sheet(self) -> Image.Image:
        """The first images of each prompt, a column a prompt."""
        side = self.images[0].width
        sheet = Image.new("RGB", (PROMPTS * side, SHOWN * side))
        for place in range(PROMPTS * SHOWN):
            column, row = divmod(place, SHOWN)
            sheet.paste(self.images[column * IMAGES + row], (column * side, row * side))
        return sheet


def at(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """The value of a curve at a place, straight between those that were measured; the last one beyond."""
    after = bisect_right(places, place)
    if after == len(places):
        return values[-1]
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def reached(places: Sequence[float], values: Sequence[float], value: float) -> float | None:
    """Where a rising curve first has a value; None where it never has."""
    after = next((number for number, each in enumerate(values) if each >= value), None)
    if not after:
        return None
    share = (value - values[after - 1]) / (values[after] - values[after - 1])
    return places[after - 1] + share * (places[after] - places[after - 1])


@dataclass(frozen=True)
class Curves:
    """The runs of a method over the seeds."""

    runs: Sequence[Mapping[str, Any]]

    def mean(self, name: str) -> list[float]:
        """The mean over the seeds at each evaluation."""
        return [statistics.fmean(values) for values in zip(*(run[name] for run in self.runs), strict=True)]

    @property
    def seconds(self) -> list[float]:
        """CPU seconds of training until each evaluation, by the median of an iteration."""
        return self._places(statistics.median(each for run in self.runs for each in run["seconds"]))

    @property
    def images(self) -> list[float]:
        """Images with all steps until each evaluation."""
        return self._places(self.runs[0]["images"])

    def _places(self, of_iteration: float) -> list[float]:
        return [self.runs[0]["every"] * of_iteration * place for place in range(len(self.runs[0]["heldout"]))]

    def shown(self, places: Sequence[float], place: float) -> str:
        """Held-out reward at a place, with its span over the seeds, and the distance there."""
        found = [at(places, run["heldout"], place) for run in self.runs]
        span = f" ({min(found):.3f} to {max(found):.3f})" if len(found) > 1 else ""
        return f"{statistics.fmean(found):.3f}{span}, {at(places, self.mean('distance'), place):.3f}"


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means over the seeds; as many images and CPU seconds are those that all methods without previews have."""
    by_method = {name: Curves([run for run in runs if run["method"] == name]) for name in METHODS}
    found = {name: curves for name, curves in by_method.items() if curves.runs}
    full = [curves for name, curves in found.items() if name in _FULL]
    images, seconds = min(each.images[-1] for each in full), min(each.seconds[-1] for each in full)
    nft, rows = found["nft"], []
    for name, curves in found.items():
        shares = (_share(curves, nft, places) for places in (lambda each: each.seconds, lambda each: each.images))
        ends = ((curves.images, images), (curves.seconds, seconds), (curves.seconds, curves.seconds[-1]))
        shown = (curves.shown(*each) for each in ends)
        rows.append((name, str(len(curves.runs)), *shown, f"{curves.seconds[-1]:.0f}", *shares))
    names = ("method", "seeds", f"{images:.0f} images", f"{seconds:.0f} CPU seconds", "at the end", "CPU seconds")
    head = (*names, "CPU seconds to nft's last reward, share of nft's", "images to it")
    return [f"before {nft.mean('heldout')[0]:.3f}", "", *markdown_table(head, rows)]


def _share(curves: Curves, nft: Curves, places: Callable[[Curves], Sequence[float]]) -> str:
    """What a method needs for nft's last reward, as a share of what nft does with the same seeds."""
    seeds = {run["seed"] for run in curves.runs}
    same = Curves([run for run in nft.runs if run["seed"] in seeds])
    goal = same.mean("heldout")[-1]
    needed, own = (reached(places(each), each.mean("heldout"), goal) for each in (curves, same))
    return "never" if needed is None or not own else f"{needed / own:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []])
    parser.add_argument("--model", choices=MODELS, default="sd3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iterations", type=int, default=40, help="of nft; others have as many as take about as long")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    for seed in map(int, asked.seeds.split(",")):
        for method in asked.methods or METHODS:
            if not any((run["model"], run["method"], run["seed"]) == (asked.model, method, seed) for run in runs):
                rounds = round(asked.iterations * ITERATIONS[method.partition(", ")[0]] / EVALUATIONS)
                runs.append(train_once(asked.model, method, seed, rounds * EVALUATIONS, asked.file.parent))
                with asked.file.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    print("\n".join(table([run for run in runs if run["model"] == asked.model])))


if __name__ == "__main__":
    main()
