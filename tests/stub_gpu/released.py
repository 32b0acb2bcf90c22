"""The memory that PyTorch's allocator takes for a shipped configuration of a released size, beside doctor's estimate.

python -m tests.stub_gpu.released CONFIG FOLDER FILE    on the stub (build.py); models are written into the folder
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from configs.loader import read_config
from configs.placement import PlacementSection
from flows.preflight.model import estimate_model
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.policies import kv_cache
from grpo_core.policies.estimate import GIB
from grpo_core.policies.glm_image.decode_step import DecodeStep
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from tasks.models.devices import configure_torch
from tasks.models.initial import training_choices
from tasks.models.resident import ModelSpec, load_untried
from tests.stub_gpu.families import group_requests
from tests.stub_gpu.host_values import HostValues
from tests.stub_gpu.released_models import write_model

MODELS = {
    "glm_image_80gb": "glm_image",
    "glm_image_both": "glm_image",
    "sd35_medium": "sd3",
    "flux1_dev": "flux",
    "qwen_image": "qwen_image",
    "text_7b": "qwen2_5_7b",
    "medground": "qwen2_5_vl",
}
# Less of what no memory depends on: samples beyond those that are decoded at once, steps without noise.
LESS = {
    "glm_image_80gb": ["rollout.num_inference_steps=2"],
    "glm_image_both": ["rollout.num_inference_steps=6"],
    "sd35_medium": ["rollout.group_size=8", "update.minibatch_size=8"],
    "flux1_dev": ["rollout.group_size=4", "update.minibatch_size=8"],
    "qwen_image": ["rollout.group_size=4", "rollout.num_inference_steps=6", "update.minibatch_size=8"],
    # The stub does not have the kernels of bitsandbytes.
    "medground": ["update.optimizer=adamw", "update.lr_scheduler=constant"],
}


def leave_out_later_tokens(count: int) -> None:
    """Give caches of GLM-Image their full memory at once, and compute the first tokens: later ones take no more."""
    kv_cache._GROWTH = 1 << 20
    step: Any = DecodeStep.__call__

    def first(self: Any, ids: Tensor, index: int) -> Tensor:
        if index < count:
            self.last = step(self, ids, index)
        return self.last

    DecodeStep.__call__ = first  # type: ignore[method-assign]


class Peaks:
    """The most that was allocated in each phase."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def during(self, phase: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = work(*arguments, **options)
        self.found[phase] = max(self.found.get(phase, 0), torch.cuda.max_memory_allocated() / GIB)
        return result


def measure(name: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return GiB by phase: estimated, without the CUDA context, and allocated."""
    model = folder / MODELS[name]
    config = read_config(f"configs/{name}.yaml", [f"policy.model={model}", *LESS.get(name, ())])
    write_model(MODELS[name], model, getattr(torch, config.policy.dtype))
    peaks, images = Peaks(), ()
    leave_out_later_tokens(4)
    if config.policy.kind == "vision_lm":
        noise = Image.effect_noise((1024, 1024), 50).convert("RGB")
        images = (SourceImage.of(encode_png(noise)),)
    with HostValues(everything=False):
        settings: Any = policy_family(config.policy.kind).settings(config.rollout.model_dump())
        spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references=config.references)
        policy: Any = load_untried(spec, settings, torch.device("cuda"))
        policy.sample_with(settings)
        if hasattr(policy, "tokens"):
            sample = policy.tokens.sample

            def sampled(*arguments: Any, **options: Any) -> Any:
                drafts = peaks.during("sampling", sample, *arguments, **options)
                torch.cuda.reset_peak_memory_stats()
                return drafts

            policy.tokens.sample = sampled
        count = config.rollout.prompts_per_batch
        requests = group_requests(config, ["a red circle"] * count, [images] * count)
        phase = "sampling" if config.policy.kind in ("causal_lm", "vision_lm") else "decoding"
        groups = peaks.during(phase, lambda: list(collect_rollouts(policy, requests, prompts_per_batch=count)))
        for stream, component in policy.components.items():
            update: Any = config.updates[stream]
            rows = join_groups(groups, torch.ones(count, len(groups[0].outputs)), stream)
            assert bool(rows.actions.loss_mask.all()), "rows have their full length"
            rows = rows.select(range(update.micro_batch_size))
            if update.ema is not None:
                component.trained.keep("ema")
            optimizer = PolicyOptimizer(component.trainable_parameters(), update)
            once = update.model_copy(update={"minibatch_size": len(rows)})
            for _ in range(2):  # the second has the moments of the first
                peaks.during(f"{stream} update", update_policy, component, optimizer, rows, once, seed=0)
    tokens = groups[0].streams.get("tokens")
    longest = None if tokens is None else int(tokens.prompt_lengths.max())  # type: ignore[attr-defined]
    with training_choices(config.policy, None, None, references=config.references) as choices:
        memory = estimate_model(config, choices, longest=longest).memory
    estimated = {phase: memory.in_phase(phase) / GIB - 1 for phase in memory.phases}
    return {"estimated": estimated, "allocated": peaks.found}


if __name__ == "__main__":
    configure_torch(PlacementSection(devices="cuda"))
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
