"""A tiny FLUX.1 Kontext that half the time draws anything learns to draw its source, by a reward that compares."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.images import SourceImage, encode_png
from grpo_core.parity import ParityTolerance
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.records import GroupRequest, RolloutGroup
from grpo_core.rewards.samples import ScoringBatch
from grpo_core.rewards.similarity.pairs import MseReward
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.diffusers.tiny_pipelines import load, request

TINY_SD3 = Path(__file__).parents[4] / "data" / "models" / "tiny-sd3"
TEXT = "keep it"
SETTINGS = DiffusersSettings(
    height=64,
    width=64,
    num_inference_steps=5,
    guidance_scale=1.0,
    max_sequence_length=16,
    decode_batch_size=12,
    sde_window_range=(0, 4),
)


@torch.no_grad()
def four_channels(own: Any) -> Any:
    """Add a latent channel that is always 0: Kontext takes what has as many channels as its latents for latents."""
    config = {name: each for name, each in own.config.items() if not name.startswith("_")}
    made = diffusers.AutoencoderKL.from_config({**config, "latent_channels": 4})
    moments = torch.tensor([0, 1, 2, 4, 5, 6])
    given = own.state_dict()
    for name, target in made.state_dict().items():
        places = [moments if size == 6 else torch.arange(size) for size in given[name].shape[:2]]
        if target.shape == given[name].shape:
            target.copy_(given[name])
        else:
            target.zero_()[torch.meshgrid(*places, indexing="ij")] = given[name]
    return made


def kontext() -> Any:
    """The parts of the shipped Stable Diffusion 3 around a transformer of Kontext with random weights."""
    own = diffusers.StableDiffusion3Pipeline.from_pretrained(TINY_SD3)
    encoder = transformers.CLIPTextModel(own.text_encoder.config)
    encoder.load_state_dict(own.text_encoder.state_dict(), strict=False)
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=encoder.config.hidden_size,
        axes_dims_rope=(8, 12, 12),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = (own.tokenizer, own.text_encoder_3, own.tokenizer_3, transformer)
    return diffusers.FluxKontextPipeline(scheduler, four_channels(own.vae), encoder, *parts)


def quarters(count: int, generator: torch.Generator) -> Tensor:
    """Pictures [count, 3, 64, 64] in [-1, 1] of four quarters, each of a random colour."""
    colours = torch.rand(count, 3, 2, 2, generator=generator) * 2 - 1
    return nn.functional.interpolate(colours, scale_factor=32)


def learn_to_copy_or_to_make_up(pipe: Any, steps: int = 120, rows: int = 32) -> None:
    """Train by flow matching on the source in half of the rows, and on another picture in the others."""
    generator, model = torch.Generator().manual_seed(0), pipe.transformer.train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (steps - step) / (0.3 * steps)))
    places = [(kind, row, column) for kind in (0, 1) for row in range(4) for column in range(4)]
    with torch.no_grad():
        embeds, pooled, text_ids = pipe.encode_prompt(TEXT, None, max_sequence_length=16)

    @torch.no_grad()
    def packed() -> Tensor:
        latents = pipe.vae.encode(quarters(rows, generator)).latent_dist.mode()
        latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        found: Tensor = pipe._pack_latents(latents, rows, 4, 8, 8)
        return found

    for _ in range(steps):
        source = packed()
        clean = torch.where(torch.rand(rows, 1, 1, generator=generator) < 0.5, source, packed())
        sigma, noise = torch.rand(rows, 1, 1, generator=generator), torch.randn(clean.shape, generator=generator)
        sigma = 3 * sigma / (1 + 2 * sigma)
        velocity = model(
            hidden_states=torch.cat([(1 - sigma) * clean + sigma * noise, source], 1),
            timestep=sigma.flatten(),
            pooled_projections=pooled.expand(rows, -1),
            encoder_hidden_states=embeds.expand(rows, -1, -1),
            txt_ids=text_ids,
            img_ids=torch.tensor(places, dtype=torch.float32),
            return_dict=False,
        )[0][:, : clean.shape[1]]
        optimizer.zero_grad()
        (velocity - (noise - clean)).square().mean().backward()
        optimizer.step()
        schedule.step()


def source(seed: int) -> SourceImage:
    levels = (quarters(1, torch.Generator().manual_seed(seed))[0] + 1) * 127.5
    return SourceImage.of(encode_png(Image.fromarray(levels.round().byte().permute(1, 2, 0).numpy())))


def rewards(groups: list[RolloutGroup]) -> Tensor:
    reward, values = MseReward(against="source"), []
    for group in groups:
        count, sources = len(group.outputs), [each.open() for each in group.request.sources]
        images = [each for each in group.outputs if isinstance(each, Image.Image)]
        batch = ScoringBatch(group.request.sample_ids, [TEXT] * count, images, source_images=[sources] * count)
        values.append([score.value for score in reward.score(batch)])
    return torch.tensor(values)


def sampled(policy: DiffusersPolicy, requests: list[GroupRequest]) -> list[RolloutGroup]:
    policy.denoising.prepare_for_sampling()
    return list(collect_rollouts(policy, requests, prompts_per_batch=8))


@pytest.mark.slow
def test_a_reward_against_the_source_goes_up(tmp_path: Path) -> None:
    pipe = kontext()
    learn_to_copy_or_to_make_up(pipe)
    pipe.save_pretrained(tmp_path / "kontext")
    policy = load(tmp_path / "kontext", SETTINGS, disturbed=False)
    optimizer = PolicyOptimizer(policy.denoising.trainable_parameters(), OptimizerSettings(learning_rate=3e-3))
    unseen = [request(TEXT, 4, window_start=None, seed=10 * k, sources=(source(1000 + k),)) for k in range(8)]
    before = rewards(sampled(policy, unseen)).mean()
    for step in range(20):
        sources = [(source(10 * step + k),) for k in range(4)]
        groups = sampled(
            policy,
            [
                request(TEXT, 12, window_start=step % 3, seed=100 * step + 10 * k, sources=own)
                for k, own in enumerate(sources)
            ],
        )
        found = rewards(groups)
        advantages = (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)
        update_policy(
            policy.denoising,
            optimizer,
            join_groups(groups, advantages, "denoising"),
            UpdateSettings(loss="grpo", clip_range=1e-3, micro_batch_size=12),
            parity=ParityTolerance(max_difference=1e-5, mean_difference=1e-6),
            seed=0,
        )
    after = rewards(sampled(policy, unseen)).mean()
    assert after > before + 0.05
