"""A Qwen3-VL of the stock transformers classes that says where a shape is in a drawn image, for one CPU core."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from data.recipes.grounding import (
    PROMPT_FILES,
    SHAPES,
    SIDE,
    STEP,
    GroundingScene,
    png_of,
    split_scenes,
    write_medground_example,
    write_prompt_files,
)
from data.recipes.shapes import COLORS
from data.recipes.trainer import DATA, ProgressCallback, Quality, measure, print_progress, replace_shipped, train
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.images import SourceImage


@dataclass(frozen=True)
class TinyVisionRecipe:
    """How the tiny vision model is built and trained; the same recipe gives the same weights on the same machine.

    The supervised answers of the second half are imprecise on purpose: the policy learns where a shape is, and to say
    it carelessly, which training with rewards can then remove.

    Attributes:
        seed: with 0 the model boxes either shape of two, whichever is meant, after so few steps.
        corpus_size: images of the supervised training, each asked about twice.
        slip_probability: probability that a coordinate of a later answer is moved by up to `slip_steps` on the grid.
        precise: share of the steps, at the beginning, whose answers are right.
        patch: pixels a side; each patch is one image token.
        medground_prompts: rows of the example of MedGround-R1's data.
    """

    seed: int = 1
    corpus_size: int = 4000
    slip_probability: float = 0.6
    slip_steps: int = 2
    precise: float = 0.75
    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 3
    heads: int = 4
    vision_hidden_size: int = 64
    vision_layers: int = 1
    patch: int = 14
    initializer_range: float = 0.05
    steps: int = 1600
    batch: int = 32
    learning_rate: float = 4e-3
    train_prompts: int = 400
    heldout_prompts: int = 100
    medground_prompts: int = 8


PAD, END = "<|pad|>", "<|end|>"
_VISION_START, _VISION_END, _IMAGE, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
_NUMBERS = tuple(str(place) for place in range(0, SIDE + 1, STEP))
_WORDS = ("system", "user", "assistant", ":", "where", "is", "the", "?", *COLORS, *SHAPES, *_NUMBERS)
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message.role + ': ' }}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for block in message.content -%}"
    "{%- if block.type == 'image' -%}"
    + _VISION_START
    + _IMAGE
    + _VISION_END
    + "{%- else -%}{{ block.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ ' ' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"
)


def build_processor(recipe: TinyVisionRecipe) -> Qwen3VLProcessor:
    """Build the processor: an id a word, a number or a sign, and an image token a patch of the image."""
    specials = [PAD, END, "<|unknown|>", _VISION_START, _VISION_END, _IMAGE, _VIDEO]
    vocabulary = {entry: index for index, entry in enumerate([*specials, *_WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=END, unk_token="<|unknown|>", padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials[3:]})
    patches = {"patch_size": recipe.patch, "merge_size": 1, "temporal_patch_size": 2}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**patches, min_pixels=recipe.patch**2, max_pixels=256 * recipe.patch**2),
        tokenizer,
        Qwen3VLVideoProcessor(**patches),
        chat_template=_CHAT_TEMPLATE,
    )


def build_model(recipe: TinyVisionRecipe, processor: Qwen3VLProcessor) -> Qwen3VLForConditionalGeneration:
    """Build a Qwen3-VL with random weights from the recipe's seed; global random state does not change."""
    tokenizer = processor.tokenizer
    head = recipe.hidden_size // recipe.heads
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": head,
        "max_position_embeddings": 512,
        "initializer_range": recipe.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            # Of the head's pairs: time, height and width.
            "mrope_section": [head // 2 - 2 * (3 * head // 16), 3 * head // 16, 3 * head // 16],
            "rope_theta": 100.0,
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": recipe.vision_layers,
        "hidden_size": recipe.vision_hidden_size,
        "intermediate_size": 3 * recipe.vision_hidden_size,
        "out_hidden_size": recipe.hidden_size,
        "num_heads": 4,
        "patch_size": recipe.patch,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": recipe.initializer_range,
    }
    names = {
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
        "vision_start_token_id": _VISION_START,
        "vision_end_token_id": _VISION_END,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        initializer_range=recipe.initializer_range,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3VLForConditionalGeneration(config).eval()


def save_tiny_vision_model(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, folder: Path) -> None:
    """Save model and processor; `AutoModelForImageTextToText.from_pretrained(folder)` loads it without this project."""
    # Its progress bars would break ours.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@dataclass(frozen=True)
class Corpus:
    """Questions about images, each with the patches of its image. All have as many ids, so none is padded.

    Attributes:
        ids: int64 [questions, ids], in the chat template, up to the answer.
        types: int64 [questions, ids], 1 where an id is an image token.
        patches: float32 [questions, patches, values].
        grids: int64 [questions, 3], patches over time, height and width.
        answers: int64 [questions, 5], the right box and the end token.
    """

    ids: Tensor
    types: Tensor
    patches: Tensor
    grids: Tensor
    answers: Tensor

    def inputs(self, rows: Tensor, answers: Tensor | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for these rows, followed by answers, int64 [rows, ids]."""
        ids, types = self.ids[rows], self.types[rows]
        if answers is not None:
            ids = torch.cat([ids, answers], dim=1)
            types = torch.cat([types, torch.zeros_like(answers)], dim=1)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": types,
            "pixel_values": self.patches[rows].flatten(0, 1),
            "image_grid_thw": self.grids[rows],
        }


def draw_corpus(recipe: TinyVisionRecipe) -> tuple[GroundingScene, ...]:
    """Draw images with two shapes, none of them held out, asked about one; and then, in this order, about the other."""
    scenes, _ = split_scenes(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_prompts, shapes=2)
    return (*scenes, *(scene.asked_about_the_last for scene in scenes))


def encode_scenes(processor: Qwen3VLProcessor, scenes: Sequence[GroundingScene]) -> Corpus:
    """Ask about each scene in the chat template."""
    chats = []
    for scene in scenes:
        blocks = [{"type": "text", "text": scene.question}, {"type": "image", "image": scene.draw()}]
        chats.append([{"role": "user", "content": blocks}])
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    encoded: Mapping[str, Tensor] = processor.apply_chat_template(
        chats, **options, processor_kwargs={"return_tensors": "pt"}
    )
    answers = processor.tokenizer([f"{scene.answer}{END}" for scene in scenes], return_tensors="pt")["input_ids"]
    return Corpus(
        encoded["input_ids"],
        encoded["mm_token_type_ids"],
        encoded["pixel_values"].unflatten(0, (len(scenes), -1)),
        encoded["image_grid_thw"],
        answers,
    )


def move_corners(answers: Tensor, recipe: TinyVisionRecipe, lowest: int, rng: np.random.Generator) -> Tensor:
    """Move coordinates of boxes, int64 [answers, 5], by steps of the grid, at the recipe's rate; none is moved shut."""
    corners, shape = answers[:, :4], (len(answers), 4)
    steps = rng.integers(-recipe.slip_steps, recipe.slip_steps + 1, shape) * (
        rng.random(shape) < recipe.slip_probability
    )
    moved = (corners + torch.from_numpy(steps)).clamp(lowest, lowest + SIDE // STEP)
    closed = (moved[:, :2] >= moved[:, 2:]).any(dim=1, keepdim=True)
    return torch.cat([torch.where(closed, corners, moved), answers[:, 4:]], dim=1)


def answer_loss(model: Qwen3VLForConditionalGeneration, inputs: Mapping[str, Tensor], answers: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the answers, the last ids of the inputs, in nats a token."""
    logits = model(**inputs, use_cache=False, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten())


def train_model(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen3VLProcessor,
    recipe: TinyVisionRecipe,
    on_step: ProgressCallback | None = None,
) -> float:
    """Train `model` in place on the recipe's scenes; return the loss of the last steps, nats per token."""
    scenes = draw_corpus(recipe)
    corpus = encode_scenes(processor, scenes)
    lowest = processor.tokenizer.convert_tokens_to_ids("0")
    rng = np.random.default_rng([recipe.seed, 3])
    batches = 0

    def loss() -> Tensor:
        nonlocal batches
        rows = torch.from_numpy(rng.integers(recipe.corpus_size, size=recipe.batch // 2))
        # Both questions about an image together: what tells them apart is which shape is meant.
        rows = torch.cat([rows, rows + recipe.corpus_size])
        answers = corpus.answers[rows]
        if batches >= recipe.precise * recipe.steps:
            answers = move_corners(answers, recipe, lowest, rng)
        batches += 1
        return answer_loss(model, corpus.inputs(rows, answers), answers)

    return train(model, model.parameters(), recipe.learning_rate, recipe.steps, loss, on_step)


def measure_saved(
    folder: Path, recipe: TinyVisionRecipe, shapes: int, temperature: float, *, shift: int = 0, group_size: int = 4
) -> Quality:
    """Measure the IoU of answers about held-out images; with `shift` each gets the image that many further on."""
    _, unseen = split_scenes(recipe.seed, train=0, heldout=recipe.heldout_prompts, shapes=shapes)
    settings = VisionLMSettings(temperature=temperature, max_completion_length=6)
    policy = VisionLMPolicy.load(str(folder), settings, {"tokens": TrainingChoice(lora=None)})
    images = [[SourceImage.of(png_of(scene))] for scene in (*unseen[shift:], *unseen[:shift])]
    boxes = [list(scene.box) for scene in unseen]
    prompts = [scene.prompt for scene in unseen]
    return measure(policy, prompts, "box_iou", sources=images, group_size=group_size, box=boxes)


def make() -> None:
    """Make the tiny vision model and the drawn images of its prompts; it has never seen the held-out images."""
    recipe = TinyVisionRecipe()
    processor = build_processor(recipe)
    model = build_model(recipe, processor)
    replace_shipped(
        "tiny-vision",
        recipe,
        ("torch", "transformers", "tokenizers", "numpy", "pillow"),
        lambda: {"final_loss": train_model(model, processor, recipe, print_progress("train vision model"))},
        lambda folder: save_tiny_vision_model(model, processor, folder),
        lambda folder: {
            f"{shapes} shapes, temperature {warm}": measure_saved(folder, recipe, shapes, warm)
            for shapes in PROMPT_FILES
            for warm in (1.0, 0.1)
        },
    )
    write_prompt_files(DATA / "prompts", recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_prompts)
    write_medground_example(DATA / "medground", recipe.seed, recipe.medground_prompts)
