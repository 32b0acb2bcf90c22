"""One update of a random model, parity gate and optimizer step included, beside TRL's loss and the same step.

Each side has a process of its own. Its memory is what an update takes at its peak on top of libraries and weights:
activations, gradients and optimizer states. A group is one microbatch.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.bench.page import Row

VOCABULARIES = (16_512, 151_936)
# By group.
ROUNDS = {4: 7, 16: 5, 64: 3}
LENGTH = 64
LEARNING_RATE = 1e-9
PROMPT = "sort the letters of benchmark"

Build = Callable[[str, int], Callable[[], None]]


def measure() -> Iterator[Row]:
    """Alternate between the two processes of each vocabulary and group."""
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            build_model(vocabulary, folder)
            for group in ROUNDS:
                yield from _compared(vocabulary, group, folder)


def build_model(vocabulary: int, folder: str) -> None:
    """Write a Llama with random weights, and the tokenizer of the shipped text model with words up to this size."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from data.tiny_text import build_tokenizer, save_tiny_text_model

    tokenizer = build_tokenizer()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] |= {f"word {place}": place for place in range(len(tokenizer), vocabulary)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_tiny_text_model(LlamaForCausalLM(config), tokenizer, Path(folder))


def _compared(vocabulary: int, group: int, folder: str) -> Iterator[Row]:
    what = f"{group} rows of {LENGTH} tokens, vocabulary {vocabulary:,}"
    spawn = get_context("spawn")
    speeds: tuple[list[float], list[float]] = ([], [])
    peaks = [0.0, 0.0]
    with ProcessPoolExecutor(1, spawn) as here, ProcessPoolExecutor(1, spawn) as there:
        for counted in (False, *[True] * ROUNDS[group]):
            for side, (pool, build) in enumerate(((here, _our_update), (there, _trl_update))):
                seconds, peaks[side] = pool.submit(_timed, build, folder, group).result()
                if counted:
                    speeds[side].append(group * LENGTH / seconds)
    goal = vocabulary == VOCABULARIES[-1] and group == max(ROUNDS)
    yield Row(
        what=f"update, {what}",
        unit="tokens/s",
        ours=tuple(speeds[0]),
        peer="TRL loss and step",
        theirs=tuple(speeds[1]),
        at_least=1.0 if goal else None,
    )
    yield Row(
        what=f"its memory, {what}",
        unit="MB",
        ours=(peaks[0],),
        peer="TRL loss and step",
        theirs=(peaks[1],),
        at_most=0.5 if goal else None,
    )


def _timed(build: Build, folder: str, group: int) -> tuple[float, float]:
    """Seconds of one update in this process, and how many MB more than before the first one were resident at most."""
    step, before = _prepared(build, folder, group)
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun, _resident_mb("VmHWM") - before


@cache
def _prepared(build: Build, folder: str, group: int) -> tuple[Callable[[], None], float]:
    step = build(folder, group)
    # The peak begins anew: loading a model may have taken more than an update does.
    Path("/proc/self/clear_refs").write_text("5")
    return step, _resident_mb("VmRSS")


def _resident_mb(name: str) -> float:
    # getrusage would include the peak of the process that this one was started from.
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(found.split()[1]) * 1024 / 1e6


@cache
def _our_update(folder: str, group: int) -> Callable[[], None]:
    import torch

    from grpo_core.policies.causal_lm.policy import CausalLMPolicy
    from grpo_core.policies.causal_lm.settings import CausalLMSettings
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.records import TokenBatch, TrainingRows
    from grpo_core.update.optimizer import PolicyOptimizer
    from grpo_core.update.policy_update import update_policy
    from grpo_core.update.settings import OptimizerSettings, UpdateSettings

    torch.set_num_threads(1)
    settings, cpu = CausalLMSettings(max_completion_length=LENGTH), torch.device("cpu")
    policy = CausalLMPolicy.load(
        folder, settings, {"tokens": TrainingChoice(lora=None)}, dtype=torch.float32, device=cpu
    )
    model: Any = policy.trained.model
    ids = _completions(model.config.vocab_size, group)
    tokens = TokenBatch((PROMPT,) * group, ids, torch.ones_like(ids, dtype=torch.bool), 1.0)
    policy.prepare_for_update()
    with torch.no_grad():
        logprobs = policy.logprobs(tokens, entropy="none").logprobs
    rows = TrainingRows(
        sample_ids=tuple(map(str, range(group))),
        actions=tokens,
        rollout_logprobs=logprobs,
        advantages=torch.linspace(-1, 1, group),
        finished=torch.zeros(group, dtype=torch.bool),
        on_policy=torch.ones(group, dtype=torch.bool),
        max_length=LENGTH,
    )
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(LEARNING_RATE))
    update = UpdateSettings(minibatch_size=group, micro_batch_size=group)

    def step() -> None:
        update_policy(policy, optimizer, rows, update, seed=0)

    return step


@cache
def _trl_update(folder: str, group: int) -> Callable[[], None]:
    import torch

    from tests.bench.text_iteration import build_trainer, configured

    torch.set_num_threads(1)
    config = configured(folder, f"{folder}/trl", prompts=1, group_size=group, microbatch=group)
    trainer = build_trainer(config, config.storage.root, 1)
    trainer.current_gradient_accumulation_steps = 1
    model, tokenizer = trainer.model.train(), trainer.processing_class
    messages = [[{"role": "user", "content": PROMPT}]] * group
    prompts = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = _completions(model.config.vocab_size, group)
    inputs = {
        "prompt_ids": prompts["input_ids"],
        "prompt_mask": prompts["attention_mask"],
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "advantages": torch.linspace(-1, 1, group),
        "num_items_in_batch": torch.tensor(ids.numel()),
    }
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    def step() -> None:
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _completions(vocabulary: int, group: int) -> Any:
    import torch

    return torch.randint(vocabulary, (group, LENGTH), generator=torch.Generator().manual_seed(0))
