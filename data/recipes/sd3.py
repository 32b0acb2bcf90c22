"""A Stable Diffusion 3 of the stock classes, small enough for one CPU core: parts, training, quality."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from data.recipes.autoencoder import build_cell_autoencoder
from data.recipes.shapes import (
    CELL_PIXELS,
    GRID,
    IMAGE_PIXELS,
    Scene,
    ShapesRecipe,
    all_scenes,
    draw,
    draw_imperfect_corpus,
    split_scenes,
)
from data.recipes.trainer import ProgressCallback, Quality, measure, print_progress, replace_shipped, train
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.trained.settings import TrainingChoice

_CHANNELS = 3
# In patches: the positions of images of up to this many along each axis are stored with the weights.
_MAX_POSITIONS = 16
_WORD_END = "</w>"


@dataclass(frozen=True)
class TinySd3Recipe(ShapesRecipe):
    """How the tiny SD3 is built and trained; the same recipe gives the same weights on the same machine.

    For one caption the noise decides which shape is drawn and where; training with rewards can make the caption decide.

    Attributes:
        clip_size, t5_size: of the text encoders, whose weights stay random.
        text_length: tokens that the CLIP tokenizers pad to, and `max_sequence_length` of the T5.
        patch_size: of the transformer, in latents along each axis; a latent covers 8 pixels.
        latent_std: pixels, in [-1, 1], are divided by it to give latents.
        prompt_drop_probability: probability that the prompt is empty in training, for guidance.
    """

    confusion_probability: float = 0.1
    speckle_probability: float = 0.06
    clip_size: int = 32
    t5_size: int = 64
    text_length: int = 14
    hidden_size: int = 64
    layers: int = 3
    heads: int = 4
    patch_size: int = 2
    latent_std: float = 0.7
    shift: float = 3.0
    steps: int = 2000
    batch: int = 32
    learning_rate: float = 3e-3
    prompt_drop_probability: float = 0.1


def caption_words() -> list[str]:
    """Return every word of the captions once, in alphabetical order."""
    return sorted({word for scene in all_scenes() for word in scene.caption.split()})


def build_clip_tokenizer(length: int) -> CLIPTokenizer:
    """Build a CLIP tokenizer, padding and cutting to a length, to which a word of the captions is one id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A word grows letter by letter from its start, the longest word first: a shorter one's start may be inside it.
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(caption_words(), key=len, reverse=True):
        pieces = [*word[:-1], word[-1] + _WORD_END]
        merges.update(dict.fromkeys(("".join(pieces[:i]), pieces[i]) for i in range(1, len(pieces))))
    entries = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + _WORD_END for letter in letters)]
    entries += dict.fromkeys(left + right for left, right in merges)
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=length)


def build_t5_tokenizer() -> T5Tokenizer:
    """Build a T5 tokenizer to which a word of the captions is one id and any other word is unknown."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=[*specials, *(("\u2581" + word, -1.0) for word in caption_words())], extra_ids=0)


def build_pipeline(recipe: TinySd3Recipe) -> StableDiffusion3Pipeline:
    """Build the components with random weights from the recipe's seed. Global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        tokenizer, t5_tokenizer = build_clip_tokenizer(recipe.text_length), build_t5_tokenizer()
        pipeline = StableDiffusion3Pipeline(
            transformer=_build_transformer(recipe),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=recipe.shift),
            vae=build_cell_autoencoder(
                levels=CELL_PIXELS.bit_length(),
                sample_size=IMAGE_PIXELS,
                scaling_factor=1 / recipe.latent_std,
                shift_factor=0.0,
            ),
            text_encoder=_build_clip(recipe, tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_build_clip(recipe, tokenizer),
            tokenizer_2=tokenizer,
            text_encoder_3=_build_t5(recipe, t5_tokenizer),
            tokenizer_3=t5_tokenizer,
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _build_transformer(recipe: TinySd3Recipe) -> SD3Transformer2DModel:
    transformer = SD3Transformer2DModel(
        sample_size=GRID,
        patch_size=recipe.patch_size,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=recipe.layers,
        attention_head_dim=recipe.hidden_size // recipe.heads,
        num_attention_heads=recipe.heads,
        joint_attention_dim=recipe.t5_size,
        caption_projection_dim=recipe.hidden_size,
        pooled_projection_dim=2 * recipe.clip_size,
        pos_embed_max_size=_MAX_POSITIONS,
        qk_norm="rms_norm",
    )
    # As DiTs start: a velocity of zero.
    nn.init.zeros_(transformer.proj_out.weight)
    return transformer.eval()


def _build_clip(recipe: TinySd3Recipe, tokenizer: PreTrainedTokenizerBase) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.clip_size,
        intermediate_size=2 * recipe.clip_size,
        projection_dim=recipe.clip_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=recipe.text_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModelWithProjection(config)
    # An untrained encoder's embeddings are close to zero, and the transformer reads them without a norm.
    for embedding, std in (("token_embedding", 1.0), ("position_embedding", 0.5)):
        nn.init.normal_(model.get_submodule(f"text_model.embeddings.{embedding}").weight, std=std)
    return model.eval()


def _build_t5(recipe: TinySd3Recipe, tokenizer: PreTrainedTokenizerBase) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=recipe.t5_size,
        d_kv=16,
        d_ff=recipe.t5_size,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def train_transformer(
    pipeline: StableDiffusion3Pipeline, recipe: TinySd3Recipe, on_step: ProgressCallback | None = None
) -> float:
    """Train `pipeline.transformer` in place on the training captions; return the loss of the last steps.

    The straight path x_t = (1 - t) x_0 + t noise, its velocity noise - x_0 and logit-normal t are those of Esser et al.
    2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1; t is shifted as the
    scheduler shifts its noise levels, section 5.3.2.
    """
    scenes, _ = split_scenes(recipe.seed, recipe.heldout_fraction)
    described, cells = draw_imperfect_corpus(scenes, recipe)
    latents = (torch.from_numpy(cells).float().permute(0, 3, 1, 2) / 127.5 - 1) / recipe.latent_std
    # The last one is for dropped prompts.
    captions_and_none = [*(scene.caption for scene in scenes), ""]
    with torch.no_grad():
        states, _, pooled, _ = pipeline.encode_prompt(
            captions_and_none, None, None, do_classifier_free_guidance=False, max_sequence_length=recipe.text_length
        )
    captions = torch.from_numpy(described)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (recipe.batch,), generator=generator)
        dropped = torch.rand(recipe.batch, generator=generator) < recipe.prompt_drop_probability
        given = torch.where(dropped, len(scenes), captions[rows])
        return _flow_matching_loss(pipeline, latents[rows], states[given], pooled[given], generator)

    parameters = pipeline.transformer.parameters()
    return train(pipeline.transformer, parameters, recipe.learning_rate, recipe.steps, loss, on_step)


def _flow_matching_loss(
    pipeline: StableDiffusion3Pipeline, clean: Tensor, states: Tensor, pooled: Tensor, generator: torch.Generator
) -> Tensor:
    noise = torch.randn(clean.shape, generator=generator)
    shift = pipeline.scheduler.config.shift
    time = torch.sigmoid(torch.randn(len(clean), generator=generator))
    time = shift * time / (1 + (shift - 1) * time)
    velocity = pipeline.transformer(
        hidden_states=torch.lerp(clean, noise, time.view(-1, 1, 1, 1)),
        encoder_hidden_states=states,
        pooled_projections=pooled,
        timestep=time * pipeline.scheduler.config.num_train_timesteps,
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, noise - clean)


def measure_saved(folder: Path, scenes: Sequence[Scene], guidance_scale: float) -> Quality:
    """Measure the R² of images of these captions, with the policy of training with rewards."""
    settings = DiffusersSettings(
        height=IMAGE_PIXELS,
        width=IMAGE_PIXELS,
        num_inference_steps=8,
        guidance_scale=guidance_scale,
        sde_window_size=0,
        # The transformer has seen texts of this length alone.
        max_sequence_length=TinySd3Recipe.text_length,
    )
    policy = DiffusersPolicy.load(str(folder), settings, {"denoising": TrainingChoice(lora=None)})
    return measure(policy, [scene.caption for scene in scenes], "r2", targets=[draw(scene) for scene in scenes])


def make() -> None:
    """Make the tiny SD3; its prompts are those of the tiny GLM-Image."""
    recipe = TinySd3Recipe()
    _, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    pipeline = build_pipeline(recipe)
    replace_shipped(
        "tiny-sd3",
        recipe,
        ("torch", "transformers", "diffusers", "tokenizers", "numpy"),
        lambda: {"final_loss": train_transformer(pipeline, recipe, print_progress("train transformer"))},
        pipeline.save_pretrained,
        lambda folder: {f"guidance {scale}": measure_saved(folder, unseen, scale) for scale in (1.0, 2.0)},
    )
