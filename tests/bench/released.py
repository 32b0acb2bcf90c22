"""A released language model: its update with prompts computed once a group, and an iteration beside TRL's step."""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from configs.loader import read_config
from configs.schema import RunConfig
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import TrainingRows
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tasks.process import CHECKOUT
from tests.bench.page import STEPS, Row, Timings
from tests.bench.policy import reset_resident, resident_mb
from tests.bench.trl_trainer import build_trainer, step_seconds

MODEL = CHECKOUT / "weights" / "SmolLM2-135M-Instruct"
GROUP, ROUNDS, TRL_ROUNDS = 8, 3, 2


class Case(NamedTuple):
    """Groups of completions of a prompt, and the goals beside whole rows.

    Attributes:
        prompt, completion: ids; a ragged case has completions from an eighth of that on, of which most are short.
        groups, microbatch: groups of GROUP rows, and rows of a microbatch.
        seconds, memory: goals, as shares of what whole rows take.
    """

    prompt: int
    completion: int
    groups: int
    microbatch: int
    seconds: float
    memory: float | None = None
    ragged: bool = False

    @property
    def what(self) -> str:
        """The case, for people."""
        lengths = f"{self.completion // 8} to {self.completion}" if self.ragged else f"{self.completion}"
        return f"{self.groups} x {GROUP} rows, prompt {self.prompt}, completion {lengths}"


CASES = (
    Case(28, 12, 4, 32, 0.55),
    Case(53, 48, 2, 16, 0.67),
    Case(300, 100, 1, 8, 0.45, 0.5),
    Case(20, 128, 1, 8, 1.0, ragged=True),
)


def measure() -> Iterator[Row]:
    """SmolLM2-135M-Instruct: an update beside whole rows, an iteration beside TRL.

    CPU seconds of one thread, in turn. `make smollm2` makes the model where the hub cannot be reached.
    """
    if not (MODEL / "config.json").exists():
        yield Row(what="released model", unit="s", ours=(), left_out=f"no {MODEL.name}; `make smollm2` makes it")
        return
    for case in CASES:
        yield from _measure_update(case)
    yield from _measure_iteration()


def _measure_update(case: Case) -> Iterator[Row]:
    spawn, what, peer = get_context("spawn"), f"update, {case.what}", "whole rows"
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with ProcessPoolExecutor(1, spawn) as shared, ProcessPoolExecutor(1, spawn) as whole:
        for counted in (False, *[True] * ROUNDS):
            for shares, pool in ((True, shared), (False, whole)):
                taken = pool.submit(_update, case, shares).result()
                if counted:
                    found[shares].append(taken)
    (ours, own), (theirs, other) = (zip(*found[shares], strict=True) for shares in (True, False))
    yield Row(what=what, unit="s", ours=tuple(ours), peer=peer, theirs=tuple(theirs), at_most=case.seconds)
    if case.memory is not None:
        mine, peak = (max(own),), (max(other),)
        yield Row(what=f"its memory, {case.what}", unit="MB", ours=mine, peer=peer, theirs=peak, at_most=case.memory)


def _update(case: Case, shares: bool) -> tuple[float, float]:
    """Return the CPU seconds of an update, and the MB that it takes at most above the loaded model."""
    policy, optimizer, rows, before = _prepared(case)
    policy.trained.shares_prompts = shares
    settings = UpdateSettings(minibatch_size=len(rows), micro_batch_size=case.microbatch)
    begun = time.process_time()
    update_policy(policy, optimizer, rows, settings, seed=0)
    return time.process_time() - begun, resident_mb("VmHWM") - before


@cache
def _prepared(case: Case) -> tuple[CausalLMPolicy, PolicyOptimizer, TrainingRows, float]:
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
    return policy, PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.0)), rows, reset_resident()


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
