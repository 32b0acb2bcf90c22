"""The texts of the files that `grpo init` writes: the configuration, example prompts, a reward function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from grpo_core.modality import Modality

Kind = Literal["image", "diffusers", "text"]

MODALITIES: Mapping[Kind, Modality] = MappingProxyType({"image": "image", "diffusers": "image", "text": "text"})
"""What each kind generates."""

POLICIES: Mapping[Kind, str] = MappingProxyType({"image": "glm_image", "diffusers": "diffusers", "text": "causal_lm"})
"""The policy.kind of each kind."""

TINY: Mapping[Kind, str] = MappingProxyType(
    {"image": "data/models/tiny-glm-image", "diffusers": "data/models/tiny-sd3", "text": "data/models/tiny-text"}
)
"""The shipped models, relative to the checkout."""

PROMPTS: Mapping[Modality, tuple[str, ...]] = MappingProxyType(
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
HELDOUT: Mapping[Modality, tuple[str, ...]] = MappingProxyType(
    {
        "image": tuple(f"a yellow {shape} at the top left on a white background" for shape in ("circle", "square")),
        "text": tuple(f"sort the letters of {word}" for word in ("paper", "light")),
    }
)

REWARD: Mapping[Modality, str] = MappingProxyType(
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

CONFIG = """\
# Written by `grpo init`. To check it, and to start it:
#     grpo doctor {file}
#     grpo train {file}
# Change one value for one start with --set, as in --set update.learning_rate=1e-4.
run:
  name: {name}
  seed: 0
  iterations: {iterations}  # can be raised later to continue

policy:
  kind: {kind}
  model: {model}  # a folder, or a name on the Hugging Face hub
  dtype: {dtype}
{lora}
data:
  # .txt with a prompt per line, or .jsonl, .csv, .tsv, .parquet with a column `prompt`; the other columns are passed
  # to the rewards.
  prompts: {prompts}
{targets}
rollout:
  prompts_per_iteration: 8  # groups of an iteration
  group_size: 8             # samples per prompt; they are compared with each other
  prompts_per_batch: {batch}      # prompts sampled at once: lower it if memory runs out
{sampling}
rewards:
  # Several rewards are added by weight; `grpo rewards list` shows all of them.
  - reward: {reward}
{settings}
update:
  learning_rate: {learning_rate}
  minibatch_size: 32        # samples per optimizer step, of {rows} per iteration
  micro_batch_size: {micro}      # samples per forward pass: lower it if memory runs out
  kl_coef: {kl_coef}             # keeps the policy near the model; 0 switches it off

{evaluate}"""

LORA = """\
  lora:                     # null trains every weight
    rank: {rank}
    alpha: {alpha}
  gradient_checkpointing: {checkpointing}
"""

SAMPLING: Mapping[tuple[Kind, bool], str] = MappingProxyType(
    {
        ("image", True): """\
  height: 64
  width: 64
  num_inference_steps: 4    # of the decoder
  guidance_scale: 1.0
""",
        ("image", False): """\
  height: 512
  width: 512
  num_inference_steps: 16   # of the decoder; rewards compare siblings with the same noise, so fewer are enough
  guidance_scale: 1.5
  temperature: 0.9
""",
        ("diffusers", True): """\
  height: 64
  width: 64
  max_sequence_length: 14   # the length that the model was trained with
  num_inference_steps: 8
  guidance_scale: 1.0
  sde_window_size: 3        # noisy steps, which are trained; the others follow the ODE
  sde_window_range: [0, 3]  # the steps that they may be, the end excluded
""",
        ("diffusers", False): """\
  height: 512
  width: 512
  num_inference_steps: 10
  guidance_scale: 4.5       # as the pipeline understands it
  sde_window_size: 2        # noisy steps, which are trained; the others follow the ODE
  sde_window_range: [0, 5]  # the steps that they may be, the end excluded
""",
        ("text", True): """\
  max_completion_length: 24
  temperature: 1.0
""",
        ("text", False): """\
  max_completion_length: 256
  temperature: 1.0
  # system_prompt: You answer briefly.
""",
    }
)
"""By kind, and whether the model is the shipped one."""

LEARNING_RATES: Mapping[tuple[Kind, bool], str] = MappingProxyType(
    {
        ("image", True): "2.0e-3",
        ("image", False): "5.0e-5",
        ("diffusers", True): "5.0e-4",
        ("diffusers", False): "3.0e-4",
        ("text", True): "1.0e-3",
        ("text", False): "1.0e-5",
    }
)
"""By kind, and whether the model is the shipped one."""

# That of denoising steps is exact, and small: most published runs do without.
KL_COEFS: Mapping[Kind, str] = MappingProxyType({"image": "0.01", "diffusers": "0.00", "text": "0.01"})

SETTINGS = """\
    name: mine
    settings: {{function: {function}}}
"""

TARGETS = """\
  targets: {folder}  # target images, paired with the prompts by the index in their name, 00000.png, 00001.png, ...
"""

EVALUATE = """\
# Held-out prompts, sampled with fixed seeds before, during and after training.
evaluate:
  prompts: {prompts}
  every: 10                 # iterations
  samples_per_prompt: 4
"""

NO_EVALUATE = """\
# Held-out prompts, sampled with fixed seeds before, during and after training, show whether it helps:
# evaluate: {prompts: heldout.txt, every: 10, samples_per_prompt: 4}
"""
