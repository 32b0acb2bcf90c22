"""What `grpo init` writes: a configuration of configs/init, example prompts, a reward function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from grpo_core.modality import Modality
from tasks.checkout import CHECKOUT

Kind = Literal["image", "diffusers", "text"]

CONFIGS = CHECKOUT / "configs" / "init"
"""The commented configurations, by kind; their numbers are those for a model of full size."""

MODALITIES: Mapping[Kind, Modality] = MappingProxyType({"image": "image", "diffusers": "image", "text": "text"})
"""What each kind generates."""

_SMALL = {
    "run.iterations": "20",
    "policy.dtype": "float32",
    "policy.gradient_checkpointing": "false",
    "rollout.prompts_per_batch": "8",
    "update.micro_batch_size": "32",
}
_SMALL_ADAPTER = {"policy.rank": "16", "policy.alpha": "32.0"}
_SMALL_IMAGE = {"rollout.height": "64", "rollout.width": "64", "rollout.guidance_scale": "1.0"}

SHIPPED: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        "image": {
            **_SMALL,
            **_SMALL_ADAPTER,
            **_SMALL_IMAGE,
            "policy.model": "data/models/tiny-glm-image",
            "rollout.num_inference_steps": "4",
            "rollout.temperature": "1.0",
            "update.learning_rate": "2.0e-3",
        },
        "diffusers": {
            **_SMALL,
            **_SMALL_ADAPTER,
            **_SMALL_IMAGE,
            "policy.model": "data/models/tiny-sd3",
            # The length that the model was trained with.
            "rollout.max_sequence_length": "14",
            "rollout.num_inference_steps": "8",
            "rollout.sde_window_size": "3",
            "rollout.sde_window_range": "[0, 3]",
            "update.learning_rate": "5.0e-4",
        },
        "text": {
            **_SMALL,
            "policy.model": "data/models/tiny-text",
            "policy.lora": "null",
            "rollout.max_completion_length": "24",
            "update.learning_rate": "1.0e-3",
        },
    }
)
"""What each configuration has for the shipped model of its kind instead: YAML by section and key."""

EXAMPLE_PROMPTS: Mapping[Modality, tuple[str, ...]] = MappingProxyType(
    {
        "image": tuple(
            f"a {colour} {shape} in the center on a {background} background"
            for colour, background in (("red", "white"), ("blue", "gray"), ("green", "black"))
            for shape in ("circle", "square", "triangle", "heart")
        ),
        "text": tuple(
            f"sort the letters of {word}"
            for word in [
                "apple",
                "river",
                "stone",
                "cloud",
                "table",
                "green",
                "mouse",
                "house",
                "night",
                "bread",
                "water",
                "train",
            ]
        ),
    }
)
EXAMPLE_HELDOUT: Mapping[Modality, tuple[str, ...]] = MappingProxyType(
    {
        "image": tuple(f"a yellow {shape} at the top left on a white background" for shape in ("circle", "square")),
        "text": tuple(f"sort the letters of {word}" for word in ("paper", "light")),
    }
)

EXAMPLE_REWARD: Mapping[Modality, str] = MappingProxyType(
    {
        "image": '''"""One number per image, higher is better; only images of the same prompt are compared."""


def reward(prompts, images, **columns):
    """Return the score of each image: here how red it is. `columns` has the other columns of the prompt file."""
    scores = []
    for image in images:  # a PIL image, RGB
        red, green, blue = image.resize((1, 1)).getpixel((0, 0))
        scores.append((red - (green + blue) / 2) / 255)
    return scores
''',
        "text": '''"""One number per text, higher is better; only texts of the same prompt are compared."""


def reward(prompts, completions, **columns):
    """Return the score of each text: here 1 for an empty one, less for longer ones.

    `columns` has the other columns of the prompt file, such as an answer to compare with.
    """
    return [1 / (1 + len(text) / 20) for text in completions]
''',
    }
)
