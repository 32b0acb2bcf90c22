"""A plain Flow-GRPO loop, and the flow beside it."""

import math
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor

from configs.loader import read_config
from configs.schema import RunConfig
from grpo_core.policies.diffusers.loading import default_targets
from tasks.process import CHECKOUT
from tasks.prompts.read import read_prompts
from tests.bench.page import ROUNDS, STEPS, Row, Timings

PROMPTS, GROUP_SIZE, MINIBATCH, WINDOW, DENOISING_STEPS = 6, 12, 36, 3, 8
LEVEL, SIDE, RANK, LEARNING_RATE = 0.7, 64, 16, 1e-7
WHAT = f"denoising iteration, {PROMPTS * GROUP_SIZE} images of {SIDE} pixels, {WINDOW} noisy of {DENOISING_STEPS} steps"


def configured(root: str) -> RunConfig:
    """The configuration of both sides: two optimizer steps an iteration, no held-out prompts, hardly any learning."""
    settings = {
        "run.name": "bench",
        "run.iterations": ROUNDS * (STEPS + 1),
        "storage.root": root,
        "policy.lora.rank": RANK,
        "rollout.prompts_per_iteration": PROMPTS,
        "rollout.group_size": GROUP_SIZE,
        "rollout.num_inference_steps": DENOISING_STEPS,
        "rollout.noise_level": LEVEL,
        "rollout.sde_window_size": WINDOW,
        "rewards": '[{"reward": "r2"}]',
        "update.learning_rate": LEARNING_RATE,
        "update.minibatch_size": MINIBATCH,
        "update.micro_batch_size": MINIBATCH,
        "evaluate.prompts": "null",
        "evaluate.targets": "null",
        "evaluate.target_column": "null",
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return read_config(CHECKOUT / "configs" / "tiny_sd3.yaml", overrides)


def measure() -> Iterator[Row]:
    """An iteration of a tiny Stable Diffusion 3 through the real flow.

    The plain loop samples, scores and updates like scripts that people write: the transformer is called by hand,
    nothing is stored, checked or compared before the update. It runs in a process of its own while the flow waits.
    """
    from flows import train

    plain: list[float] = []
    with tempfile.TemporaryDirectory() as root, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        timings = Timings(lambda: plain.extend(peers.submit(plain_iterations, root).result()))
        train(configured(root), on_iteration=timings, progress=False)
    peer, ours = "plain Flow-GRPO loop", tuple(timings.iterations)
    yield Row(what=WHAT, unit="s", ours=ours, peer=peer, theirs=tuple(plain), at_most=1.2)


def plain_iterations(root: str) -> list[float]:
    """Seconds of as many iterations as the flow has counted: sampling with its rewards, and the update."""
    torch.set_num_threads(1)
    loop, seconds = _loop(root), []
    for _ in range(STEPS + 1):
        begun = time.perf_counter()
        loop.update(*loop.sample())
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


@cache
def _loop(root: str) -> "_PlainLoop":
    return _PlainLoop(configured(root))


class _PlainLoop:
    """Flow-GRPO (arXiv:2505.05470) written down in one place, for one pipeline."""

    def __init__(self, config: RunConfig) -> None:
        self.pipe: Any = StableDiffusion3Pipeline.from_pretrained(config.policy.model)
        adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=default_targets(self.pipe.transformer))
        self.model = get_peft_model(self.pipe.transformer, adapters)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trained, self.optimizer = trained, torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        prompts = read_prompts(str(config.data.prompts)).prompts[:PROMPTS]
        self.prompts = [prompt.text for prompt in prompts]
        folder = Path(str(config.data.targets))
        self.targets = torch.stack([_pixels(Image.open(folder / str(each.columns["target"]))) for each in prompts])
        self.pipe.scheduler.set_timesteps(DENOISING_STEPS)

    def _velocity(self, latents: Tensor, step: int, embeds: Tensor, pooled: Tensor) -> Tensor:
        clock = self.pipe.scheduler.timesteps[step].expand(len(latents))
        velocity: Tensor = self.model(
            hidden_states=latents,
            timestep=clock,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity

    def _transition(self, latents: Tensor, velocity: Tensor, step: int) -> tuple[Tensor, Tensor]:
        sigmas = self.pipe.scheduler.sigmas
        sigma, after = sigmas[step], sigmas[step + 1]
        root = LEVEL * (sigma / (1 - (sigmas[1] if sigma == 1 else sigma))).sqrt()
        drift = velocity + root.square() / (2 * sigma) * (latents + (1 - sigma) * velocity)
        return latents + drift * (after - sigma), root * (sigma - after).sqrt()

    def sample(self) -> tuple[Tensor, ...]:
        """Sample all groups at once and score them; return states, log-probs, advantages and conditions."""
        with torch.no_grad():
            embeds, _, pooled, _ = self.pipe.encode_prompt(
                self.prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=14
            )
            embeds, pooled = (each.repeat_interleave(GROUP_SIZE, 0) for each in (embeds, pooled))
            channels, side = self.pipe.transformer.config.in_channels, SIDE // self.pipe.vae_scale_factor
            latents = torch.randn(len(embeds), channels, side, side)
            states, logprobs = [latents], []
            for step in range(DENOISING_STEPS):
                velocity = self._velocity(latents, step, embeds, pooled)
                if step < WINDOW:
                    mean, std = self._transition(latents, velocity, step)
                    latents = mean + std * torch.randn_like(mean)
                    states.append(latents)
                    logprobs.append(_logprob(latents, mean, std))
                else:
                    sigmas = self.pipe.scheduler.sigmas
                    latents = latents + velocity * (sigmas[step + 1] - sigmas[step])
            vae = self.pipe.vae
            images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
            rewards = _r2((images / 2 + 0.5).clamp(0, 1), self.targets.repeat_interleave(GROUP_SIZE, 0))
            groups = rewards.view(PROMPTS, GROUP_SIZE)
            advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        return torch.stack(states, 1), torch.stack(logprobs, 1), advantages, embeds, pooled

    def update(self, states: Tensor, old: Tensor, advantages: Tensor, embeds: Tensor, pooled: Tensor) -> None:
        """Make one optimizer step a minibatch."""
        for part in torch.randperm(len(states)).split(MINIBATCH):
            for step in range(WINDOW):
                velocity = self._velocity(states[part, step], step, embeds[part], pooled[part])
                mean, std = self._transition(states[part, step], velocity, step)
                ratio = (_logprob(states[part, step + 1], mean, std) - old[part, step]).exp()
                bounded = ratio.clamp(1 - 1e-4, 1 + 1e-4)
                loss = -torch.minimum(ratio * advantages[part], bounded * advantages[part]).mean() / WINDOW
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def _logprob(latents: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    density = -((latents - mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2
    return density.flatten(1).mean(1)


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def _r2(images: Tensor, targets: Tensor) -> Tensor:
    spread = (targets - targets.mean((1, 2, 3), keepdim=True)).square().sum((1, 2, 3))
    return 1 - (images - targets).square().sum((1, 2, 3)) / spread
