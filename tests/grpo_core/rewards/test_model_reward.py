import pytest
import torch

from grpo_core.rewards.model_reward import exact_inference


@pytest.mark.parametrize("previous", ["high", "medium"])
def test_products_are_exact_inside_and_as_before_outside(previous: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(previous)
    try:
        with exact_inference("cuda"):
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == previous
        with pytest.raises(KeyError), exact_inference("cuda"):
            raise KeyError
        assert torch.get_float32_matmul_precision() == previous
    finally:
        torch.set_float32_matmul_precision(before)
