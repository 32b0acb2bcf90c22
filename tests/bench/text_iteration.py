"""The tiny text model beside TRL's GRPOTrainer at the same settings: seconds of an iteration, and learning curves.

`make figures ONLY=tiny_text` trains it here and in TRL with the same model, prompts, reward and three seeds, and
writes docs/learning_curves.png and its table in docs/performance.md. The two draw their samples from other random
streams, so their curves agree in distribution, not point by point.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import polars as pl
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from configs.loader import read_config
from configs.rollouts import TextRolloutSection
from configs.schema import RunConfig
from configs.training import UpdateSection
from grpo_core.rewards.samples import ScoringBatch
from grpo_core.rewards.text.rules import AnswerReward
from tasks.process import CHECKOUT
from tasks.prompts.read import read_prompts
from tasks.reports.text import markdown_table
from tests.bench.page import ROUNDS, STEPS, Row, Timings

CONFIG = CHECKOUT / "configs" / "tiny_text.yaml"


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
    assert config.data.prompts is not None
    rows = [
        {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.columns["answer"]}
        for prompt in read_prompts(config.data.prompts).prompts
    ]
    logging.disable_progress_bar()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.policy.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(config.policy.model),
        reward_funcs=answer_reward,
        train_dataset=Dataset.from_list(rows),
        args=trl_settings(config, folder, steps),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trl_settings(config: RunConfig, folder: str | Path, steps: int, **more: Any) -> GRPOConfig:
    """The settings of a configuration as TRL names them.

    Args:
        folder: where it may write.
        steps: optimizer steps, each with rollouts of its own.
        more: settings that the configuration does not have under another name.
    """
    rollout, update = config.rollout, config.update
    assert isinstance(rollout, TextRolloutSection)
    assert isinstance(update, UpdateSection)
    microbatches = config.rows_of("tokens") // update.micro_batch_size
    return GRPOConfig(
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
        **more,
    )


class _StepEnds(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        self.times.append(time.perf_counter())


def step_seconds(config: RunConfig, steps: int) -> list[float]:
    """Seconds of each of `steps` trainer steps, rollouts included, after one that does not count."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return timed_steps(build_trainer(config, folder, steps + 1))


def timed_steps(trainer: Any) -> list[float]:
    """Train, and return the seconds of each step but the first."""
    ends = _StepEnds()
    trainer.add_callback(ends)
    trainer.train()
    return [end - begun for begun, end in pairwise(ends.times)]


LENGTH = 64


def build_model(folder: Path) -> None:
    """Write a Llama of 4.5 million random parameters, with the tokenizer of the shipped text model."""
    from data.recipes.text import TinyTextRecipe, build_model, build_tokenizer, save_tiny_text_model

    tokenizer = build_tokenizer()
    recipe = TinyTextRecipe(hidden_size=256, layers=6, intermediate_size=704)
    save_tiny_text_model(build_model(recipe, tokenizer), tokenizer, folder)


def build_large_vocabulary(folder: Path) -> None:
    """Write a Qwen3 of 42 million random parameters with the vocabulary of the released ones."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from data.recipes.text import save_tiny_text_model
    from tests.bench.policy import VOCABULARIES, tokenizer_of

    tokenizer = tokenizer_of(VOCABULARIES[-1])
    config = Qwen3Config(
        vocab_size=VOCABULARIES[-1],
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    save_tiny_text_model(Qwen3ForCausalLM(config), tokenizer, folder)


@dataclass(frozen=True)
class Case:
    """A model, and the sizes of an iteration.

    Attributes:
        model: what it is, for people.
        build: writes it into a folder.
        prompts, group_size, microbatch: of an iteration.
        rounds: how often the peers run.
        beside_trl: the goal, as a multiple of TRL's step.
        beside_least: the goal, as a multiple of generate() and the passes; None without one.
    """

    model: str
    build: Callable[[Path], None]
    prompts: int
    group_size: int
    microbatch: int
    rounds: int
    beside_trl: float
    beside_least: float | None

    @property
    def what(self) -> str:
        """What is measured, with its sizes."""
        return f"text iteration, {self.prompts * self.group_size} rows of {LENGTH} tokens, {self.model}"

    def configured(self, folder: str) -> RunConfig:
        """The configuration of all sides, for a folder that has the model."""
        return configured(
            f"{folder}/model",
            f"{folder}/runs",
            prompts=self.prompts,
            group_size=self.group_size,
            microbatch=self.microbatch,
            rounds=self.rounds,
        )


CASES = (
    Case("4.5 M parameters", build_model, 8, 8, 16, ROUNDS, 1.0, 1.1),
    Case("42 M parameters, vocabulary 151,936", build_large_vocabulary, 4, 8, 16, 2, 0.5, None),
)


@cache
def configured(
    model: str, root: str, *, prompts: int, group_size: int, microbatch: int, rounds: int = ROUNDS
) -> RunConfig:
    """The configuration of all sides: one optimizer step an iteration, no held-out prompts, hardly any learning."""
    settings = {
        "run.name": "bench",
        "run.iterations": rounds * (STEPS + 1),
        "storage.root": root,
        "policy.model": model,
        "rollout.prompts_per_iteration": prompts,
        "rollout.prompts_per_batch": prompts,
        "rollout.group_size": group_size,
        "rollout.max_completion_length": LENGTH,
        "update.learning_rate": 1e-6,
        "update.minibatch_size": prompts * group_size,
        "update.micro_batch_size": microbatch,
        "evaluate.prompts": "null",
    }
    return read_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])


def measure() -> Iterator[Row]:
    """An iteration of a text model through the real flow.

    The least is one generate() of transformers, and one forward and backward pass of the same model over the same
    microbatches, without a reward, an optimizer, or anything that is kept. The peers run in a process of their own
    while the flow waits in its `on_iteration` hook.
    """
    for case in CASES:
        yield from _measure(case)


def _measure(case: Case) -> Iterator[Row]:
    from flows import train

    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        case.build(Path(folder, "model"))

        def run_peers() -> None:
            timings.steps += peers.submit(_trl_steps, case, folder).result()
            for name, seconds in peers.submit(_least, case, folder).result().items():
                timings.least.setdefault(name, []).extend(seconds)

        timings = Timings(run_peers)
        train(case.configured(folder), on_iteration=timings, progress=False)
    ours, stages, what = tuple(timings.iterations), timings.stages, case.what
    least = {name: tuple(seconds) for name, seconds in timings.least.items()}
    both = tuple(map(sum, zip(*least.values(), strict=True)))
    trl = tuple(timings.steps)
    yield Row(what=what, unit="s", ours=ours, peer="TRL GRPOTrainer step", theirs=trl, at_most=case.beside_trl)
    yield Row(what=what, unit="s", ours=ours, peer=" + ".join(least), theirs=both, at_most=case.beside_least)
    for stage, name in zip(("rollouts", "update"), least, strict=True):
        yield Row(what=f"{stage} of it", unit="s", ours=tuple(stages[stage]), peer=name, theirs=least[name])


def _trl_steps(case: Case, folder: str) -> list[float]:
    return step_seconds(case.configured(folder), STEPS)


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def _least(case: Case, folder: str) -> dict[str, list[float]]:
    """Seconds of generate() and of the passes over its rows, as many as the flow has counted iterations."""
    torch.set_num_threads(1)
    config = case.configured(folder)
    model, tokenizer = _loaded(config.policy.model)
    assert config.data.prompts is not None
    messages = [
        [{"role": "user", "content": each.text}] for each in read_prompts(config.data.prompts).prompts[: case.prompts]
    ]
    rows = [message for message in messages for _ in range(case.group_size)]
    prompts = tokenizer.apply_chat_template(
        rows, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    width = prompts["input_ids"].shape[1]
    generating, passing = [], []
    for _ in range(STEPS + 1):
        begun = time.perf_counter()
        ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=LENGTH)
        between = time.perf_counter()
        for part in ids.split(case.microbatch):
            mask = (part != tokenizer.pad_token_id).long()
            logits = model(input_ids=part, attention_mask=mask, logits_to_keep=part.shape[1] - width + 1).logits
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, part[:, width:, None])
            (-chosen.sum() / len(ids)).backward()
        model.zero_grad()
        generating.append(between - begun)
        passing.append(time.perf_counter() - between)
    return {"transformers generate": generating[1:], "forward and backward": passing[1:]}


FIGURE = CHECKOUT / "docs" / "learning_curves.png"
SEEDS = (0, 1, 2)


def shipped(seed: int, root: str) -> RunConfig:
    """The shipped configuration without its evaluation."""
    overrides = [f"run.seed={seed}", f"run.name=seed{seed}", f"storage.root={root}", "evaluate.prompts=null"]
    return read_config(CONFIG, overrides)


def train_here(seed: int) -> list[float]:
    """The mean training reward of each iteration of a run, from its own tables."""
    from flows.training.train import train

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(train(shipped(seed, root)))
        table = pl.read_parquet(f"{root}/seed{seed}/iteration_*/metrics.parquet").sort("iteration")
        return table.filter(pl.col("metric") == "reward")["value"].to_list()


def train_with_trl(seed: int) -> list[float]:
    """The mean training reward of each step of TRL's trainer at the settings of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = shipped(seed, folder)
        trainer = build_trainer(config, folder, config.run.iterations)
        trainer.train()
        return [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]


def draw(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    what: str = "tiny text model",
    to: Path = FIGURE,
    names: tuple[str, str] = ("this project", "TRL 1.16 GRPOTrainer"),
) -> None:
    """Plot the rewards of each seed as a thin line, their mean as a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=150)
    for curves, name, colour in ((ours, names[0], "#0b6e4f"), (theirs, names[1], "#c8553d")):
        places = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(places, curve, color=colour, linewidth=0.8, alpha=0.35)
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(places, means, color=colour, linewidth=2.2, label=name)
    axes.set(xlabel="iteration", ylabel="mean training reward", title=f"{what}, {len(ours)} seeds each")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(to)
    plt.close(figure)


def table(_name: str) -> list[str]:
    """Train in turn, write the figure and return the table."""
    torch.set_num_threads(1)
    ours, theirs = [], []
    for seed in SEEDS:
        ours.append(train_here(seed))
        theirs.append(train_with_trl(seed))
    draw(ours, theirs)
    rows = []
    for name, curves in (("this project", ours), ("TRL 1.16", theirs)):
        first = statistics.fmean(reward for curve in curves for reward in curve[:3])
        rows.append((name, f"{first:.3f}", ", ".join(f"{statistics.fmean(curve[-5:]):.3f}" for curve in curves)))
    return markdown_table(("", "mean reward, first 3 iterations", "last 5 iterations, seeds 0, 1, 2"), rows)
