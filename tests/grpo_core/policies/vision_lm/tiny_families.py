"""Small vision-language models of twelve families with their processors, made in code, without a hub."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from grpo_core.policies.causal_lm.loading import train_language_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.loading import VISION_LM, with_template
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.actions import Sources, TokenBatch
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import SampledTokens
from tests.grpo_core.policies.trained.tiny_models import disturb

BUILDERS: dict[str, Callable[[str], tuple[Any, Any]]] = {}
"""By model type: returns a configuration and a processor."""

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_MERGED = {"hidden_size": 32, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_SIDE = {"height": 56, "width": 56}


def template(image: str) -> str:
    """A chat template whose messages are blocks, with this text for an image."""
    blocks = "{% if each['type'] == 'image' %}" + image + "{% else %}{{ each['text'] }}{% endif %}"
    message = "{{ message['role'] }}:{% for each in message['content'] %}" + blocks + "{% endfor %};"
    return "{% for message in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def tokenizer(named: Mapping[str, str] | None = None, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with special tokens that have names, and others."""
    alphabet = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=dict(named or {}),
    )
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)}, replace_extra_special_tokens=False)
    return made


def family(*kinds: str) -> Callable[[Callable[[str], tuple[Any, Any]]], Callable[[str], tuple[Any, Any]]]:
    """Register a builder."""

    def register(builder: Callable[[str], tuple[Any, Any]]) -> Callable[[str], tuple[Any, Any]]:
        BUILDERS.update(dict.fromkeys(kinds, builder))
        return builder

    return register


@family("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
def _qwen(kind: str) -> tuple[Any, Any]:
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    words = tokenizer(special=["<|im_start|>", "<|im_end|>", *ids.values()])
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    patch = 16 if kind == "qwen3_vl" else 14
    patches = {"patch_size": patch, "merge_size": 2}
    area = (2 * patch) ** 2
    images = hf.Qwen2VLImageProcessor(**patches, temporal_patch_size=2, min_pixels=4 * area, max_pixels=64 * area)
    videos = (hf.Qwen3VLVideoProcessor if kind == "qwen3_vl" else hf.Qwen2VLVideoProcessor)(**patches)
    vision: dict[str, Any] = {**_MERGED, "patch_size": patch}
    text: dict[str, Any] = {**_TEXT, "vocab_size": len(words), "rope_parameters": _ROPE}
    if kind == "qwen2_vl":
        vision |= {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        vision |= {"depth": 2, "out_hidden_size": 64, "intermediate_size": 64, "fullatt_block_indexes": [1]}
    else:
        text["head_dim"] = 16
        vision |= {"depth": 3, "out_hidden_size": 64, "intermediate_size": 64}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = getattr(hf, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        **{field: words.convert_tokens_to_ids(token) for field, token in ids.items()},
    )
    chat = template("<|vision_start|><|image_pad|><|vision_end|>")
    return config, getattr(hf, f"{name}Processor")(images, words, videos, chat_template=chat)


@family("glm4v")
def _glm(kind: str) -> tuple[Any, Any]:
    ids = {
        "image_start_token_id": "<|begin_of_image|>",
        "image_token_id": "<|image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_token_id": "<|video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    words = tokenizer(special=list(ids.values()))
    size = {"shortest_edge": 2 * 4 * 28**2, "longest_edge": 2 * 64 * 28**2}
    patches = {"patch_size": 14, "merge_size": 2}
    images = hf.Glm4vImageProcessor(**patches, temporal_patch_size=2, size=size)
    config = hf.Glm4vConfig(
        text_config={**_TEXT, "vocab_size": len(words), "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
        vision_config={**_MERGED, "depth": 2, "out_hidden_size": 64, "intermediate_size": 64, "image_size": 112},
        **{field: words.convert_tokens_to_ids(token) for field, token in ids.items()},
    )
    chat = template("<|begin_of_image|><|image|><|end_of_image|>")
    return config, hf.Glm4vProcessor(images, words, hf.Glm4vVideoProcessor(**patches), chat_template=chat)


@family("idefics3", "smolvlm")
def _idefics(kind: str) -> tuple[Any, Any]:
    grid = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>", *grid]
    words = tokenizer(special=special)
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    parts = [getattr(hf, f"{name}ImageProcessor")(**sizes), words]
    if kind == "smolvlm":
        # It names the seconds of videos in words, and wants the package that does, whatever it processes.
        processing_smolvlm.num2words = processing_smolvlm.num2words or str
        parts.append(hf.SmolVLMVideoProcessor(**sizes))
    processor = getattr(hf, f"{name}Processor")(*parts, image_seq_len=4, chat_template=template("<image>"))
    config = getattr(hf, f"{name}Config")(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(words)},
        vision_config=_VISION,
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    return config, processor


@family("gemma3")
def _gemma(kind: str) -> tuple[Any, Any]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    words = tokenizer(named)
    boi, eoi, image = (words.convert_tokens_to_ids(token) for token in named.values())
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    config = hf.Gemma3Config(
        text_config={**_TEXT, **layers, "vocab_size": len(words), "head_dim": 16, "query_pre_attn_scalar": 16},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
    )
    images = hf.Gemma3ImageProcessor(size=_SIDE)
    chat = template("<start_of_image>")
    return config, hf.Gemma3Processor(images, words, image_seq_length=4, chat_template=chat)


@family("internvl")
def _internvl(kind: str) -> tuple[Any, Any]:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    words = tokenizer(named)
    images = hf.GotOcr2ImageProcessor(size=_SIDE, crop_to_patches=True, min_patches=1, max_patches=4)
    config = hf.InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen2", "vocab_size": len(words)},
        vision_config={**_VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    videos = hf.InternVLVideoProcessor(size=_SIDE)
    chat = template("<IMG_CONTEXT>")
    return config, hf.InternVLProcessor(images, words, videos, image_seq_length=4, chat_template=chat)


@family("llava")
def _llava(kind: str) -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>"})
    config = hf.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(words)},
        vision_config={**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )
    images = hf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=_SIDE)
    choices = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, hf.LlavaProcessor(images, words, **choices, chat_template=template("<image>"))


@family("llava_onevision")
def _onevision(kind: str) -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>", "video_token": "<video>"})
    shapes = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = hf.LlavaOnevisionConfig(
        text_config={**_TEXT, "model_type": "qwen2", "vocab_size": len(words)},
        vision_config={**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        video_token_index=words.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=shapes,
    )
    images = hf.LlavaOnevisionImageProcessor(size=_SIDE, image_grid_pinpoints=shapes)
    videos = hf.LlavaOnevisionVideoProcessor(size=_SIDE)
    choices = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return config, hf.LlavaOnevisionProcessor(images, words, videos, **choices, chat_template=template("<image>"))


@family("paligemma")
def _paligemma(kind: str) -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>"})
    images = hf.SiglipImageProcessor(size=_SIDE)
    images.image_seq_length = 16
    # It adds tokens for places to the tokenizer.
    processor = hf.PaliGemmaProcessor(images, words, chat_template=template("<image>"))
    config = hf.PaliGemmaConfig(
        text_config={**_TEXT, "model_type": "gemma", "vocab_size": len(words), "head_dim": 16},
        vision_config={**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    return config, processor


@family("mistral3")
def _mistral(kind: str) -> tuple[Any, Any]:
    words = tokenizer(special=["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    images = hf.PixtralImageProcessor(patch_size=14, size={"longest_edge": 112})
    config = hf.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "vocab_size": len(words), "head_dim": 16},
        vision_config={**_VISION, "model_type": "pixtral", "image_size": 112, "head_dim": 16},
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    choices = {"patch_size": 14, "spatial_merge_size": 2}
    return config, hf.PixtralProcessor(images, words, **choices, chat_template=template("[IMG]"))


KINDS = tuple(BUILDERS)
NEEDS_IMAGES = frozenset({"paligemma"})
"""Families whose processors refuse a prompt without an image."""


def build(kind: str) -> tuple[Any, Any]:
    """The family's configuration and processor."""
    config, processor = BUILDERS[kind](kind)
    return config, with_template(processor)


def make_model(kind: str) -> tuple[Any, Any]:
    """A model with seeded weights, of which logits depend on what is read, and its processor."""
    return copy.deepcopy(_made(kind))


@cache
def _made(kind: str) -> tuple[Any, Any]:
    config, processor = build(kind)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        model = hf.AutoModelForImageTextToText.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "norm" not in name:
                # Gemma 3's projector begins at zero.
                parameter.copy_(parameter * 3 if parameter.any() else torch.randn_like(parameter) * 0.1)
    return model, processor


def make_policy(
    kind: str,
    settings: VisionLMSettings | None = None,
    choice: TrainingChoice | None = None,
    disturbed: float = 0.02,
) -> VisionLMPolicy:
    """A policy with adapters that are not at the zero they start from."""
    model, processor = make_model(kind)
    trained = train_language_model(
        model, choice or TrainingChoice(LoraSettings(rank=4, alpha=8.0)), VISION_LM, base_name=kind
    )
    policy = VisionLMPolicy(trained, processor, settings or VisionLMSettings(max_completion_length=6))
    disturb(policy.trainable_parameters(), disturbed)
    return policy


def source(width: int, height: int, seed: int) -> SourceImage:
    """A picture of coloured squares."""
    random = np.random.default_rng(seed)
    image = Image.fromarray(random.integers(0, 255, (4, 4, 3)).astype(np.uint8))
    return SourceImage.of(encode_png(image.resize((width, height), Image.Resampling.NEAREST)))


PROMPTS = ("What is it?", "Compare <image> with <image>, please!", "And the third one, where is it?", "No image.")
SOURCES = ((source(56, 56, 1),), (source(112, 84, 2), source(60, 90, 3)), (source(112, 112, 4),), ())
OTHERS = ((source(56, 56, 5),), (source(112, 84, 6), source(60, 90, 7)), (source(112, 112, 8),), ())
"""Images of several sizes, one prompt with two and one without any; and others of the same sizes."""


def requested(kind: str) -> tuple[tuple[str, ...], tuple[tuple[SourceImage, ...], ...]]:
    """Prompts with their images that the family can read."""
    count = len(PROMPTS) - (kind in NEEDS_IMAGES)
    return PROMPTS[:count], SOURCES[:count]


def drawn(policy: VisionLMPolicy, kind: str, group_size: int = 3) -> SampledTokens:
    """Siblings of all prompts."""
    prompts, sources = requested(kind)
    return policy.sample_tokens(prompts, group_size, range(len(prompts) * group_size), sources=sources)


@torch.no_grad()
def difference(policy: VisionLMPolicy, sampled: SampledTokens, sources: Sources | None = None) -> float:
    """The largest between stored and recomputed log-probs, also of other images."""
    actions = sampled.actions if sources is None else replace(sampled.actions, sources=sources)
    return float((policy.logprobs(actions).logprobs - sampled.rollout_logprobs).abs().max())


def plain_logprobs(policy: VisionLMPolicy, actions: TokenBatch, row: int) -> Tensor:
    """Of one forward pass over one row alone, given what the family's processor makes of it, pixels included.

    The processor's own call on messages with images, not the project's.
    """
    images = [] if actions.sources is None else list(actions.sources[row])
    texts = actions.prompts[row].split("<image>")
    blocks: list[dict[str, Any]] = [{"type": "image", "image": each.open()} for each in images]
    if len(texts) == 1:
        content = [*blocks, *_as_blocks(texts)]
    else:
        content = [part for pair in zip(_as_blocks(texts), [*blocks, None], strict=True) for part in pair if part]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        given = policy.processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"return_tensors": "pt"},
        )
    ids = actions.token_ids[row, actions.loss_mask[row]]
    given = {name: value for name, value in given.items() if name != "labels"}
    length = given["input_ids"].shape[1]
    # PaliGemma's type 1 is that of what the model writes, the others' that of images.
    suffix = {"attention_mask": 1, "token_type_ids": int(policy._model.config.model_type == "paligemma")}
    for name in [each for each in given if each.endswith(("attention_mask", "token_type_ids")) and "pixel" not in each]:
        given[name] = torch.nn.functional.pad(given[name], (0, len(ids)), value=suffix.get(name, 0))
    given["input_ids"] = torch.cat([given["input_ids"], ids.unsqueeze(0)], 1)
    logits: Tensor = policy._model(**given, use_cache=False).logits[0, length - 1 : -1, : policy.vocabulary]
    allowed = logits.float().index_fill(-1, torch.tensor(policy.placeholders.ids), -torch.inf)
    return allowed.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _as_blocks(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]
