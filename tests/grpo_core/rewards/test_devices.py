import pytest
import torch

from grpo_core.rewards.devices import exact_inference


@pytest.mark.parametrize("former", ["high", "medium"])
def test_products_are_exact_inside_and_as_before_outside(former: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(former)
    try:
        with exact_inference("cuda"):
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == former
        with pytest.raises(KeyError), exact_inference("cuda"):
            raise KeyError
        assert torch.get_float32_matmul_precision() == former
    finally:
        torch.set_float32_matmul_precision(before)
