"""An iteration of a text model through the real flow, beside TRL's trainer and beside the least that has to be done.

The least is one generate() of transformers, and one forward and backward pass of the same model over the same
microbatches, without a reward, an optimizer, or anything that is kept. The peers run in a process of their own while
the flow waits in its `on_iteration` hook.
"""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.table import Row
from tests.bench.timings import ROUNDS, STEPS, Timings

if TYPE_CHECKING:
    from configs.schema import RunConfig

PROMPTS, GROUP_SIZE, MICROBATCH, LENGTH = 8, 8, 16, 64
WHAT = f"text iteration, {PROMPTS * GROUP_SIZE} rows of {LENGTH} tokens, 4.5 M parameters"


def build_model(folder: Path) -> None:
    """Write a Llama of 4.5 million random parameters, with the tokenizer of the shipped text model."""
    from data.tiny_text import TinyTextRecipe, build_model, build_tokenizer, save_tiny_text_model

    tokenizer = build_tokenizer()
    recipe = TinyTextRecipe(hidden_size=256, layers=6, intermediate_size=704)
    save_tiny_text_model(build_model(recipe, tokenizer), tokenizer, folder)


@cache
def configured(
    model: str, root: str, *, prompts: int = PROMPTS, group_size: int = GROUP_SIZE, microbatch: int = MICROBATCH
) -> "RunConfig":
    """The configuration of all sides: one optimizer step an iteration, no held-out prompts, hardly any learning."""
    from configs.loader import read_config
    from tasks.checkout import CHECKOUT

    settings = {
        "run.name": "bench",
        "run.iterations": ROUNDS * (STEPS + 1),
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
    return read_config(CHECKOUT / "configs" / "tiny_text.yaml", [f"{key}={value}" for key, value in settings.items()])


def measure() -> Iterator[Row]:
    """Alternate between iterations of the flow and steps of both peers."""
    from flows.functions import train

    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        model, root = f"{folder}/model", f"{folder}/runs"
        build_model(Path(model))

        def run_peers() -> None:
            timings.steps += peers.submit(_trl_steps, model, root).result()
            for name, seconds in peers.submit(_least, model, root).result().items():
                timings.least.setdefault(name, []).extend(seconds)

        timings = Timings(run_peers)
        train(configured(model, root), on_iteration=timings, progress=False)
    ours, stages = tuple(timings.iterations), timings.stages
    least = {name: tuple(seconds) for name, seconds in timings.least.items()}
    both = tuple(map(sum, zip(*least.values(), strict=True)))
    yield Row(what=WHAT, unit="s", ours=ours, peer="TRL GRPOTrainer step", theirs=tuple(timings.steps), at_most=0.75)
    yield Row(what=WHAT, unit="s", ours=ours, peer=" + ".join(least), theirs=both, at_most=1.1)
    for stage, name in zip(("rollouts", "update"), least, strict=True):
        yield Row(what=f"{stage} of it", unit="s", ours=tuple(stages[stage]), peer=name, theirs=least[name])


def _trl_steps(model: str, root: str) -> list[float]:
    from tests.bench.trl_text import step_seconds

    return step_seconds(configured(model, root), STEPS)


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def _least(folder: str, root: str) -> dict[str, list[float]]:
    """Seconds of generate() and of the passes over its rows, as many as the flow has counted iterations."""
    import torch

    from tasks.prompts.read import read_prompts

    torch.set_num_threads(1)
    (model, tokenizer), config = _loaded(folder), configured(folder, root)
    assert config.data.prompts is not None
    messages = [
        [{"role": "user", "content": each.text}] for each in read_prompts(config.data.prompts).prompts[:PROMPTS]
    ]
    rows = [message for message in messages for _ in range(GROUP_SIZE)]
    prompts = tokenizer.apply_chat_template(
        rows, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    width = prompts["input_ids"].shape[1]
    generating, passing = [], []
    for _ in range(STEPS + 1):
        begun = time.perf_counter()
        ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=LENGTH)
        between = time.perf_counter()
        for part in ids.split(MICROBATCH):
            mask = (part != tokenizer.pad_token_id).long()
            logits = model(input_ids=part, attention_mask=mask, logits_to_keep=part.shape[1] - width + 1).logits
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, part[:, width:, None])
            (-chosen.sum() / len(ids)).backward()
        model.zero_grad()
        generating.append(between - begun)
        passing.append(time.perf_counter() - between)
    return {"transformers generate": generating[1:], "forward and backward": passing[1:]}
