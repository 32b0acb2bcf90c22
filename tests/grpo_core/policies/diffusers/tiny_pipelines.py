"""Random pipelines of the real classes with text encoders and tokenizers, small enough to run in milliseconds."""

import json
import shutil
import string
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import nn

from grpo_core.images import SourceImage
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.pipeline_files import INDEX_FILE
from grpo_core.policies.trained.lora_and_full import LoraModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.records import GroupRequest
from tests.grpo_core.policies.denoising import tiny_pipelines as without_text

SavedFolder = Callable[[str], Path]
SharedPolicy = Callable[[str], DiffusersPolicy]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A letter is an id, and Qwen-Image's own template has about 280 of them before the prompt.
LENGTHS = {"sd3": 32, "flux": 32, "qwen_image": 400, "z_image": 64}
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def clip_tokenizer(length: int = 16) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return transformers.CLIPTokenizer(
        vocab={word: place for place, word in enumerate(words)}, merges=[], model_max_length=length
    )


def t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *string.ascii_lowercase]
    return transformers.T5Tokenizer(
        vocab=[(piece, -float(place > 2)) for place, piece in enumerate(pieces)], extra_ids=0
    )


def qwen_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: place for place, word in enumerate([*letters, *SPECIAL])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def clip_encoder(width: int, length: int = 16) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=600,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModelWithProjection(config)


def t5_encoder(width: int) -> Any:
    config = transformers.T5Config(
        vocab_size=32, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2, is_encoder_decoder=False
    )
    return transformers.T5EncoderModel(config)


def qwen_config() -> dict[str, Any]:
    return {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }


def sd3() -> Any:
    bare, _ = without_text.sd3()
    return diffusers.StableDiffusion3Pipeline(
        bare.transformer,
        bare.scheduler,
        bare.vae,
        clip_encoder(32),
        clip_tokenizer(),
        clip_encoder(32),
        clip_tokenizer(),
        t5_encoder(32),
        t5_tokenizer(),
    )


def flux() -> Any:
    bare, _ = without_text.flux()
    encoder = transformers.CLIPTextModel(clip_encoder(32).config)
    return diffusers.FluxPipeline(
        bare.scheduler, bare.vae, encoder, clip_tokenizer(), t5_encoder(32), t5_tokenizer(), bare.transformer
    )


def qwen_image() -> Any:
    bare, _ = without_text.qwen_image()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**qwen_config(), "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )
    return diffusers.QwenImagePipeline(bare.scheduler, bare.vae, encoder, qwen_tokenizer(), bare.transformer)


def z_image() -> Any:
    bare, _ = without_text.z_image()
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**qwen_config()))
    return diffusers.ZImagePipeline(bare.scheduler, bare.vae, encoder, qwen_tokenizer(), bare.transformer)


MAKE: dict[str, Callable[[], Any]] = {"sd3": sd3, "flux": flux, "qwen_image": qwen_image, "z_image": z_image}


def save(name: str, folder: Path, make: Mapping[str, Callable[[], Any]] = MAKE) -> Path:
    """Write one of these pipelines as `save_pretrained` writes it."""
    torch.manual_seed(2)
    pipeline = make[name]()
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.apply(_spread)
    pipeline.save_pretrained(folder)
    return folder


def without(folder: Path, target: Path, *parts: str) -> Path:
    """Copy a saved pipeline as `save_pretrained` writes one whose parts are None."""
    shutil.copytree(folder, target, ignore=lambda _, names: set(names) & set(parts))
    index = json.loads((target / INDEX_FILE).read_text())
    (target / INDEX_FILE).write_text(json.dumps(index | {part: [None, None] for part in parts}))
    return target


@torch.no_grad()
def saved_once(parent: Path, make: Mapping[str, Callable[[], Any]]) -> SavedFolder:
    """Return what finds the folder of a pipeline by its name, which is saved below `parent` once and never changed."""
    return cache(lambda name: save(name, parent / name, make))


def loaded_once(saved: SavedFolder, settings_of: Callable[[str], DiffusersSettings]) -> SharedPolicy:
    """Return what finds a policy over a saved pipeline, with its settings; its weights are never changed."""
    policy = cache(lambda name: load(saved(name), settings_of(name)))

    def find(name: str) -> DiffusersPolicy:
        found = policy(name)
        found.sample_with(settings_of(name))
        return found

    return find


def _spread(module: nn.Module) -> None:
    """Make embeddings differ enough that prompts matter."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)


def settings(name: str = "sd3", **changes: Any) -> DiffusersSettings:
    return DiffusersSettings(
        **{
            "height": 32,
            "width": 32,
            "num_inference_steps": 5,
            "guidance_scale": without_text.GUIDANCE[name],
            "sde_window_range": (0, 4),
            "max_sequence_length": LENGTHS[name],
            **changes,
        }
    )


def load(
    folder: Path,
    chosen: DiffusersSettings,
    *,
    lora: bool = True,
    checkpointing: bool = False,
    disturbed: bool = True,
    **options: Any,
) -> DiffusersPolicy:
    """Return a policy; disturbed: its adapters are away from zero, so that it is not its reference."""
    choice = TrainingChoice(
        LoraSettings(rank=4, alpha=8) if lora else None,
        reference="none" if lora else "device",
        gradient_checkpointing=checkpointing,
    )
    policy = DiffusersPolicy.load(str(folder), chosen, {"denoising": choice}, **options)
    trained = policy.denoising.trained
    if isinstance(trained, LoraModel) and disturbed:
        without_text.disturb(trained)
    return policy


def request(
    prompt: str = "a red dot",
    samples: int = 3,
    *,
    window_start: int | None = 1,
    seed: int = 0,
    size: Any = None,
    sources: tuple[SourceImage, ...] = (),
) -> GroupRequest:
    return GroupRequest(
        prompt=prompt,
        sample_ids=tuple(f"{prompt}.s{row:02d}" for row in range(samples)),
        seeds=(0,) * samples,
        noise_seeds=tuple(seed + row for row in range(samples)),
        step_seeds=() if window_start is None else tuple(seed + 100 + row for row in range(samples)),
        size=size,
        window_start=window_start,
        sources=sources,
    )
