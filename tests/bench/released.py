"""A released language model: its update with prompts computed once a group, and an iteration beside TRL's step."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configs.loader import read_config
from configs.schema import RunConfig
from flows.preflight.measured import requests_of
from flows.preflight.prompts import read_prompt_files
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import TrainingRows
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tasks.models.resident import ModelSpec, load_untried
from tasks.process import CHECKOUT
from tests.bench.page import STEPS, Row, Timings
from tests.bench.policy import reset_resident, resident_mb
from tests.bench.trl_trainer import build_trainer, loss_and_step, step_seconds

MODEL = CHECKOUT / "weights" / "SmolLM2-135M-Instruct"
GROUP, ROUNDS, TRL_ROUNDS = 8, 3, 2


class Case(NamedTuple):
    """Groups of completions of a prompt, and the goals beside whole rows.

    Attributes:
        prompt, completion: ids; a ragged case has completions from an eighth of that on, of which most are short.
        groups, microbatch: groups of GROUP rows, and rows of a microbatch.
        seconds, memory: goals, as shares of what whole rows take.
        beside_trl: the goal as a share of TRL's update, which is measured only where it is given.
    """

    prompt: int
    completion: int
    groups: int
    microbatch: int
    seconds: float
    memory: float | None = None
    ragged: bool = False
    beside_trl: float | None = None

    @property
    def what(self) -> str:
        """The case, for people."""
        lengths = f"{self.completion // 8} to {self.completion}" if self.ragged else f"{self.completion}"
        return f"{self.groups} x {GROUP} rows, prompt {self.prompt}, completion {lengths}"


CASES = (
    Case(28, 12, 4, 32, 0.55, beside_trl=0.4),
    Case(53, 48, 2, 16, 0.67),
    Case(300, 100, 1, 8, 0.45, 0.5),
    Case(20, 128, 1, 8, 1.0, ragged=True),
)
SHIPPED = ("tiny_text", "tiny_grounding")
"""Configurations whose update must not be slower than with whole rows; GLM-Image's tokens keep those."""


def measure() -> Iterator[Row]:
    """Prompts computed once a group, with SmolLM2-135M-Instruct and tiny models, in CPU seconds.

    One thread each, in turn. `make smollm2` makes the model where the hub cannot be reached.
    """
    if not (MODEL / "config.json").exists():
        yield Row(what="released model", unit="s", ours=(), left_out=f"no {MODEL.name}; `make smollm2` makes it")
        return
    for case in CASES:
        yield from _measure_update(case)
    for name in SHIPPED:
        sides = [partial(_update, name, True), partial(_update, name, False)]
        (ours, _), (theirs, _) = _in_turn(sides)
        yield Row(what=f"update of {name}", unit="s", ours=ours, peer="whole rows", theirs=theirs, at_most=1.0)
    yield from _measure_iteration()


def _measure_update(case: Case) -> Iterator[Row]:
    sides = [partial(_update, case, True), partial(_update, case, False)]
    if case.beside_trl is not None:
        sides.append(partial(_trl_update, case))
    (ours, own), (theirs, other), *trl = _in_turn(sides)
    row, peer = partial(Row, what=f"update, {case.what}", unit="s", ours=ours), "whole rows"
    yield row(peer=peer, theirs=theirs, at_most=case.seconds)
    for seconds, _ in trl:
        yield row(peer="TRL loss and step", theirs=seconds, at_most=case.beside_trl)
    if case.memory is not None:
        mine, peak = (max(own),), (max(other),)
        yield Row(what=f"its memory, {case.what}", unit="MB", ours=mine, peer=peer, theirs=peak, at_most=case.memory)


def _in_turn(sides: Sequence[Callable[[], tuple[float, float]]]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Call each side in a process of its own, in turn; return its seconds and its MB by round, without the first."""
    found: list[list[tuple[float, float]]] = [[] for _ in sides]
    with ExitStack() as pools:
        own = [pools.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for _ in sides]
        for _ in range(1 + ROUNDS):
            for side, pool, taken in zip(sides, own, found, strict=True):
                taken.append(pool.submit(side).result())
    return [(tuple(each for each, _ in taken[1:]), tuple(each for _, each in taken[1:])) for taken in found]


def _update(case: Case | str, shares: bool) -> tuple[float, float]:
    """Return the CPU seconds of an update, and the MB that it takes at most above the loaded model.

    Args:
        case: of the released model, or the name of a shipped configuration.
    """
    component, optimizer, rows, settings, before = _shipped(case) if isinstance(case, str) else _prepared(case)
    component.trained.shares_prompts = shares
    begun = time.process_time()
    update_policy(component, optimizer, rows, settings, seed=0)
    return time.process_time() - begun, resident_mb("VmHWM") - before


@cache
def _shipped(name: str) -> tuple[Any, PolicyOptimizer, TrainingRows, Any, float]:
    """Load a shipped model and sample the rows of an iteration; no step changes a weight."""
    torch.set_num_threads(1)
    config = read_config(CHECKOUT / "configs" / f"{name}.yaml", [f"storage.root={tempfile.gettempdir()}"])
    family: Any = policy_family(config.policy.kind)
    spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references=config.references)
    policy: Any = load_untried(spec, family.settings(config.rollout.model_dump()), torch.device("cpu"))
    prompts = read_prompt_files(config).usable("data")[0]
    count = config.rollout.prompts_per_iteration
    requests = requests_of(config, [prompts.drawn(place) for place in range(count)])
    groups = list(collect_rollouts(policy, requests, prompts_per_batch=count))
    rows = join_groups(groups, torch.linspace(-1, 1, len(groups[0].outputs)).repeat(count, 1), "tokens")
    settings = config.updates["tokens"].model_copy(update={"learning_rate": 0.0})
    component = policy.components["tokens"]
    return component, PolicyOptimizer(component.trainable_parameters(), settings), rows, settings, reset_resident()


@cache
def _trl_prepared(case: Case) -> tuple[Callable[[], None], float]:
    """Load the model into TRL's trainer, with rows of random ids; no step changes a weight."""
    torch.set_num_threads(1)
    config = read_config(CHECKOUT / "configs" / "smollm2_sums.yaml", [f"policy.model={MODEL}"])
    trainer = build_trainer(config, tempfile.gettempdir(), 1)
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.groups, case.prompt), (case.groups * GROUP, case.completion))
    prompts, completions = (torch.randint(100, 40_000, size, generator=generator) for size in sizes)
    step = loss_and_step(trainer, prompts.repeat_interleave(GROUP, 0), completions, learning_rate=0.0)
    return step, reset_resident()


def _trl_update(case: Case) -> tuple[float, float]:
    step, before = _trl_prepared(case)
    begun = time.process_time()
    step()
    return time.process_time() - begun, resident_mb("VmHWM") - before


@cache
def _prepared(case: Case) -> tuple[Any, PolicyOptimizer, TrainingRows, Any, float]:
    """Load the model with adapters that are not at zero, and make rows of random ids; no step changes a weight.

    The last is the MB that the process has then.
    """
    torch.set_num_threads(1)
    settings = CausalLMSettings(max_completion_length=case.completion, chat_template=False)
    choice = TrainingChoice(LoraSettings(rank=16, alpha=32.0))
    policy = CausalLMPolicy.load(str(MODEL), settings, {"tokens": choice})
    generator, count = torch.Generator().manual_seed(0), GROUP * case.groups
    for name, each in policy.trainable_parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(each.data, std=0.003, generator=generator)
    prompts = [f"{place}" + " a" * (case.prompt - 1) for place in range(case.groups)]
    lengths = torch.full((count,), case.completion)
    if case.ragged:
        least = case.completion / 8
        drawn = torch.empty(count).exponential_(1 / (2 * least), generator=generator) + least
        lengths = drawn.long().clamp(max=case.completion)
        lengths[0] = case.completion
    mask = torch.arange(case.completion) < lengths[:, None]
    ids = torch.randint(100, policy.vocabulary, mask.shape, generator=generator) * mask
    actions = TokenBatch(tuple(each for each in prompts for _ in range(GROUP)), ids, mask, 1.0)
    parts = torch.arange(count).split(case.microbatch)
    with torch.no_grad():
        scored = [policy.logprobs(actions.select(part.tolist()), entropy="none").logprobs for part in parts]
    rows = TrainingRows(
        sample_ids=tuple(map(str, range(count))),
        actions=actions,
        rollout_logprobs=torch.cat(scored),
        advantages=torch.randn(count, generator=generator),
        finished=lengths < case.completion,
        on_policy=torch.ones(count, dtype=torch.bool),
        max_length=case.completion,
        prompt_lengths=torch.full((count,), case.prompt),
    )
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.0))
    update = UpdateSettings(minibatch_size=count, micro_batch_size=case.microbatch)
    return policy, optimizer, rows, update, reset_resident()


def _measure_iteration() -> Iterator[Row]:
    from flows import train

    trl: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        settings = {"run.iterations": TRL_ROUNDS * (STEPS + 1), "evaluate.prompts": "null", "storage.root": folder}
        overrides = [f"{key}={value}" for key, value in {**settings, "policy.model": MODEL}.items()]
        config = read_config(CHECKOUT / "configs" / "smollm2_sums.yaml", overrides)
        timings = Timings(lambda: trl.extend(peers.submit(_trl_steps, config).result()), clock=time.process_time)
        train(config, on_iteration=timings, progress=False)
    what = "iteration of smollm2_sums, 4 x 8 rows of 12 tokens"
    yield Row(
        what=what, unit="s", ours=tuple(timings.iterations), peer="TRL GRPOTrainer step", theirs=tuple(trl), at_most=0.5
    )


def _trl_steps(config: RunConfig) -> list[float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return step_seconds(build_trainer(config, Path(folder), STEPS + 1), clock=time.process_time)
