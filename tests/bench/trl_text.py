"""TRL's GRPOTrainer at the settings of a configuration for text, as the benchmarks run it."""

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from configs.schema import RunConfig
from configs.sections import TextRolloutSection
from configs.training import UpdateSection
from grpo_core.rewards.reward import ScoringBatch
from grpo_core.rewards.text.answer import AnswerReward
from tasks.prompts.read import read_prompts


def answer_reward(
    prompts: list[object], completions: list[list[dict[str, str]]], answer: list[str], **others: object
) -> list[float]:
    """This project's answer reward behind TRL's signature."""
    batch = ScoringBatch(
        sample_ids=[str(place) for place in range(len(answer))],
        prompts=[str(prompt) for prompt in prompts],
        completions=[messages[0]["content"] for messages in completions],
        columns={"answer": answer},
    )
    return [float(score.value or 0.0) for score in AnswerReward().score(batch)]


def build_trainer(config: RunConfig, folder: str | Path, steps: int) -> Any:
    """A trainer with the configuration's model, prompts, reward and settings.

    Args:
        folder: where it may write.
        steps: optimizer steps of `trainer.train()`, each with rollouts of its own.
    """
    rollout, update = config.rollout, config.update
    assert isinstance(rollout, TextRolloutSection)
    assert isinstance(update, UpdateSection)
    assert config.data.prompts is not None
    rows = [
        {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.columns["answer"]}
        for prompt in read_prompts(config.data.prompts).prompts
    ]
    microbatches = config.rows_of("tokens") // update.micro_batch_size
    settings = GRPOConfig(
        output_dir=str(folder),
        seed=config.run.seed,
        max_steps=steps,
        per_device_train_batch_size=update.micro_batch_size,
        gradient_accumulation_steps=microbatches,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        learning_rate=update.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=update.betas[0],
        adam_beta2=update.betas[1],
        adam_epsilon=update.eps,
        weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm,
        loss_type=update.loss,
        epsilon=update.clip_range,
        beta=update.kl_coef,
        scale_rewards=config.advantages.scale,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    logging.disable_progress_bar()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.policy.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(config.policy.model),
        reward_funcs=answer_reward,
        train_dataset=Dataset.from_list(rows),
        args=settings,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _StepEnds(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        self.times.append(time.perf_counter())


def step_seconds(config: RunConfig, steps: int) -> list[float]:
    """Seconds of each of `steps` trainer steps, rollouts included, after one that does not count."""
    torch.set_num_threads(1)
    ends = _StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, folder, steps + 1)
        trainer.add_callback(ends)
        trainer.train()
    return [end - begun for begun, end in pairwise(ends.times)]
