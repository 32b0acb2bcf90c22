"""Several processes share an update: each its own rows, together the weights of one."""

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore

from grpo_core.parity import ParityError, ParityTolerance
from grpo_core.update.distributed import DistributedProcessGroup, in_buckets, join
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup, share
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import UpdateResult
from tests.grpo_core.toy_policy import TablePolicy, sampled_rows
from tests.processes import in_processes

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.25, -0.25, 2.0]
# Nine rows, four an optimizer step, one or two a pass: processes run out of parts in most minibatches.
PARITY = ParityTolerance(1e-4, 1e-5)
SETTINGS = UpdateSettings(
    epochs=2,
    minibatch_size=4,
    micro_batch_size=1,
    clip_range_high=0.28,
    kl_coef=0.1,
    entropy_coef=0.01,
    max_grad_norm=0.05,
)
VARIANTS = {
    "grpo": SETTINGS,
    "pairs": replace(SETTINGS, micro_batch_size=2),
    "dapo": replace(SETTINGS, loss="dapo"),
    "entropy": replace(SETTINGS, entropy_quantile=0.5),
    "whole": replace(SETTINGS, minibatch_size=9, micro_batch_size=2),
    "even": replace(SETTINGS, minibatch_size=6, epochs=1),
}


@dataclass(frozen=True)
class Numbered:
    """One of several processes, by its number alone."""

    rank: int
    count: int


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_part_counts_once_and_every_process_takes_as_many(parts: int, count: int) -> None:
    shares = [share(range(parts), Numbered(rank, count)) for rank in range(count)]  # type: ignore[arg-type]
    assert {len(taken) for taken in shares} == {-(-parts // count)}
    counted = [part for taken in shares for part, counts in taken if counts]
    assert sorted(counted) == list(range(parts))


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12), st.integers(1, 20))
def test_buckets_hold_every_gradient_in_order(sizes: list[tuple[int, bool]], elements: int) -> None:
    tensors = [torch.zeros(size, dtype=torch.float64 if double else torch.float32) for size, double in sizes]
    buckets = list(in_buckets(tensors, elements))
    assert [id(tensor) for bucket in buckets for tensor in bucket] == [id(tensor) for tensor in tensors]
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(len(tensor) for tensor in bucket) <= elements


@pytest.mark.parametrize("given", ["cuda", "cuda:2"])
def test_a_gpu_has_its_index_when_nccl_begins(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """The process of a GPU sees no other one and calls it `cuda`, which torch does not take for a current device."""
    current, begun = list[int](), list[tuple[str, torch.device]]()
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    monkeypatch.setattr(torch.cuda, "_check_stray_context", lambda index: None, raising=False)

    def init(backend: str, *, device_id: torch.device, **given: object) -> None:
        begun.append((backend, device_id))

    monkeypatch.setattr("torch.distributed.init_process_group", init)
    join(HashStore(), 0, 2, torch.device(given))
    index = torch.device(given).index or 0
    assert current == [index]
    assert begun == [("nccl", torch.device("cuda", index))]


# --- in processes


def updated(
    settings: UpdateSettings, process_group: ProcessGroup, *, disturbed: float = 0.0
) -> tuple[TablePolicy, UpdateResult]:
    """The update of one process; one stored log-prob is off by `disturbed`."""
    policy = TablePolicy(9)
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.01))
    rows = sampled_rows(policy, ADVANTAGES)
    rows.rollout_logprobs[5, 1] += disturbed
    return policy, update_policy(
        policy,
        optimizer,
        rows,
        settings,
        parity=PARITY,
        seed=4,
        process_group=process_group,
    )


def update_every_variant(folder: Path) -> None:
    process_group = DistributedProcessGroup(torch.device("cpu"))
    for name, settings in VARIANTS.items():
        policy, result = updated(settings, process_group)
        torch.save(policy.table.detach(), folder / f"{name}-{process_group.rank}.pt")
        (folder / f"{name}-{process_group.rank}.json").write_text(json.dumps([policy.seen, result.metrics()]))
    for name in ("grpo", "whole"):
        try:
            updated(VARIANTS[name], process_group, disturbed=0.3)
        except ParityError as error:
            (folder / f"{name}-{process_group.rank}.txt").write_text(str(error))
    values = {"whole": torch.ones(3), "turned": torch.tensor([1.0, 2.0, 3.0])}
    process_group.require_equal(values)
    if process_group.rank == 1:
        values["turned"] = values["turned"].flip(0)
    try:
        process_group.require_equal(values)
    except RuntimeError as error:
        (folder / f"other-{process_group.rank}.txt").write_text(str(error))


def exchange(folder: Path) -> None:
    """Gradients that some processes lack, values of the first process, and weights that are elsewhere."""
    process_group = DistributedProcessGroup(torch.device("cpu"))
    rank = process_group.rank
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    # Of the first on both, of the second and third on one each, of the last on none.
    for parameter, ranks in zip(parameters, ((0, 1), (0,), (1,), ()), strict=True):
        if rank in ranks:
            parameter.grad = torch.tensor([1.0, 10.0]) * (rank + 1)
    process_group.add_gradients(parameters)
    gradients = [None if each.grad is None else each.grad.tolist() for each in parameters]
    told = [process_group.from_first(value if rank == 0 else "ignored") for value in (None, "", "größer", ["a", 1.5])]

    def unpickle(*arguments: object) -> None:
        raise AssertionError("nothing that arrives is unpickled")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pickle, "loads", unpickle)
        patched.setattr(pickle, "Unpickler", unpickle)
        told.append(process_group.from_first("d" * 64 if rank == 0 else None))
    (folder / f"{rank}.json").write_text(json.dumps([gradients, told]))


def test_a_gradient_that_one_process_lacks_is_zero_there_and_values_are_sent_as_json(tmp_path: Path) -> None:
    in_processes(2, exchange, tmp_path)
    for rank in range(2):
        gradients, told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert gradients == [[3.0, 30.0], [1.0, 10.0], [2.0, 20.0], None]
        assert told == [None, "", "größer", ["a", 1.5], "d" * 64]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def updates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """How many processes, and what each of them wrote."""
    folder = tmp_path_factory.mktemp("updates")
    in_processes(request.param, update_every_variant, folder)
    return request.param, folder


def test_every_loss_gives_the_weights_of_one_process(updates: tuple[int, Path]) -> None:
    count, folder = updates
    for name, settings in VARIANTS.items():
        alone, result = updated(settings, SINGLE_PROCESS)
        tables: list[Tensor] = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(count)]
        for table in tables:
            assert torch.equal(table, tables[0]), f"{name}: the processes differ"
            torch.testing.assert_close(table, alone.table.detach(), rtol=0, atol=1e-6)
        for rank in range(count):
            _, metrics = json.loads((folder / f"{name}-{rank}.json").read_text())
            assert metrics == pytest.approx(result.metrics(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("updates", [2], indirect=True)
def test_rows_of_the_processes_are_apart_and_all_rows_together(updates: tuple[int, Path]) -> None:
    """A minibatch of six and one of three rows by two processes: the last part of the second counts on the first."""
    first, second = (json.loads((updates[1] / f"even-{rank}.json").read_text())[0] for rank in range(2))
    assert len(first) == len(second) == 5
    assert second[-1] == first[-1]
    rows = [prompt for part in [*first, *second[:-1]] for prompt in part]
    assert sorted(rows) == [str(row) for row in range(9)]


def test_every_process_refuses_a_disturbed_row_of_any_of_them(updates: tuple[int, Path]) -> None:
    """Also where it is in the first minibatch, whose log-probs come from the passes of one process."""
    count, folder = updates
    for name in ("grpo", "whole"):
        messages = {(folder / f"{name}-{rank}.txt").read_text() for rank in range(count)}
        assert len(messages) == 1
        assert "is at most 0.3 nats" in messages.pop()


def test_weights_that_differ_are_refused_by_every_process(updates: tuple[int, Path]) -> None:
    _, folder = updates
    assert "are not those of process 0 on another process" in (folder / "other-0.txt").read_text()
    assert "are not those of process 0, turned first" in (folder / "other-1.txt").read_text()
