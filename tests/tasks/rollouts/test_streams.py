"""Latents in files: what was sampled comes back to the bit, in pieces, and what is missing or cut is named."""

from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.records import GroupRequest
from tasks.rollouts.streams import map_states, state_rows
from tasks.storage import parquet
from tasks.storage.parquet import TableWriter, write_table
from tasks.storage.schemas import STATES
from tests.tasks.rollouts.both_streams import WINDOW, made_group, random_states

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def request(names: tuple[str, ...]) -> GroupRequest:
    seeds = tuple(range(len(names)))
    return GroupRequest("a cup", names, (0,) * len(names), seeds, seeds, window_start=0)


def write(folder: Path, groups: list[dict[str, Tensor]], part: int = 0) -> Path:
    writer = TableWriter(folder / "states" / f"part-{part:05d}.parquet", STATES)
    for states in groups:
        for row in state_rows(made_group(request(tuple(states)), states)):
            writer.write(row)
    writer.close()
    return folder


def read(folders: list[Path], names: list[str], scratch: Path) -> tuple[Tensor, ...]:
    scratch.mkdir(parents=True)
    return map_states(folders, pl.Series("sample_id", names, dtype=pl.String), scratch)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6))
def test_states_of_any_dtype_and_shape_come_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[torch.dtype, int, int]]
) -> None:
    """The sizes are odd, so that a sample that follows another has to be aligned."""
    folder = tmp_path_factory.mktemp("states")
    states = {
        f"s{place}": random_states(place, (channels, side, 3), dtype)
        for place, (dtype, channels, side) in enumerate(samples)
    }
    write(folder, [states])
    names = list(reversed(states))
    for name, found in zip(names, read([folder], names, folder / "scratch"), strict=True):
        assert (found.dtype, found.shape) == (states[name].dtype, states[name].shape)
        assert torch.equal(found.view(torch.uint8), states[name].contiguous().view(torch.uint8))


def test_infinite_values_and_signed_zeros_are_values(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("nan")], dtype=torch.float16).repeat(WINDOW + 1, 1)
    (found,) = read([write(tmp_path, [{"a": odd}])], ["a"], tmp_path / "scratch")
    assert torch.equal(found.view(torch.int16), odd.view(torch.int16))


def test_some_samples_of_several_artifacts_and_parts(tmp_path: Path) -> None:
    states = {name: random_states(place, (2, 3), torch.float16) for place, name in enumerate("abcdef")}
    write(tmp_path / "1", [{"a": states["a"], "b": states["b"]}], part=0)
    write(tmp_path / "1", [{"c": states["c"]}], part=1)
    write(tmp_path / "2", [{name: states[name]} for name in "def"])
    chosen = ["f", "b", "c"]
    found = read([tmp_path / "1", tmp_path / "2"], chosen, tmp_path / "scratch")
    assert all(torch.equal(one, states[name]) for one, name in zip(found, chosen, strict=True))
    assert read([tmp_path / "1"], [], tmp_path / "empty") == ()
    with pytest.raises(ValueError, match=r"\bf\b"):
        read([tmp_path / "1"], ["a", "f"], tmp_path / "missing")


def test_states_that_are_cut_are_named(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "sample_id": ["a"],
        "states": [[b"1234", b"123"]],
        "dtype": ["float16"],
        "shape": [[2]],
    }
    write_table(tmp_path / "states" / "part-00000.parquet", STATES, columns)
    with pytest.raises(ValueError, match=r"\ba\b.*\(2,\) in torch\.float16"):
        read([tmp_path], ["a"], tmp_path / "scratch")


def test_they_are_stored_as_they_are_in_rows_that_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dictionary, nothing packed: 1.5 MiB for a window of two steps at 1024 x 1024 pixels in 16 bits."""
    latent = (16, 128, 128)
    states = {f"s{place}": random_states(place, latent, torch.float16) for place in range(4)}
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 2**20)
    write(tmp_path, [states])
    path = tmp_path / "states" / "part-00000.parquet"
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups == 4
    for group in range(4):
        values = metadata.row_group(group).column(1)
        assert values.path_in_schema == "states.list.element"
        assert values.compression == "UNCOMPRESSED"
        assert not [each for each in values.encodings if "DICTIONARY" in each]
    assert path.stat().st_size / 4 == pytest.approx(1.5 * 2**20, rel=2e-3)


def test_writing_holds_a_row_group_however_many_there_are(tmp_path: Path) -> None:
    states = {f"s{place}": random_states(place, (16, 64, 64), torch.float16) for place in range(4)}
    group, before = made_group(request(tuple(states)), states), pa.total_allocated_bytes()
    writer = TableWriter(path := tmp_path / "states.parquet", STATES)
    held = []
    for _ in range(40):
        for row in state_rows(group):
            writer.write(row)
        held.append(pa.total_allocated_bytes() - before)
    writer.close()
    assert path.stat().st_size > 60 * 2**20
    assert max(held) < parquet.ROW_GROUP_BYTES + 4 * 2**20
