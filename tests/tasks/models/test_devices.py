"""What torch is set to before a model is loaded, and what that assumes of the models."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from configs.placement import PlacementSection
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.records import GroupRequest
from tasks.models.devices import configure_torch, use_tf32_for_adapters
from tests.tiny_policies import MODEL

GPU = torch.device("cuda")
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    attention, precision = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    yield
    torch.backends.cuda.enable_cudnn_sdp(attention)
    torch.set_float32_matmul_precision(precision)


def test_attention_is_never_the_one_that_makes_a_plan_for_each_length() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_torch(PlacementSection(devices=("cpu",)))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [
        (torch.bfloat16, GPU, "high"),
        (torch.float32, GPU, "highest"),
        (torch.bfloat16, torch.device("cpu"), "highest"),
    ],
)
def test_products_in_fp32_are_exact_unless_they_are_those_of_adapters(
    dtype: torch.dtype, device: torch.device, precision: str
) -> None:
    torch.set_float32_matmul_precision("medium")
    use_tf32_for_adapters(dtype, device)
    assert torch.get_float32_matmul_precision() == precision


class _Fp32Products(TorchDispatchMode):
    """The modules whose code multiplies fp32 values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [each for each in args if isinstance(each, Tensor)]
        if func.overloadpacket in _PRODUCTS and inputs[-1].dtype == torch.float32:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename.split("site-packages/")[-1].startswith("torch/"):
                frame = frame.f_back
            self.places.add(frame.f_code.co_filename.split("site-packages/")[-1])
        return func(*args, **(kwargs or {}))


def test_a_model_of_16_bits_multiplies_fp32_values_in_its_adapters_alone() -> None:
    """A rotary embedding that did would lose its positions: 10 bits tell 2,049 from 2,048 no more."""
    settings = GlmImageSettings(
        height=32, width=32, num_inference_steps=2, guidance_scale=1.5, sde_window_size=1, temperature=1.0
    )
    choice = TrainingChoice(LoraSettings(rank=2, alpha=2.0))
    policy = GlmImagePolicy.load(
        str(MODEL), settings, {"tokens": choice, "denoising": choice}, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    with _Fp32Products() as found:
        (group,) = policy.sample([GroupRequest("a red circle", ("s",), (1,), (2,), (3,), window_start=0)])
        for stream, component in policy.components.items():
            component.prepare_for_update(group.streams[stream].actions)
            component.logprobs(group.streams[stream].actions, entropy="none")
    assert found.places == {"peft/tuners/lora/layer.py"}
