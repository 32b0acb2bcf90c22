"""What torch is set to before a model is loaded."""

from collections.abc import Iterator

import pytest
import torch

from configs.placement import PlacementSection
from tasks.models.devices import configure_torch


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(attention)


def test_attention_is_never_the_one_that_makes_a_plan_for_each_length() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_torch(PlacementSection(devices=("cpu",)))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
