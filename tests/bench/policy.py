"""What a policy computes: sampling of GLM-Image, and one update of a random text model, each beside its peer."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import data
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import GroupRequest, TrainingRows
from grpo_core.seeds import make_generator
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.bench.page import Row, alternate
from tests.bench.text_iteration import text_config
from tests.bench.trl_trainer import (
    LARGE_VOCABULARY,
    build_trainer,
    loss_and_step,
    write_large_vocabulary_model,
)

MODELS = Path(data.__file__).parent / "models"
GLM_IMAGE = str(MODELS / "tiny-glm-image")
SHAPES = ("circle", "square", "cross", "triangle")
SHAPE_PROMPTS = tuple(f"a {colour} {shape}" for colour in ("red", "blue") for shape in SHAPES)
# Rows, side of the image in pixels, rounds, and how many times generate()'s tokens per second are the goal.
CASES = ((8, 64, 15, 1.5), (64, 64, 7, 2.0), (8, 256, 3, 1.5), (64, 256, 2, 2.0))
IMAGES = 8


def measure_sampling() -> Iterator[Row]:
    """Sampling tokens and decoding images.

    The shipped tiny models, so what is compared is what a token costs beside its matrix products; with adapters of the
    shipped configurations here, and without any on the other side.
    """
    for rows, side, rounds, goal in CASES:
        yield _tokens(rows, side, rounds, goal)
    yield _images()


def _policy(side: int) -> GlmImagePolicy:
    settings = GlmImageSettings(side, side, num_inference_steps=4, guidance_scale=1.0)
    return GlmImagePolicy.load(GLM_IMAGE, settings, {"tokens": TrainingChoice(lora=LoraSettings(16, 32.0))})


def _bare_pipeline() -> Any:
    pipeline = load_pipeline(GLM_IMAGE, dtype=torch.float32, device=torch.device("cpu"))
    pipeline.set_progress_bar_config(disable=True)
    # All ids and the full length on both sides; generate() keeps the 50 likeliest unless it is told otherwise.
    generation = pipeline.vision_language_encoder.generation_config
    generation.top_k, generation.top_p, generation.temperature, generation.eos_token_id = 0, 1.0, 1.0, None
    return pipeline


def _tokens(rows: int, side: int, rounds: int, goal: float) -> Row:
    policy, pipeline = _policy(side), _bare_pipeline()
    prompts = SHAPE_PROMPTS[: rows // 8]
    repeated = [prompt for prompt in prompts for _ in range(rows // len(prompts))]
    tokens = policy.tokens.grids.tokens
    ours, theirs = alternate(
        rounds,
        lambda: policy.tokens.sample(prompts, rows // len(prompts), range(rows)),
        lambda: pipeline.generate_prior_tokens(repeated, side, side),
    )
    # Theirs samples the end slot too.
    return Row(
        what=f"GLM-Image token sampling, {rows} rows of {tokens:,} tokens",
        unit="tokens/s",
        ours=_rates(rows * tokens, ours),
        peer="the pipeline's generate()",
        theirs=_rates(rows * (tokens + 1), theirs),
        at_least=goal,
    )


def _images() -> Row:
    policy, pipeline = _policy(64), _bare_pipeline()
    sampled = policy.tokens.sample(SHAPE_PROMPTS[:1], IMAGES, range(IMAGES)).actions
    grids = policy.tokens.grids
    large = sampled.token_ids[:, grids.preview.tokens :].reshape(IMAGES, grids.large.rows, grids.large.columns)
    prior = large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    def bare() -> None:
        pipeline(
            [SHAPE_PROMPTS[0]] * IMAGES,
            height=64,
            width=64,
            prior_token_ids=prior,
            generator=[make_generator(seed) for seed in range(IMAGES)],
            num_inference_steps=4,
            guidance_scale=1.0,
        )

    names = tuple(map(str, range(IMAGES)))
    request = GroupRequest(SHAPE_PROMPTS[0], names, tuple(range(IMAGES)), tuple(range(IMAGES)))

    def ours_alone() -> None:
        policy.decoder.sample([request], sampled, size=policy.settings.size, rows_per_call=IMAGES)

    ours, theirs = alternate(9, ours_alone, bare)
    return Row(
        what=f"GLM-Image decoding, {IMAGES} images of 64 x 64 in 4 steps",
        unit="images/s",
        ours=_rates(IMAGES, ours),
        peer="a call of the pipeline",
        theirs=_rates(IMAGES, theirs),
        at_least=0.95,
    )


def _rates(count: int, seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(count / each for each in seconds)


ROWS, LENGTH, ROUNDS = 64, 64, 3
LEARNING_RATE = 1e-9
PROMPT = "sort the letters of benchmark"

Build = Callable[[str], Callable[[], None]]


def measure_update() -> Iterator[Row]:
    """One update, parity gate and optimizer step included.

    Each side has a process of its own. Its memory is what an update takes at its peak on top of libraries and weights:
    activations, gradients and optimizer states. All rows are one microbatch.
    """
    what = f"{ROWS} rows of {LENGTH} tokens, vocabulary {LARGE_VOCABULARY:,}"
    speeds: tuple[list[float], list[float]] = ([], [])
    peaks = [0.0, 0.0]
    spawn = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, spawn) as here,
        ProcessPoolExecutor(1, spawn) as there,
    ):
        write_large_vocabulary_model(Path(folder, "model"), hidden=128, intermediate=256, layers=2)
        for counted in (False, *[True] * ROUNDS):
            for side, (pool, build) in enumerate(((here, _our_update), (there, _trl_update))):
                seconds, peaks[side] = pool.submit(_timed, build, folder).result()
                if counted:
                    speeds[side].append(ROWS * LENGTH / seconds)
    ours, theirs = map(tuple, speeds)
    peer = "TRL loss and step"
    yield Row(what=f"update, {what}", unit="tokens/s", ours=ours, peer=peer, theirs=theirs, at_least=1.0)
    mine, other = ((peak,) for peak in peaks)
    yield Row(what=f"its memory, {what}", unit="MB", ours=mine, peer=peer, theirs=other, at_most=0.5)


def _timed(build: Build, folder: str) -> tuple[float, float]:
    """Seconds of one update in this process, and how many MB more than before the first one were resident at most."""
    step, before = _prepared(build, folder)
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun, resident_mb("VmHWM") - before


@cache
def _prepared(build: Build, folder: str) -> tuple[Callable[[], None], float]:
    return build(folder), reset_resident()


def reset_resident() -> float:
    """Begin the peak of this process anew, since loading a model may have taken more; return the MB that it has."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")


def resident_mb(name: str) -> float:
    """Return the MB of this process: VmRSS, or at the peak VmHWM."""
    # getrusage would include the peak of the process that this one was started from.
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(found.split()[1]) * 1024 / 1e6


def _our_update(folder: str) -> Callable[[], None]:
    torch.set_num_threads(1)
    settings, cpu = CausalLMSettings(max_completion_length=LENGTH), torch.device("cpu")
    policy = CausalLMPolicy.load(
        f"{folder}/model", settings, {"tokens": TrainingChoice(lora=None)}, dtype=torch.float32, device=cpu
    )
    ids = _completions()
    tokens = TokenBatch((PROMPT,) * ROWS, ids, torch.ones_like(ids, dtype=torch.bool), 1.0)
    policy.prepare_for_update()
    with torch.no_grad():
        logprobs = policy.logprobs(tokens, entropy="none").logprobs
    rows = TrainingRows(
        sample_ids=tuple(map(str, range(ROWS))),
        actions=tokens,
        rollout_logprobs=logprobs,
        advantages=torch.linspace(-1, 1, ROWS),
        finished=torch.zeros(ROWS, dtype=torch.bool),
        on_policy=torch.ones(ROWS, dtype=torch.bool),
        max_length=LENGTH,
    )
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(LEARNING_RATE))
    update = UpdateSettings(minibatch_size=ROWS, micro_batch_size=ROWS)

    def step() -> None:
        update_policy(policy, optimizer, rows, update, seed=0)

    return step


def _trl_update(folder: str) -> Callable[[], None]:
    torch.set_num_threads(1)
    trainer = build_trainer(text_config(folder, 1, ROWS, ROWS, 1), f"{folder}/trl", 1)
    messages = [[{"role": "user", "content": PROMPT}]] * ROWS
    prompts = trainer.processing_class.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    assert bool(prompts["attention_mask"].all()), "all rows have one prompt"
    return loss_and_step(trainer, prompts["input_ids"], _completions(), learning_rate=LEARNING_RATE)


def _completions() -> Any:
    return torch.randint(LARGE_VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
