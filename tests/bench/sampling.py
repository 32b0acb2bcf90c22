"""Token sampling beside transformers' generate(), and decoding beside a bare call of diffusers' pipeline.

The shipped tiny models, so what is compared is what a token costs beside its matrix products; with adapters of the
shipped configurations here, and without any on the other side.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import data
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.records import GroupRequest
from grpo_core.seeds import make_generator
from tests.bench.page import Row, alternate

MODELS = Path(data.__file__).parent / "models"
GLM_IMAGE = str(MODELS / "tiny-glm-image")
SHAPES = ("circle", "square", "cross", "triangle")
PROMPTS = tuple(f"a {colour} {shape}" for colour in ("red", "blue") for shape in SHAPES)
# Rows, side of the image in pixels, rounds, and how many times generate()'s tokens per second are the goal.
CASES = (
    (1, 64, 15, None),
    (8, 64, 15, 1.5),
    (64, 64, 7, 2.0),
    (1, 256, 3, None),
    (8, 256, 3, 1.5),
    (64, 256, 2, 2.0),
)
IMAGES = 8


def measure() -> Iterator[Row]:
    """Measure tokens per second of every case, and decoded images per second."""
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


def _tokens(rows: int, side: int, rounds: int, goal: float | None) -> Row:
    policy, pipeline = _policy(side), _bare_pipeline()
    prompts = PROMPTS[: max(1, rows // 8)]
    repeated = [prompt for prompt in prompts for _ in range(rows // len(prompts))]
    tokens = policy.tokens.grids.tokens
    ours, theirs = alternate(
        rounds,
        lambda: policy.tokens.sample(prompts, rows // len(prompts), range(rows)),
        lambda: pipeline.generate_prior_tokens(repeated, side, side),
    )
    # Theirs samples the end slot too.
    return Row(
        what=f"GLM-Image token sampling, {rows} row{'s' * (rows > 1)} of {tokens:,} tokens",
        unit="tokens/s",
        ours=_rates(rows * tokens, ours),
        peer="the pipeline's generate()",
        theirs=_rates(rows * (tokens + 1), theirs),
        at_least=goal,
    )


def _images() -> Row:
    policy, pipeline = _policy(64), _bare_pipeline()
    sampled = policy.tokens.sample(PROMPTS[:1], IMAGES, range(IMAGES)).actions
    grids = policy.tokens.grids
    large = sampled.token_ids[:, grids.preview.tokens :].reshape(IMAGES, grids.large.rows, grids.large.columns)
    prior = large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    def bare() -> None:
        pipeline(
            [PROMPTS[0]] * IMAGES,
            height=64,
            width=64,
            prior_token_ids=prior,
            generator=[make_generator(seed) for seed in range(IMAGES)],
            num_inference_steps=4,
            guidance_scale=1.0,
        )

    names = tuple(map(str, range(IMAGES)))
    request = GroupRequest(PROMPTS[0], names, tuple(range(IMAGES)), tuple(range(IMAGES)))

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
