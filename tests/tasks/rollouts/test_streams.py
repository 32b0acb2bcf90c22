"""Latents in files: what was sampled comes back to the bit, in pieces, and what is missing is named."""

from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.records import GroupRequest
from tasks.rollouts import streams
from tasks.rollouts.streams import StatesWriter, map_states, state_digests
from tests.tasks.rollouts.both_streams import WINDOW, made_group, random_states

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def request(names: tuple[str, ...]) -> GroupRequest:
    seeds = tuple(range(len(names)))
    return GroupRequest("a cup", names, (0,) * len(names), seeds, seeds, window_start=0)


def write(folder: Path, groups: list[dict[str, Tensor]]) -> Path:
    writer = StatesWriter(folder)
    for states in groups:
        writer.write(made_group(request(tuple(states)), states))
    writer.close()
    return folder


def read(folders: list[Path], names: list[str]) -> tuple[Tensor, ...]:
    return map_states(folders, pl.Series("sample_id", names, dtype=pl.String))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6))
def test_states_of_any_dtype_and_shape_come_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[torch.dtype, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("states")
    states = {
        f"s{place}": random_states(place, (channels, side, 3), dtype)
        for place, (dtype, channels, side) in enumerate(samples)
    }
    write(folder, [states])
    names = list(reversed(states))
    for name, found in zip(names, read([folder], names), strict=True):
        assert (found.dtype, found.shape) == (states[name].dtype, states[name].shape)
        assert torch.equal(found.view(torch.uint8), states[name].contiguous().view(torch.uint8))


def test_infinite_values_and_signed_zeros_are_values(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("nan")], dtype=torch.float16).repeat(WINDOW + 1, 1)
    (found,) = read([write(tmp_path, [{"a": odd}])], ["a"])
    assert torch.equal(found.view(torch.int16), odd.view(torch.int16))


def test_some_samples_of_several_artifacts_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {name: random_states(place, (2, 3), torch.float16) for place, name in enumerate("abcdef")}
    write(tmp_path / "one", [{name: states[name]} for name in "abc"])
    monkeypatch.setattr(streams, "STATES_BYTES", 1)
    write(tmp_path / "1", [{"a": states["a"], "b": states["b"]}, {"c": states["c"]}])
    write(tmp_path / "2", [{name: states[name]} for name in "def"])
    parts = sorted((tmp_path / "1" / "states").iterdir())
    assert [path.name for path in parts] == ["part-00000-00000.safetensors", "part-00000-00001.safetensors"]
    # The digests are those of one file.
    (one,) = (tmp_path / "one" / "states").iterdir()
    assert [digest for path in parts for digest in state_digests(path)] == state_digests(one)
    assert len(set(state_digests(one))) == 3
    chosen = ["f", "b", "c"]
    found = read([tmp_path / "1", tmp_path / "2"], chosen)
    assert all(torch.equal(one, states[name]) for one, name in zip(found, chosen, strict=True))
    assert read([tmp_path / "1"], []) == ()
    with pytest.raises(ValueError, match=r"\bf\b"):
        read([tmp_path / "1"], ["a", "f"])


def test_mapped_states_outlive_their_file_and_writing_keeps_no_batch(tmp_path: Path) -> None:
    """`grpo prune` may delete what an update has opened; and what waits is no view of all that was sampled at once."""
    batch = random_states(0, (2, 16, 3), torch.float16)
    folder = write(tmp_path, [{"a": batch[..., :1], "b": batch[..., 1:]}])
    (path,) = (folder / "states").iterdir()
    assert path.stat().st_size < batch.nbytes + 1000
    found = read([folder], ["b"])
    path.unlink()
    assert torch.equal(found[0], batch[..., 1:])
