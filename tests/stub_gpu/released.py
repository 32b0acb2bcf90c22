"""The memory that PyTorch's allocator takes for a shipped configuration of a released size, beside doctor's estimate.

python -m tests.stub_gpu.released CASE FOLDER FILE    on the stub (build.py); models are written into the folder
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from configs.loader import read_config
from configs.placement import PlacementSection
from flows.preflight.measured import PhaseCosts, measure_rollouts, measure_update
from flows.preflight.model import estimate_model
from grpo_core.collect import join_groups
from grpo_core.policies import kv_cache
from grpo_core.policies.estimate import GIB
from grpo_core.policies.glm_image.decode_step import DecodeStep
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.images import SourceImage, encode_png
from tasks.models.devices import configure_torch
from tasks.models.initial import training_choices
from tasks.models.resident import ModelSpec, load_untried
from tests.bench.trl_trainer import large_tokenizer
from tests.stub_gpu.families import group_requests
from tests.stub_gpu.host_values import HostValues
from tests.stub_gpu.released_models import write_model


@dataclass(frozen=True)
class Case:
    """A shipped configuration, the name of its model for `write_model`, and what differs from it."""

    config: str
    model: str
    changes: tuple[str, ...] = ()


# Less of what no memory depends on: samples beyond those that are decoded at once, steps without noise.
CASES = {
    "glm_image_80gb": Case("glm_image_80gb", "glm_image", ("rollout.num_inference_steps=2",)),
    "glm_image_both": Case("glm_image_both", "glm_image", ("rollout.num_inference_steps=6",)),
    "sd35_medium": Case("sd35_medium", "sd3", ("rollout.group_size=8", "update.minibatch_size=8")),
    "flux1_dev": Case("flux1_dev", "flux", ("rollout.group_size=4", "update.minibatch_size=8")),
    "qwen_image": Case(
        "qwen_image",
        "qwen_image",
        ("rollout.group_size=4", "rollout.num_inference_steps=6", "update.minibatch_size=8"),
    ),
    "text_7b": Case("text_7b", "qwen2_5_7b"),
    # Of a small model a full vocabulary takes the larger share.
    "text_1_7b": Case("text_7b", "qwen3_1_7b", ("rollout.temperature=0.9",)),
    "text_1_7b_nucleus": Case("text_7b", "qwen3_1_7b", ("rollout.top_p=0.9", "rollout.max_completion_length=128")),
    # The stub does not have the kernels of bitsandbytes.
    "medground": Case("medground", "qwen2_5_vl", ("update.optimizer=adamw", "update.lr_scheduler=constant")),
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


def measure(name: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return GiB by phase: estimated, without the CUDA context, and allocated."""
    case, images = CASES[name], ()
    model = folder / case.model
    config = read_config(f"configs/{case.config}.yaml", [f"policy.model={model}", *case.changes])
    write_model(case.model, model, getattr(torch, config.policy.dtype))
    if case.model == "qwen3_1_7b":
        large_tokenizer().backend_tokenizer.save(str(model / "tokenizer.json"))
    leave_out_later_tokens(4)
    if config.policy.kind == "vision_lm":
        noise = Image.effect_noise((1024, 1024), 50).convert("RGB")
        images = (SourceImage.of(encode_png(noise)),)
    family, costs = policy_family(config.policy.kind), PhaseCosts(torch.device("cuda"))
    with HostValues(everything=False):
        settings: Any = family.settings(config.rollout.model_dump())
        spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references=config.references)
        policy: Any = load_untried(spec, settings, costs.device)
        policy.sample_with(settings)
        # Values that are not there end no row.
        policy.ends = ()
        count = config.rollout.prompts_per_batch
        requests = group_requests(config, ["a red circle"] * count, [images] * count)
        groups = measure_rollouts(costs, policy, requests, family.modality)
        for stream, component in policy.components.items():
            update: Any = config.updates[stream]
            rows = join_groups(groups, torch.ones(count, len(groups[0].outputs)), stream)
            assert bool(rows.actions.loss_mask.all()), "rows have their full length"
            measure_update(costs, component, rows.select(range(update.micro_batch_size)), update)
    tokens = groups[0].streams.get("tokens")
    longest = None if tokens is None else int(tokens.prompt_lengths.max())  # type: ignore[attr-defined]
    with training_choices(config.policy, None, None, references=config.references) as choices:
        memory = estimate_model(config, choices, longest=longest).memory
    estimated = {phase: memory.in_phase(phase) / GIB - 1 for phase in memory.phases}
    return {"estimated": estimated, "allocated": {phase: peak / GIB for phase, peak in costs.peaks.items()}}


if __name__ == "__main__":
    configure_torch(PlacementSection(devices="cuda"))
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
