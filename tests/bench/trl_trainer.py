"""TRL's GRPOTrainer at the settings of a configuration of this project, and random models with a large vocabulary."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Value, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    logging,
)
from trl import GRPOConfig, GRPOTrainer

from configs.rollouts import TextRolloutSection
from configs.schema import RunConfig
from configs.training import UpdateSection
from data.recipes.text import build_tokenizer, save_tiny_text_model
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rollouts.messages import read_messages, write_messages
from tasks.prompts.read import read_prompts

LARGE_VOCABULARY = 151_936
"""That of the released Qwen3."""


def large_tokenizer() -> Any:
    """Return the tokenizer of the shipped text model with words up to the large vocabulary."""
    tokenizer = build_tokenizer()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] |= {f"word {place}": place for place in range(len(tokenizer), LARGE_VOCABULARY)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    return tokenizer


def write_large_vocabulary_model(folder: Path, *, hidden: int, intermediate: int, layers: int) -> None:
    """Write a Qwen3 of random weights, with 4 heads of a quarter of its width, and the large vocabulary."""
    tokenizer = large_tokenizer()
    config = Qwen3Config(
        vocab_size=LARGE_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    save_tiny_text_model(Qwen3ForCausalLM(config), tokenizer, folder)


def build_trainer(config: RunConfig, folder: str | Path, steps: int) -> Any:
    """A trainer with the configuration's model, prompts, rewards and settings.

    Args:
        folder: where it may write.
        steps: optimizer steps of `trainer.train()`, each with rollouts of its own.
    """
    logging.disable_progress_bar()
    prompts, of_images = str(config.data.prompts), str(config.data.prompts).endswith(".parquet")
    model_class, processor_class = (
        (AutoModelForImageTextToText, AutoProcessor) if of_images else (AutoModelForCausalLM, AutoTokenizer)
    )
    trainer = GRPOTrainer(
        model=model_class.from_pretrained(config.policy.model, dtype=torch.float32),
        processing_class=processor_class.from_pretrained(config.policy.model),
        reward_funcs=[_as_trl_calls_it(build_reward(each.reward, each.settings)) for each in config.rewards],
        train_dataset=_rows_with_images(prompts, folder) if of_images else _text_rows(prompts),
        args=_settings(config, folder, steps),
        peft_config=_adapters(config),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _adapters(config: RunConfig) -> LoraConfig | None:
    lora = config.policy.lora
    if lora is None:
        return None
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _as_trl_calls_it(reward: Reward) -> Callable[..., list[float]]:
    def score(prompts: list[Any], completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        count, of_images = len(completions), "image" in columns
        batch = ScoringBatch(
            sample_ids=list(map(str, range(count))),
            prompts=["" if of_images else write_messages(each) for each in prompts],
            completions=[messages[0]["content"] for messages in completions],
            columns={name: columns[name] for name in ("answer", "box") if name in columns},
            source_images=[[image] for image in columns["image"]] if of_images else (),
        )
        return [float(each.value or 0.0) for each in reward.score(batch)]

    score.__name__ = reward.name
    return score


def _text_rows(prompts: str) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": read_messages(prompt.text) or [{"role": "user", "content": prompt.text}],
                "answer": prompt.columns["answer"],
            }
            for prompt in read_prompts(prompts).prompts
        ]
    )


def _rows_with_images(prompts: str, folder: str | Path) -> Dataset:
    rows = load_dataset("parquet", data_files=prompts, split="train", cache_dir=str(folder))
    features = {"prompt": [{"role": Value("string"), "content": [{"type": Value("string"), "text": Value("string")}]}]}

    def as_messages(row: dict[str, str]) -> dict[str, object]:
        text, _, rest = row["prompt"].partition("<image>")
        assert not rest, "the image comes last"
        content = [{"type": "text", "text": text}, {"type": "image", "text": None}]
        return {"prompt": [{"role": "user", "content": content}]}

    return rows.map(as_messages, features=Features(rows.features | features))


def _settings(config: RunConfig, folder: str | Path, steps: int) -> GRPOConfig:
    rollout, update = config.rollout, config.update
    assert isinstance(rollout, TextRolloutSection)
    assert isinstance(update, UpdateSection)
    return GRPOConfig(
        output_dir=str(folder),
        seed=config.run.seed,
        max_steps=steps,
        per_device_train_batch_size=update.micro_batch_size,
        gradient_accumulation_steps=config.rows_of("tokens") // update.micro_batch_size,
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
        reward_weights=[each.weight for each in config.rewards],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def loss_and_step(trainer: Any, prompts: Tensor, completions: Tensor, *, learning_rate: float) -> Callable[[], None]:
    """Return a step of AdamW on the trainer's loss of rows of ids, without padding and all in one microbatch."""
    trainer.current_gradient_accumulation_steps = 1
    model, count = trainer.model.train(), len(completions)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, count),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, learning_rate)

    def step() -> None:
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _StepEnds(TrainerCallback):
    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self.clock = clock

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        self.times.append(self.clock())


def step_seconds(trainer: Any, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Train, and return the seconds of each step but the first, rollouts included."""
    ends = _StepEnds(clock)
    trainer.add_callback(ends)
    trainer.train()
    return [end - begun for begun, end in pairwise(ends.times)]
