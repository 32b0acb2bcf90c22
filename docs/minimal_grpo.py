"""GRPO in one loop, with grpo_core alone: no server, no run folder, no configuration file.

    python docs/minimal_grpo.py text     # a language model learns to sort letters: half a minute on a CPU
    python docs/minimal_grpo.py image    # a GLM-Image learns to draw what captions say: two minutes

The same loop trains both: it knows nothing about the kind of policy. The pipeline (flows/training/train.py) makes the
same calls with the same numbers, and stores what passes between them.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from grpo_core.advantages.compute import compute_advantages
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.trial import try_policy
from grpo_core.rewards.registry import RewardTerm
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rewards.similarity.pairs import SsimReward
from grpo_core.rewards.text.rules import AnswerReward
from grpo_core.rollouts.records import GroupRequest, Output
from grpo_core.seeds import derive_seed
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import UpdateResult

DATA = Path(__file__).resolve().parents[1] / "data"
Prompt = Mapping[str, str]  # one line of a prompt file: the prompt, and columns that only the reward reads


@dataclass(frozen=True)
class Task:
    """Name what the loop trains, on which prompts, with which reward."""

    policy: Policy
    prompts: Sequence[Prompt]
    score: Callable[[Prompt, Output], float]
    prompts_per_iteration: int
    learning_rate: float
    update: UpdateSettings


def grpo_step(
    task: Task, optimizer: PolicyOptimizer, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], seed: int
) -> tuple[float, UpdateResult]:
    """Run one iteration: sample, score, compare, update. Returns the mean reward and the update's metrics."""
    # 1. Sample a group of outputs for every prompt. Each token keeps the log-prob it was sampled with.
    groups = list(collect_rollouts(task.policy, requests, prompts_per_batch=len(requests)))
    # 2. Score every output with a number; nothing else about it reaches the training.
    scores = [[task.score(p, output) for output in group.outputs] for p, group in zip(prompts, groups, strict=True)]
    rewards = torch.tensor(scores, dtype=torch.float64)
    # 3. Compare siblings: advantage = (reward - mean of the group) / (std of the group + eps).
    #    An output better than its siblings becomes likelier, a worse one less likely; no value network is needed.
    result = compute_advantages(rewards.unsqueeze(-1), [RewardTerm()], AdvantageSettings())
    # 4. Join tokens, log-probs and advantages: one row per output.
    rows = join_groups(groups, result.advantages)
    # 5. Update. First the log-probs are computed again and have to equal those recorded while sampling (parity gate).
    #    Then each minibatch makes one optimizer step on -min(ratio A, clip(ratio) A), plus kl_coef times the KL to
    #    the model as it was before training; ratio = exp(logprobs - old_logprobs) is 1 at the first step.
    update = update_policy(task.policy.components["tokens"], optimizer, rows, task.update, seed=seed)
    return float(rewards.mean()), update


def train(task: Task, *, iterations: int, group_size: int = 8, seed: int = 0) -> Iterator[tuple[float, UpdateResult]]:
    """Repeat the step with other prompts each time, and yield what each step returns."""
    parameters = task.policy.components["tokens"].trainable_parameters()
    optimizer = PolicyOptimizer(parameters, OptimizerSettings(task.learning_rate))
    for iteration in range(1, iterations + 1):
        chosen = random.Random(f"{seed} {iteration}").sample(task.prompts, task.prompts_per_iteration)
        requests = [
            GroupRequest(
                prompt=prompt["prompt"],
                sample_ids=tuple(f"i{iteration}.p{place}.s{sibling}" for sibling in range(group_size)),
                # Every sample has its own random stream, so it does not depend on the batch it is sampled in.
                seeds=tuple(derive_seed(seed, iteration, place, sibling) for sibling in range(group_size)),
                # Siblings share the noise of the image decoder: their rewards differ by their tokens only.
                noise_seeds=(derive_seed(seed, iteration, place),) * group_size,
            )
            for place, prompt in enumerate(chosen)
        ]
        yield grpo_step(task, optimizer, chosen, requests, derive_seed(seed, iteration, "minibatches"))


def read_prompts(name: str) -> list[Prompt]:
    """Read a prompt file of data/prompts."""
    return [json.loads(line) for line in (DATA / "prompts" / name).read_text(encoding="utf-8").splitlines()]


def text_task() -> Task:
    """Train every weight of a tiny Llama; the reward is how close a completion is to the answer."""
    model = str(DATA / "models" / "tiny-text")
    policy = CausalLMPolicy.load(
        model, CausalLMSettings(max_completion_length=24), {"tokens": TrainingChoice(lora=None)}
    )
    # Siblings have a prompt in common, which is computed once where a trial of the model gives the same.
    try_policy("causal_lm", model, policy)

    def score(prompt: Prompt, completion: Output) -> float:
        batch = ScoringBatch(
            ["0"], [prompt["prompt"]], columns={"answer": [prompt["answer"]]}, completions=[str(completion)]
        )
        return AnswerReward().score(batch)[0].value or 0.0

    update = UpdateSettings(micro_batch_size=128)
    return Task(policy, read_prompts("letters_train.jsonl"), score, 16, learning_rate=1e-3, update=update)


def image_task() -> Task:
    """Train adapters of a tiny GLM-Image; the reward is the structural similarity to the described image."""
    policy = GlmImagePolicy.load(
        str(DATA / "models" / "tiny-glm-image"),
        GlmImageSettings(height=64, width=64, num_inference_steps=4, guidance_scale=1.0),
        {"tokens": TrainingChoice(lora=LoraSettings(rank=16, alpha=32.0))},
    )

    def score(prompt: Prompt, image: Output) -> float:
        assert isinstance(image, Image.Image)
        target = Image.open(DATA / "targets" / prompt["target"]).convert("RGB")
        return (
            SsimReward().score(ScoringBatch(["0"], [prompt["prompt"]], images=[image], targets=[target]))[0].value
            or 0.0
        )

    update = UpdateSettings(minibatch_size=48, micro_batch_size=48, kl_coef=0.01)
    return Task(policy, read_prompts("shapes_train.jsonl"), score, 12, learning_rate=2e-3, update=update)


def main() -> None:
    """Train the model named on the command line and print a line per iteration."""
    task = {"text": text_task, "image": image_task}[sys.argv[1] if len(sys.argv) > 1 else "text"]()
    for iteration, (reward, update) in enumerate(train(task, iterations=40), start=1):
        metrics = update.metrics()
        print(
            f"iteration {iteration}: reward {reward:.3f}, loss {metrics['loss']:+.4f}, entropy {metrics['entropy']:.2f}"
        )


if __name__ == "__main__":
    main()
