"""An iteration of a text model beside a step of TRL's GRPOTrainer at the same settings."""

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from configs.loader import read_config
from configs.schema import RunConfig
from data.recipes.text import TinyTextRecipe, build_model, build_tokenizer, save_tiny_text_model
from tasks.process import CHECKOUT
from tasks.prompts.read import read_prompts
from tests.bench.page import ROUNDS, STEPS, Row, Timings
from tests.bench.trl_trainer import build_trainer, step_seconds, write_large_vocabulary_model

LENGTH = 64


def write_small_model(folder: Path) -> None:
    """Write a Llama of 4.5 million random parameters, with the tokenizer of the shipped text model."""
    tokenizer = build_tokenizer()
    recipe = TinyTextRecipe(hidden_size=256, layers=6, intermediate_size=704)
    save_tiny_text_model(build_model(recipe, tokenizer), tokenizer, folder)


class Case(NamedTuple):
    """A model, the sizes of an iteration, and the goals.

    Attributes:
        model: what it is, for people.
        write: writes it into a folder.
        prompts, group_size, microbatch: of an iteration.
        rounds: how often the peers run.
        beside_trl: the goal, as a multiple of TRL's step.
        beside_least: the goal, as a multiple of generate() and the passes, which are measured only where it is given.
    """

    model: str
    write: Callable[[Path], None]
    prompts: int
    group_size: int
    microbatch: int
    rounds: int
    beside_trl: float
    beside_least: float | None

    def configured(self, folder: str) -> RunConfig:
        """The configuration of all sides, for a folder that has the model."""
        return text_config(folder, self.prompts, self.group_size, self.microbatch, self.rounds)


CASES = (
    Case("4.5 M parameters", write_small_model, 8, 8, 16, ROUNDS, 1.0, 1.1),
    Case(
        "42 M parameters, vocabulary 151,936",
        partial(write_large_vocabulary_model, hidden=256, intermediate=768, layers=4),
        *(4, 8, 16, 2),
        beside_trl=0.5,
        beside_least=None,
    ),
)


@cache
def text_config(folder: str, prompts: int, group_size: int, microbatch: int, rounds: int) -> RunConfig:
    """The configuration of all sides: one optimizer step an iteration, no held-out prompts, hardly any learning."""
    settings = {
        "run.name": "bench",
        "run.iterations": rounds * (STEPS + 1),
        "storage.root": f"{folder}/runs",
        "policy.model": f"{folder}/model",
        "rollout.prompts_per_iteration": prompts,
        "rollout.prompts_per_batch": prompts,
        "rollout.group_size": group_size,
        "rollout.max_completion_length": LENGTH,
        "update.learning_rate": 1e-6,
        "update.minibatch_size": prompts * group_size,
        "update.micro_batch_size": microbatch,
        "evaluate.prompts": "null",
    }
    return read_config(CHECKOUT / "configs" / "tiny_text.yaml", [f"{key}={value}" for key, value in settings.items()])


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

    trl: list[float] = []
    least: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        case.write(Path(folder, "model"))
        config = case.configured(folder)

        def run_peers() -> None:
            trl.extend(peers.submit(_trl_steps, config).result())
            if case.beside_least is not None:
                least.extend(peers.submit(_least, config).result())

        timings = Timings(run_peers)
        train(config, on_iteration=timings, progress=False)
    what = f"text iteration, {case.prompts * case.group_size} rows of {LENGTH} tokens, {case.model}"
    row = partial(Row, what=what, unit="s", ours=tuple(timings.iterations))
    yield row(peer="TRL GRPOTrainer step", theirs=tuple(trl), at_most=case.beside_trl)
    if least:
        peer = "transformers generate + forward and backward"
        yield row(peer=peer, theirs=tuple(least), at_most=case.beside_least)


def _trl_steps(config: RunConfig) -> list[float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return step_seconds(build_trainer(config, folder, STEPS + 1))


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def _least(config: RunConfig) -> list[float]:
    """Seconds of generate() and of the passes over its rows, as many as the flow has counted iterations."""
    torch.set_num_threads(1)
    model, tokenizer = _loaded(config.policy.model)
    rollout, microbatch = config.rollout, config.updates["tokens"].micro_batch_size
    prompts = read_prompts(str(config.data.prompts)).prompts[: rollout.prompts_per_iteration]
    rows = [[{"role": "user", "content": each.text}] for each in prompts for _ in range(rollout.group_size)]
    encoded = tokenizer.apply_chat_template(
        rows, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    width = encoded["input_ids"].shape[1]
    seconds = []
    for _ in range(STEPS + 1):
        begun = time.perf_counter()
        ids = model.generate(**encoded, do_sample=True, top_k=0, max_new_tokens=LENGTH)
        for part in ids.split(microbatch):
            mask = (part != tokenizer.pad_token_id).long()
            logits = model(input_ids=part, attention_mask=mask, logits_to_keep=part.shape[1] - width + 1).logits
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, part[:, width:, None])
            (-chosen.sum() / len(ids)).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]
