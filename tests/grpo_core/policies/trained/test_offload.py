"""Components off the device: equal to the bit with and without, each moved once a stage, nothing used while absent."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.offload import ComponentOffload, Moved
from grpo_core.policies.trained.quantization import QuantizationSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.velocity_settings import NftSettings
from grpo_core.update.velocity_update import update_by_velocity
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, reduced_sources, request, settings, source
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tiny_policies import MODEL, PROMPTS

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=8.0)


class Tied(nn.Module):
    """A matrix under two names, a trained one, a view of it, a buffer in another layout, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.second.weight = self.first.weight.requires_grad_(False)
        self.trained = nn.Parameter(torch.arange(4.0))
        self.register_buffer("columns", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("view", self.first.weight.detach()[0])
        self.register_buffer("count", torch.tensor(7))


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_what_leaves_comes_back_as_it_was_and_is_no_number_meanwhile() -> None:
    components = {"a": Tied(), "b": nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)}
    before = {name: values(component) for name, component in components.items()}
    identities = {id(each) for component in components.values() for each in component.parameters()}
    offload = ComponentOffload(components, CPU)
    a, b = components["a"], components["b"]
    assert isinstance(a, Tied)
    assert a.first.weight.isnan().all()
    assert b.weight.isnan().all()
    torch.testing.assert_close(a.trained, torch.arange(4.0), rtol=0, atol=0)
    with offload.using("a"):
        for name, value in a.state_dict().items():
            assert torch.equal(value, before["a"][name]), name
        assert a.first.weight is a.second.weight
        assert a.columns.stride() == (1, 3)
        assert b.weight.isnan().all()
        with offload.using("b", "unknown"):
            # The enclosing work goes on with a.
            assert offload.present == {"a", "b"}
            assert torch.equal(b.weight, before["b"]["weight"])
    assert offload.present == {"a", "b"}
    with offload.using("b"):
        assert a.first.weight.isnan().all()
    assert {id(each) for component in components.values() for each in component.parameters()} == identities
    # The matrix, the buffer, the row and the number of a; the matrix and the bias of b.
    moved = offload.take_moved()
    assert moved.bytes == 4 * (6 + 6 + 3) + 8 + 2 * (4 + 2)
    assert moved.seconds > 0
    assert offload.take_moved() == Moved()


def test_a_buffer_that_was_loaded_as_a_view_does_not_keep_the_rest() -> None:
    component, whole = nn.Module(), torch.arange(8.0)
    component.register_buffer("part", whole[2:6])
    rest = weakref.ref(whole)
    del whole
    offload = ComponentOffload({"a": component}, CPU)
    assert rest() is None
    with offload.using("a"):
        assert component.get_buffer("part").tolist() == [2, 3, 4, 5]


def test_weights_that_have_no_room_off_the_device_are_refused() -> None:
    component = nn.Module()
    component.register_buffer("of no memory of its own", torch.zeros(1).expand(10**16))
    with pytest.raises(InputError, match="do not fit into the CPU's memory") as error:
        ComponentOffload({"transformer": component}, CPU)
    assert (error.value.place, error.value.value) == ("policy.offload", "components")


def result(
    policy: Policy, requests: Sequence[GroupRequest], updates: Mapping[Stream, Any]
) -> tuple[list[RolloutGroup], dict[str, Tensor], list[int]]:
    """Sample with the reference's log-probs, then update each stream; return also the bytes moved by each stage."""
    for component in policy.components.values():
        disturb(component.trainable_parameters(), 0.02)
    groups = list(collect_rollouts(policy, requests, prompts_per_batch=2))
    moved, trained = [policy.offload.take_moved().bytes], {}
    for stream, update in updates.items():
        component = policy.components[stream]
        rows = join_groups(groups, torch.tensor([[1.0, -1.0, 0.5]] * len(groups)), stream)
        optimizer = PolicyOptimizer(component.trainable_parameters(), OptimizerSettings(learning_rate=1e-2))
        step: Callable[..., Any] = update_by_velocity if isinstance(update, NftSettings) else update_policy
        step(component, optimizer, rows, update, seed=1)
        trained |= {f"{stream} {name}": each.detach() for name, each in component.trainable_parameters().items()}
        moved.append(policy.offload.take_moved().bytes)
    return groups, trained, moved


def require_equal(one: Any, other: Any) -> None:
    for group, same in zip(one[0], other[0], strict=True):
        for stream, sampled in group.streams.items():
            assert torch.equal(sampled.rollout_logprobs, same.streams[stream].rollout_logprobs)
        assert [each.tobytes() for each in group.outputs] == [each.tobytes() for each in same.outputs]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


def frozen_bytes(policy: Any, *names: str) -> int:
    """The size of these parts of a pipeline without what is trained; parameters that they share count once."""
    parts = [getattr(policy, "denoising", getattr(policy, "decoder", None)).pipeline.components[each] for each in names]
    own = [each for part in parts for each in (*part.parameters(), *part.buffers()) if not each.requires_grad]
    return sum(each.nbytes for each in own)


def test_both_halves_of_glm_image_are_moved_once_a_stage() -> None:
    chosen = GlmImageSettings(height=32, width=32, num_inference_steps=4, guidance_scale=1.5, sde_window_size=2)
    choices = dict.fromkeys(STREAMS, TrainingChoice(LORA, gradient_checkpointing=True))
    seeds = {"seeds": (5, 6, 7), "noise_seeds": (1, 1, 1), "step_seeds": (11, 12, 13)}
    requests = [
        GroupRequest(each, tuple(f"{each} {row}" for row in range(3)), **seeds, window_start=1) for each in PROMPTS[:3]
    ]
    updates: dict[Stream, Any] = {
        "tokens": UpdateSettings(kl_coef=0.1, micro_batch_size=5, minibatch_size=6),
        "denoising": UpdateSettings(kl_coef=0.1, kl_estimator="exact", clip_range=1e-2, micro_batch_size=2),
    }
    found = {}
    for offload in (False, True):
        policy = GlmImagePolicy.load(str(MODEL), chosen, choices, offload=offload)
        found[offload] = result(policy, requests, updates)
    require_equal(found[False], found[True])
    assert found[False][2] == [0, 0, 0]
    halves = [("vision_language_encoder",), ("transformer", "text_encoder")]
    tokens, decoder = (frozen_bytes(policy, *names) for names in halves)
    # Two batches of prompts: all tokens, then all images.
    sampling = tokens + decoder + frozen_bytes(policy, "vae")
    assert found[True][2] == [sampling, tokens, decoder]
    compared = list(collect_rollouts(policy, requests, prompts_per_batch=2, with_reference=True))
    assert all(group.compared.keys() == set(STREAMS) for group in compared)
    # Then both score, one after the other.
    assert policy.offload.take_moved().bytes == sampling + tokens + decoder


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("sd3", None),
        ("flux", torch.bfloat16),
        pytest.param("qwen_image_edit", None, marks=pytest.mark.slow),
        pytest.param("qwen_image_edit", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_prompts_of_a_pipeline_are_encoded_before_its_transformer_is_there(
    saved_folder: SavedFolder, name: str, autocast: torch.dtype | None
) -> None:
    editing = name not in ("sd3", "flux")
    few = {"decode_batch_size": 2, "num_inference_steps": 3, "sde_window_range": (0, 3)}
    chosen = settings(name) if editing else settings(name, **few)
    images = (source(),) if editing else ()
    requests = [request(each, sources=images) for each in ("a red dot", "two", "three green dots")]
    quantized = name == "sd3" and autocast is None
    quantization = QuantizationSettings("nf4", components=("text_encoder_3",)) if quantized else None
    choices: dict[Stream, Any] = {"denoising": TrainingChoice(LORA, quantization=quantization)}
    updates: dict[Stream, Any] = {"denoising": UpdateSettings(clip_range=1e-2, micro_batch_size=2)}
    found = {}
    with reduced_sources("QwenImageEditPipeline"):
        for offload in (False, True):
            policy = DiffusersPolicy.load(str(saved_folder(name)), chosen, choices, offload=offload, autocast=autocast)
            found[offload] = result(policy, requests, updates)
    require_equal(found[False], found[True])
    encoders = [each for each in policy.denoising.saved.parts if each.startswith("text_encoder")]
    transformer, vae, texts = (frozen_bytes(policy, *names) for names in (["transformer"], ["vae"], encoders))
    if quantization is None:
        # The update begins with the embeddings that the rollouts left, of which it needs no encoder.
        assert found[True][2] == [texts + vae + transformer, 0]
