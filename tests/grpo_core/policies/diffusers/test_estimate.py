"""The estimate of memory against tensors that exist."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.estimate import MemoryEstimate, ModelEstimate, Workload, estimate_resources
from grpo_core.policies.sizes import count_blocks
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.policies.diffusers.tiny_pipelines import FAMILIES, SavedFolder, SharedPolicy, request, settings

LORA = TrainingChoice(LoraSettings(rank=4, alpha=8))


def sized(memory: MemoryEstimate) -> Mapping[str, int]:
    return {part.name: part.bytes for part in memory.parts}


def estimated(folder: Path, chosen: DiffusersSettings, choice: TrainingChoice = LORA, **workload: Any) -> ModelEstimate:
    given = Workload(
        **{
            "dtype": "float32",
            "group_size": 4,
            "prompts_per_batch": 2,
            "micro_batch_size": 2,
            "eight_bit_optimizer": False,
            **workload,
        }
    )
    choices: Mapping[Any, TrainingChoice] = {"denoising": choice}
    return estimate_resources("diffusers", str(folder), chosen, choices, {"denoising": given})


def kept_for_backward(policy: DiffusersPolicy) -> int:
    """Bytes that autograd keeps for the pass of two rows, parameters left out."""
    (group,) = policy.sample([request(samples=2)])
    actions = group.streams["denoising"].actions
    assert isinstance(actions, DenoisingBatch)
    parameters = {each.untyped_storage().data_ptr() for each in policy.denoising.trained.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = policy.denoising.logprobs(actions)
    del scored
    return sum(each.untyped_storage().nbytes() for each in kept.values())


@pytest.mark.parametrize(
    # One with guidance in two passes, and one with it in its embedding.
    "name",
    [pytest.param(name, marks=() if name in ("sd3", "flux") else pytest.mark.slow) for name in FAMILIES],
)
def test_activations_are_about_what_autograd_keeps(
    saved_folder: SavedFolder, shared_policy: SharedPolicy, name: str
) -> None:
    policy = shared_policy(name)
    chosen = settings(name, height=64, width=64, num_inference_steps=3, sde_window_range=(0, 3))
    policy.sample_with(chosen)
    measured = kept_for_backward(policy)
    # The estimate has the longest prompt that is read; tiny heads and embeddings are as large as a block.
    share = sized(estimated(saved_folder(name), chosen).memory)["denoising activations"] / measured
    assert 0.7 < share < 2.2


def test_weights_and_states_are_counted_exactly(saved_folder: SavedFolder, shared_policy: SharedPolicy) -> None:
    for name in FAMILIES:
        policy, found = shared_policy(name), estimated(saved_folder(name), settings(name))
        pipeline, parts = policy.denoising.pipeline, sized(found.memory)
        assert parts["vae weights"] == sum(each.nbytes for each in pipeline.vae.parameters())
        assert parts["text_encoder weights"] == sum(each.nbytes for each in pipeline.text_encoder.parameters())
        trained = sum(each.nbytes for each in policy.denoising.trainable_parameters().values())
        assert parts["denoising adapters"] == parts["denoising gradients"] == trained
        everything = sum(each.nbytes for each in policy.denoising.trained.model.parameters())
        assert parts["transformer weights"] == everything - trained
        (group,) = policy.sample([request(samples=1)])
        actions = group.streams["denoising"].actions
        assert isinstance(actions, DenoisingBatch)
        stored = actions.states[0].nbytes
        assert found.states == stored
        assert f"{stored / 1024**2:.3g} MiB of states per image of 32x32" in found.counted


def test_what_grows_with_what(saved_folder: SavedFolder) -> None:
    folder = saved_folder("sd3")

    def activations(chosen: DiffusersSettings, choice: TrainingChoice = LORA, **workload: Any) -> int:
        return sized(estimated(folder, chosen, choice, **workload).memory)["denoising activations"]

    base = activations(settings())
    assert activations(settings(), micro_batch_size=4) == 2 * base
    # One block is at work, however many passes are kept.
    once = activations(settings(guidance_scale=1.0))
    assert activations(settings(sde_window_size=4)) - base == 2 * (base - once)
    # Steps that are gone back one by one keep two passes, those of guidance, of a window of any length.
    assert activations(settings(sde_window_size=4), backward_per_step=True) == once
    chosen = estimated(folder, settings(sde_window_size=4), backward_per_step="auto").memory
    assert sized(chosen)["denoising activations"] - once == 3 * (base - once)
    assert sized(chosen.one_by_one()) == {**sized(chosen), "denoising activations": once}
    assert activations(settings(), TrainingChoice(LORA.lora, gradient_checkpointing=True)) < base / 3
    larger = estimated(folder, settings(), sizes=(ImageSize(32, 32), ImageSize(64, 32)))
    assert larger.tokens == {ImageSize(32, 32): 256, ImageSize(64, 32): 512}
    assert sized(larger.memory)["denoising activations"] > base


def test_a_phase_has_what_it_needs_and_nothing_that_is_offloaded(saved_folder: SavedFolder) -> None:
    folder, chosen = saved_folder("sd3"), settings()
    choices: Mapping[Any, TrainingChoice] = {"denoising": LORA}
    workload = Workload("float32", 4, 2, 2, eight_bit_optimizer=False, offload_optimizer=True)
    moved = estimate_resources("diffusers", str(folder), chosen, choices, {"denoising": workload}, offload=True).memory
    plain = estimated(folder, chosen).memory
    parts = sized(plain)
    encoders = ("text_encoder weights", "text_encoder_2 weights", "text_encoder_3 weights")
    texts, transformer = sum(parts[each] for each in encoders), parts["transformer weights"]
    vae, adapters, context = parts["vae weights"], parts["denoising adapters"], parts["CUDA context"]
    everything, work = texts + transformer + vae + adapters + context, parts["denoising activations"]
    assert {each: plain.in_phase(each) for each in plain.phases} == {
        "decoding": everything + parts["decoding"],
        # Gradients, and the two moments.
        "denoising update": everything + 3 * adapters + work,
    }
    assert plain.needed == int(1.15 * max(map(plain.in_phase, plain.phases)))
    assert plain.offloaded == {}
    assert {each: moved.in_phase(each) - context for each in moved.phases} == {
        "encoding": texts + adapters,
        "decoding": transformer + vae + adapters + parts["decoding"],
        "denoising update": transformer + 2 * adapters + work,
    }
    assert sum(moved.offloaded.values()) == texts + transformer + vae + 2 * adapters
    # Every weight is trained: the transformer stays, and so do its gradients.
    full: Mapping[Any, TrainingChoice] = {"denoising": TrainingChoice(None)}
    whole = estimate_resources("diffusers", str(folder), chosen, full, {"denoising": workload}, offload=True).memory
    assert set(whole.offloaded) == {*encoders, "vae weights", "denoising moments"}
    assert whole.in_phase("encoding") - context == texts + sized(whole)["transformer weights"]


def test_blocks_are_counted() -> None:
    import diffusers

    with torch.device("meta"):
        flux = diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=3)
        z_image = diffusers.ZImageTransformer2DModel(n_layers=3, n_refiner_layers=2)
    assert count_blocks(flux) == 5
    assert count_blocks(z_image) == 7
