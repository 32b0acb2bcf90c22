"""Each kind of tiny model samples and is updated on the stub GPU, with values, and on the CPU.

python -m tests.stub_gpu.families FILE    on the stub (build.py); writes what was found, by model, as JSON
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.loader import read_config
from configs.placement import PlacementSection
from configs.schema import RunConfig
from configs.training import ALGORITHMS, VelocityUpdateSection
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.protocol import Policy, policy_family
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import Stream
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
from grpo_core.update.settings import PARITY_SHARE
from grpo_core.update.velocity_update import update_by_velocity
from tasks.models.devices import configure_torch
from tasks.models.resident import ModelSpec, load_policy, load_untried
from tests.stub_gpu import stub
from tests.stub_gpu.host_values import HostValues, Site

COUNTED = ("waits", "pageable_copies", "launches", "products", "graphs")
MICROBATCH, EPOCHS = 4, 2
_ROLLOUT = {"group_size": 4, "prompts_per_iteration": 2, "prompts_per_batch": 2}
_UPDATE = {"minibatch_size": 8, "micro_batch_size": MICROBATCH, "epochs": EPOCHS}
NEVER_SAMPLED = 1 << 30
STATIC: Mapping[str, Any] = {"cache_implementation": "static"}


@dataclass(frozen=True)
class Family:
    """A shipped configuration made smaller, with the settings that make rollouts longer by more of one unit."""

    config: str
    rollout: Mapping[str, Any]
    longer: Mapping[str, Mapping[str, Any]]
    # A decoder, and NFT, make a pass for each prompt of a microbatch: with one prompt all microbatches are alike.
    prompts: tuple[str, ...] = ("a red circle", "a green square at the bottom right on a white background")
    with_images: bool = False
    updates: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"update": {}})
    static: bool = False
    # Others that train on the same rollouts, with what they are compared with.
    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_GLM = {"guidance_scale": 1.5, "height": 32, "width": 32}
_WINDOW = {"num_inference_steps": 3, "sde_window": "first", "sde_window_range": [0, 2]}
_MORE_TOKENS, _MORE_STEPS = {"token": {"height": 64}}, {"denoising step": {"num_inference_steps": 4}}
_EDITS, _QUESTIONS = ("make the circle red", "make the heart purple"), ("where is it? <image>", "where? <image>")
_WORDS = ("sort the letters of ele", "sort the letters of amabezaz")
FAMILIES = {
    "glm_image": Family("tiny", {**_GLM, "num_inference_steps": 3}, _MORE_TOKENS | _MORE_STEPS, static=True),
    "glm_image_both": Family(
        "tiny_both",
        {**_GLM, **_WINDOW, "samples_with_images": 4, "images_per_sample": 2},
        _MORE_STEPS,
        ("a red circle",) * 2,
        updates={"update.tokens": {}, "update.denoising": {}},
    ),
    "glm_image_edit": Family("tiny_edit", {**_GLM, "num_inference_steps": 3}, {}, _EDITS, with_images=True),
    "diffusers": Family("tiny_sd3", {**_WINDOW, "guidance_scale": 3.0}, _MORE_STEPS),
    "diffusers_nft": Family(
        "tiny_sd3_nft",
        {"num_inference_steps": 3, "guidance_scale": 3.0},
        _MORE_STEPS,
        ("a red circle",) * 2,
        updates={"update": {"timesteps_per_image": 1}},
        algorithms={"awm": {}, "v_grpo": {"clip_range": 0.1}, "ram": {"kl_coef": 0.5}},
    ),
    "causal_lm": Family(
        "tiny_text", {"max_completion_length": 9}, {"token": {"max_completion_length": 25}}, _WORDS, static=True
    ),
    "vision_lm": Family(
        "tiny_grounding",
        {"max_completion_length": 6},
        {"token": {"max_completion_length": 22}},
        _QUESTIONS,
        with_images=True,
    ),
}


@dataclass
class Found:
    """What a family did: numbers of both devices that have to agree, and counts of one more unit of work."""

    cuda: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    places: dict[str, dict[str, float]] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    exact_products: int = 0


class Runner:
    """A family's policy on a device, and what its rollouts and updates need."""

    def __init__(self, family: Family, device: str, *overrides: str, load: Callable[..., Policy] = load_policy) -> None:
        values = {f"rollout.{name}": value for name, value in (_ROLLOUT | family.rollout).items()}
        for path, update in family.updates.items():
            values |= {f"{path}.{name}": value for name, value in (_UPDATE | update).items()}
        given = [f"{name}={json.dumps(value)}" for name, value in values.items()]
        self.family, self.algorithm = family, ""
        self.config = read_config(f"configs/{family.config}.yaml", [*given, *overrides])
        self.settings: Any = policy_family(self.config.policy.kind).settings(self.config.rollout.model_dump())
        spec = ModelSpec(section=self.config.policy, digest="", adapter_seed=0, references=self.config.references)
        self.policy = load(spec, self.settings, torch.device(device))
        texts: Any = self.policy
        # Prompts of a few ids are shared too, as longer ones are.
        texts.pass_positions = 0
        # On a GPU adapters are not merged while sampling, which rounds otherwise.
        for component in self.policy.components.values() if device == "cpu" else ():
            component.trained.merged = nullcontext

    def sample(self, **changes: Any) -> list[RolloutGroup]:
        self.policy.sample_with(replace(self.settings, **changes))
        files = sorted(Path("data/prompts/sources").glob("*.png"))
        images = [(SourceImage.of(file.read_bytes()),) if self.family.with_images else () for file in files[:2]]
        requests = group_requests(self.config, self.family.prompts, images)
        return list(collect_rollouts(self.policy, requests, prompts_per_batch=len(requests)))

    def update(self, groups: Sequence[RolloutGroup], stream: Stream, share: int = 1) -> Any:
        """Train a component on one of `share` of the rows, and restore its initial weights."""
        result = self.train(groups, stream, share)
        self.policy.components[stream].load_weights(None)
        return result

    def train(
        self,
        groups: Sequence[RolloutGroup],
        stream: Stream,
        share: int = 1,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> Any:
        """Train a component on one of `share` of the rows."""
        component: Any = self.policy.components[stream]
        advantages = torch.linspace(-1, 1, len(groups[0].outputs)).repeat(len(groups), 1)
        rows = join_groups(groups, advantages, stream)
        rows = rows.select(range(0, len(rows), share))
        update: Any = self.config.updates[stream]
        if self.algorithm:
            given = _UPDATE | {"timesteps_per_image": 1} | dict(self.family.algorithms[self.algorithm])
            update = ALGORITHMS[stream][self.algorithm](**given)
        settings = update.model_copy(update={"minibatch_size": len(rows)})
        process_group.distribute(component.trained)
        optimizer = PolicyOptimizer(component.trainable_parameters(), settings)
        train = update_by_velocity if isinstance(update, VelocityUpdateSection) else update_policy
        result = train(component, optimizer, rows, settings, seed=0, process_group=process_group)
        process_group.state(optimizer)
        process_group.collect(component.trained)
        return result


def numbers(groups: Sequence[RolloutGroup], updates: Mapping[Any, Any]) -> dict[str, float]:
    """What two devices have to agree on: what was sampled, and the metrics of the updates."""
    found = dict[str, float]()
    for stream, result in updates.items():
        for number, group in enumerate(groups):
            sampled = group.streams[stream]
            found[f"{stream} of group {number}: log-probs"] = float(sampled.rollout_logprobs.sum())
            if isinstance(sampled.actions, TokenBatch):
                found[f"group {number}: ids"] = float(sampled.actions.token_ids.double().square().sum())
        # The share is of a tolerance that is a thousand times as large as what the devices round.
        before = {name: value for name, value in result.before.items() if name != PARITY_SHARE}
        found |= {f"{stream} before: {name}": value for name, value in before.items()}
        for number, step in enumerate(result.steps):
            metrics = {name: value for name, value in asdict(step).items() if isinstance(value, int | float)}
            found |= {f"{stream} step {number}: {name}": value for name, value in metrics.items()}
    return found


def compare_static(runner: Runner, groups: Sequence[RolloutGroup], found: Found) -> None:
    """Sample with a static cache on the device, beside what the growing one gave on the CPU."""
    for number, pair in enumerate(zip(runner.sample(**STATIC), groups, strict=True)):
        for values, group in zip((found.cuda, found.cpu), pair, strict=True):
            tokens: Any = group.streams["tokens"]
            values[f"static cache, group {number}: log-probs"] = float(tokens.rollout_logprobs.sum())
            ids = tokens.actions.token_ids.double().square().sum()
            values[f"static cache, group {number}: ids"] = float(ids)


def group_requests(
    config: RunConfig, prompts: Sequence[str], sources: Sequence[tuple[SourceImage, ...]]
) -> list[GroupRequest]:
    """Return a request for each prompt and its images, of as many samples as the configuration asks for."""
    places = [(sample, image) for sample, count in enumerate(config.images_of_samples) for image in range(count)]
    window, seeds = config.window_start(1), tuple(range(len(places)))
    return [
        GroupRequest(
            prompt=prompt,
            sample_ids=tuple(f"g{number}.s{place}" for place in seeds),
            seeds=tuple(1000 * number + sample for sample, _ in places),
            noise_seeds=seeds,
            step_seeds=seeds if window is not None else (),
            window_start=window,
            sources=sources[number],
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Counted:
    """What a piece of work returned, and what it took."""

    result: Any
    counts: Counter[str]
    sites: Counter[Site]


class Meter:
    """Counts what one more unit of work takes: the difference of two runs that differ in nothing else."""

    def __init__(self, values: HostValues, found: Found) -> None:
        self.values, self.found = values, found

    def run(self, work: Callable[[], Any]) -> Counted:
        self.values.reset()
        result = work()
        return Counted(result, Counter(stub.counts()), Counter(self.values.sites))

    def compare(self, unit: str, shorter: Counted, longer: Counted, units: int) -> None:
        self.found.counts[unit] = {name: (longer.counts[name] - shorter.counts[name]) / units for name in COUNTED}
        more = {": ".join(site): (count - shorter.sites[site]) / units for site, count in sorted(longer.sites.items())}
        self.found.places[unit] = {site: count for site, count in more.items() if count > 0}
        self.found.lines |= {": ".join(site): line for site, line in self.values.lines.items()}


def measure(family: Family) -> Found:
    """Sample and update on both devices."""
    # The only attention that both devices compute by the same operations.
    with sdpa_kernel(SDPBackend.MATH):
        here = Runner(family, "cpu")
        here_groups = groups = here.sample()
        found = Found(cpu=numbers(groups, {stream: here.update(groups, stream) for stream in here.policy.components}))
        for here.algorithm in family.algorithms:
            result = here.update(groups, "denoising")
            found.cpu |= {**numbers([], {here.algorithm: result}), f"{here.algorithm}: memory above nft's": 0}
    with sdpa_kernel(SDPBackend.MATH), HostValues(everything=True) as values:
        runner, meter = Runner(family, "cuda"), Meter(values, found)
        groups, updates = runner.sample(), {}
        for stream in runner.policy.components:
            updates[stream] = compare_updates(runner, meter, groups, stream)
        found.cuda = numbers(groups, updates)
        most = torch.cuda.max_memory_allocated()
        for runner.algorithm in family.algorithms:
            result = compare_updates(runner, meter, groups, "denoising")
            above = max(0, torch.cuda.max_memory_allocated() - most)
            found.cuda |= {**numbers([], {runner.algorithm: result}), f"{runner.algorithm}: memory above nft's": above}
        if family.static:
            compare_static(runner, here_groups, found)
        if isinstance(runner.policy, CausalLMPolicy):
            runner.policy.ends = (NEVER_SAMPLED,)
        base = meter.run(runner.sample)
        for unit, changes in family.longer.items():
            runner.sample(**changes)  # what the first rollout of a size, or with these settings, makes is not counted
            longer = meter.run(partial(runner.sample, **changes))
            meter.compare(unit, base, longer, length(unit, longer, changes) - length(unit, base, family.rollout))
        if family.static:
            more = {**STATIC, **family.longer["token"]}
            base, longer = meter.run(partial(runner.sample, **STATIC)), meter.run(partial(runner.sample, **more))
            meter.compare("token, static cache", base, longer, length("", longer, {}) - length("", base, {}))
            reserved = torch.cuda.memory_reserved()
            runner.sample(**more)
            found.cuda["static cache: growth"] = torch.cuda.memory_reserved() - reserved
            found.cpu["static cache: growth"] = 0
        found.failed = dict(values.failed)
    with HostValues(everything=False) as values:
        # Without values no trial passes.
        in_16_bits = ("policy.dtype=bfloat16", "policy.lora={rank: 2, alpha: 4}")
        Runner(family, "cuda", *in_16_bits, load=load_untried).sample()
        found.attention = {name: count for name, count in values.operations.items() if "attention" in name}
        found.exact_products = values.exact_products
    return found


def compare_updates(runner: Runner, meter: Meter, groups: Sequence[RolloutGroup], stream: Stream) -> Any:
    """Count what a microbatch takes, and return what the update of all rows, which is the last one, found."""
    runner.update(groups, stream, 4)  # what the first update alone makes is not counted
    half = meter.run(partial(runner.update, groups, stream, 2))
    whole = meter.run(partial(runner.update, groups, stream))
    rows = sum(len(group.outputs) for group in groups)
    unit = f"{stream} microbatch" + (f", {runner.algorithm}" if runner.algorithm else "")
    meter.compare(unit, half, whole, EPOCHS * (rows - rows // 2) // MICROBATCH)
    return whole.result


def length(unit: str, sampled: Counted, rollout: Mapping[str, Any]) -> int:
    """Return how many units the samples have of what a rollout is made longer by."""
    if unit == "denoising step":
        return int(rollout["num_inference_steps"])
    return int(sampled.result[0].streams["tokens"].actions.loss_mask.shape[1])


def main(file: str, *names: str) -> None:
    configure_torch(PlacementSection(devices="cuda"))
    found = {}
    for name in names or FAMILIES:
        begun = time.process_time()
        found[name] = asdict(measure(FAMILIES[name]))
        print(f"{name}: {time.process_time() - begun:.1f} s", flush=True)
    Path(file).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
