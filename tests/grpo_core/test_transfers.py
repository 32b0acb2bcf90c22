"""Several tensors in one transfer."""

import pytest
import torch

from grpo_core.transfers import to_device, to_host


def test_values_shapes_and_dtypes_come_through() -> None:
    """Also of halves beside wide ones and masks, of none at all, and of ids beyond what a float holds."""
    given = [
        torch.tensor([[0.1, -torch.inf]], dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(2, 0),
    ]
    ids = [torch.tensor([[2**40 + 1]]), torch.tensor([True])]
    for tensors in (given, ids, [torch.tensor([True])]):
        moved = to_host(tensors)
        assert [each.dtype for each in moved] == [each.dtype for each in tensors]
        assert all(map(torch.equal, moved, tensors))
    assert to_host([]) == to_device([], torch.device("cpu")) == []
    with pytest.raises(AssertionError):
        to_host([ids[0], given[0]])
