"""The tiny GLM-Image that edits: a vision tower set by hand, and both trainings continued on edits.

It starts from the shipped model, whose tower has one code for four of its tokens and was never trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import GlmImagePipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor
from transformers import GlmImageConfig, GlmImageForConditionalGeneration
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from data.recipes.edits import (
    HELDOUT_FILE,
    TRAIN_FILE,
    Edit,
    EditCorpus,
    choose_edits,
    draw_edit_corpus,
    split_edits,
    write_edit_file,
)
from data.recipes.glm_image import (
    draw_corpus,
    encode_scenes,
    flow_matching_loss,
    glyph_embeddings,
    measure_saved,
    scramble_tokens,
    token_losses,
)
from data.recipes.glm_image_parts import LIBRARIES, TinyRecipe, save_tiny_model
from data.recipes.shapes import (
    CELL_PIXELS,
    GRID,
    IMAGE_PIXELS,
    PREVIEW_GRID,
    codebook,
    decode_tokens,
    draw,
    encode_cells,
    split_scenes,
)
from data.recipes.trainer import DATA, ProgressCallback, Quality, print_progress, replace_shipped, train
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.processor import UnitProcessor
from grpo_core.policies.glm_image.prompts import encode_prompts
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.streams import ImageSize

_MEASURED_EDITS = 60
_LARGE = slice(PREVIEW_GRID**2, None)
_SIZE = ImageSize(IMAGE_PIXELS, IMAGE_PIXELS)


@dataclass(frozen=True)
class TinyEditRecipe:
    """How the tiny GLM-Image learns to edit; the same recipe gives the same weights on the same machine.

    Attributes:
        heldout_fraction: share of the pairs of colours, before and after, that the training never sees.
        speckle_probability, unedited_probability: see :func:`data.recipes.edits.draw_edit_corpus`.
        decoder_steps: of the decoder's training; half of its batches have a source image.
    """

    base: TinyRecipe = field(default_factory=TinyRecipe)
    heldout_fraction: float = 0.1
    corpus_size: int = 4096
    speckle_probability: float = 0.05
    unedited_probability: float = 0.2
    autoregressive_steps: int = 600
    edit_batch: int = 24
    caption_batch: int = 8
    autoregressive_learning_rate: float = 4e-3
    decoder_steps: int = 200
    decoder_learning_rate: float = 1e-3
    train_prompts: int = 60
    heldout_prompts: int = 12


_CHANNELS = 8
_VISION = {
    "depth": 1,
    "hidden_size": _CHANNELS,
    "num_heads": 1,
    "image_size": IMAGE_PIXELS,
    # The image processor halves a source, so that a code covers as many of its pixels as a token of the image.
    "patch_size": CELL_PIXELS // 2,
    "intermediate_size": _CHANNELS,
}


def build_editor(pipeline: GlmImagePipeline) -> GlmImagePipeline:
    """Return a pipeline with a tower for source images, whose codes are the nearest colours of the codebook."""
    old = pipeline.vision_language_encoder
    codes = old.config.vq_config.num_embeddings
    config = GlmImageConfig(
        text_config=old.config.text_config.to_dict(),
        vision_config=_VISION,
        vq_config={"embed_dim": _CHANNELS, "num_embeddings": codes, "latent_channels": _CHANNELS},
        image_token_id=old.config.image_token_id,
        image_start_token_id=old.config.image_start_token_id,
        image_end_token_id=old.config.image_end_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GlmImageForConditionalGeneration(config)
    model.generation_config = old.generation_config
    model.model.language_model.load_state_dict(old.model.language_model.state_dict())
    model.lm_head.load_state_dict(old.lm_head.state_dict())
    _set_tower(model.model)
    image_processor = GlmImageImageProcessorPil(
        patch_size=_VISION["patch_size"],
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": IMAGE_PIXELS**2, "longest_edge": 16 * IMAGE_PIXELS**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    read = pipeline.processor
    processor = UnitProcessor(image_processor, read.tokenizer, chat_template=read.chat_template, unit=read.unit)
    parts = {**pipeline.components, "vision_language_encoder": model.eval(), "processor": processor}
    editor = GlmImagePipeline(**parts)
    editor.set_progress_bar_config(disable=True)
    return editor


@torch.no_grad()
def _set_tower(model: Any) -> None:
    """Let the quantizer find the colour c of the codebook that is nearest to a patch's mean colour x.

    It takes the code e with the largest cosine to z; all e have length 1. With z = (x, 1, 0) and
    e = s (c, -|c|^2 / 2, r), where r makes up the length, that is the largest s (x c - |c|^2 / 2), so the smallest
    |x - c|^2.
    """
    colors = torch.from_numpy(codebook()) / 127.5 - 1
    for parameter in [*model.visual.parameters(), *model.vqmodel.parameters()]:
        parameter.zero_()
    patch = model.visual.patch_embed.proj
    # Blocks whose outputs are zero add nothing; a constant for the fourth channel, where each mean colour is.
    for channel in range(3):
        patch.weight[channel, channel] = 1 / patch.weight[0, 0].numel()
    patch.bias[3] = 1.0
    convolution = model.vqmodel.quant_conv
    convolution.weight.copy_(torch.eye(_CHANNELS)[:, :, None, None])
    halves = -colors.square().sum(-1, keepdim=True) / 2
    known = torch.cat([colors, halves], -1)
    known = known / (1.01 * known.norm(dim=-1).max())
    rest = (1 - known.square().sum(-1, keepdim=True)).sqrt()
    model.vqmodel.quantize.embedding.weight[:, :5] = torch.cat([known, rest], -1)


def _draw_corpus(edits: Sequence[Edit], recipe: TinyEditRecipe) -> EditCorpus:
    return draw_edit_corpus(
        edits,
        recipe.corpus_size,
        recipe.base.seed,
        speckle_probability=recipe.speckle_probability,
        unedited_probability=recipe.unedited_probability,
    )


def _encode_edits(pipeline: GlmImagePipeline, corpus: EditCorpus) -> tuple[EncodedPrompts, Tensor]:
    sources = encode_cells(corpus.sources)[:, _LARGE].reshape(-1, 1, GRID, GRID)
    encoded = encode_prompts(
        pipeline.vision_language_encoder.model,
        pipeline.processor,
        [edit.instruction for edit in corpus.edits],
        _SIZE,
        [list(each) for each in sources],
    )
    return encoded, encode_cells(corpus.targets)[:, _LARGE]


def train_token_editor(
    pipeline: GlmImagePipeline, recipe: TinyEditRecipe, on_step: ProgressCallback | None = None
) -> dict[str, float]:
    """Train the token model in place on edits and, so that it does not forget them, on captions; return its losses."""
    model, base = pipeline.vision_language_encoder, recipe.base
    train_edits, heldout_edits = split_edits(base.seed, recipe.heldout_fraction)
    edits, edit_tokens = _encode_edits(pipeline, _draw_corpus(train_edits, recipe))
    scenes, _ = split_scenes(base.seed, base.heldout_fraction)
    captions, (described, caption_tokens) = encode_scenes(pipeline, scenes), draw_corpus(scenes, base)
    trained = [p for name, p in model.named_parameters() if "visual" not in name and "vqmodel" not in name]
    generator = torch.Generator().manual_seed(base.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (recipe.edit_batch,), generator=generator)
        of_edits = token_losses(pipeline, edits.select(rows), edit_tokens[rows]).mean()
        rows = torch.randint(base.corpus_size, (recipe.caption_batch,), generator=generator)
        encoded = captions.select(described[rows])
        share = recipe.caption_batch / (recipe.edit_batch + recipe.caption_batch)
        return torch.lerp(of_edits, token_losses(pipeline, encoded, caption_tokens[rows]).mean(), share)

    final = train(model, trained, recipe.autoregressive_learning_rate, recipe.autoregressive_steps, loss, on_step)
    clean = draw_edit_corpus(heldout_edits, 64, base.seed, speckle_probability=0.0, unedited_probability=0.0)
    with torch.no_grad():
        heldout = token_losses(pipeline, *_encode_edits(pipeline, clean)).mean().item()
    return {"final_loss": final, "heldout_edit_loss": heldout}


def train_decoder_on_sources(
    pipeline: GlmImagePipeline, recipe: TinyEditRecipe, on_step: ProgressCallback | None = None
) -> float:
    """Train the decoder in place, with a source image in half of the batches; return the loss of the last steps."""
    base = recipe.base
    train_edits, _ = split_edits(base.seed, recipe.heldout_fraction)
    corpus = _draw_corpus(train_edits, recipe)
    sources, targets = (encode_cells(cells)[:, _LARGE] for cells in (corpus.sources, corpus.targets))
    glyphs = glyph_embeddings(pipeline)
    generator = torch.Generator().manual_seed(base.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (base.decoder_batch,), generator=generator)
        tokens = scramble_tokens(targets[rows], generator)
        glyph = glyphs[int(torch.randint(len(glyphs), (1,), generator=generator))]
        cache = None
        if torch.rand((), generator=generator) < 0.5:
            cache = _write_source(pipeline, sources[rows[:1]], glyph, base)
        return flow_matching_loss(pipeline, tokens, glyph, base, generator, cache)

    # It was loaded frozen.
    parameters = pipeline.transformer.requires_grad_(True).parameters()
    return train(pipeline.transformer, parameters, recipe.decoder_learning_rate, recipe.decoder_steps, loss, on_step)


def _write_source(pipeline: GlmImagePipeline, tokens: Tensor, glyph: Tensor, recipe: TinyRecipe) -> GlmImageKVCache:
    """Return the keys and values of one source image, int64 [1, 64], as the pipeline writes them."""
    cache = GlmImageKVCache(pipeline.transformer.config.num_layers)
    cache.set_mode("write")
    cells = decode_tokens(tokens) / recipe.latent_std
    prior = tokens.view(-1, GRID, GRID).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten()
    pipeline.transformer(
        hidden_states=cells.repeat_interleave(CELL_PIXELS, 2).repeat_interleave(CELL_PIXELS, 3),
        encoder_hidden_states=glyph[:, :0],
        prior_token_id=prior,
        prior_token_drop=torch.zeros_like(prior, dtype=torch.bool),
        timestep=torch.zeros(1),
        target_size=torch.full((1, 2), float(IMAGE_PIXELS)),
        crop_coords=torch.zeros(1, 2),
        kv_caches=cache,
    )
    cache.set_mode("read")
    return cache


def measure_edits(folder: Path, edits: Sequence[Edit], temperature: float) -> Quality:
    """Measure the R² of images of these edits."""
    sources = [[SourceImage.of(encode_png(draw(edit.source)))] for edit in edits]
    scenes = [edit.target for edit in edits]
    return measure_saved(folder, [edit.instruction for edit in edits], scenes, temperature, sources)


def make() -> None:
    """Make the tiny GLM-Image that edits, from the shipped tiny GLM-Image; some pairs of colours it has never seen."""
    recipe = TinyEditRecipe()
    seen, unseen = split_edits(recipe.base.seed, recipe.heldout_fraction)
    base = load_pipeline(str(DATA / "models" / "tiny-glm-image"), dtype=torch.float32, device=torch.device("cpu"))
    pipeline = build_editor(base)

    def train_both() -> dict[str, object]:
        token_model = train_token_editor(pipeline, recipe, print_progress("train token model"))
        decoder = train_decoder_on_sources(pipeline, recipe, print_progress("train decoder"))
        return {"token_model": token_model, "decoder": {"final_loss": decoder}}

    def measured(folder: Path) -> dict[str, Quality]:
        chosen = choose_edits(unseen, _MEASURED_EDITS, recipe.base.seed)
        return {f"temperature {warm}": measure_edits(folder, chosen, warm) for warm in (1.0, 0.7)}

    replace_shipped(
        "tiny-glm-image-edit", recipe, LIBRARIES, train_both, lambda folder: save_tiny_model(pipeline, folder), measured
    )
    for name, edits, count in (
        (TRAIN_FILE, seen, recipe.train_prompts),
        (HELDOUT_FILE, unseen, recipe.heldout_prompts),
    ):
        write_edit_file(choose_edits(edits, count, recipe.base.seed), DATA / "prompts" / name, DATA / "targets")
