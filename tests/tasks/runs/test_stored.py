"""What a run has stored, read to be used again; none of it changes the run."""

from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.runs.layout import STORED
from tasks.runs.lookup import spans
from tasks.runs.stored import choose_policy, first_iteration, read_iterations, read_policy, read_range
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import delete_files
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run

BASE = "base" * 16


def test_ranges_of_iterations() -> None:
    assert (read_range("3-10"), read_range(" 7 ")) == ((3, 10), (7, 7))
    for text in ("0", "2-1", "a", "1-", "1,2", ""):
        with pytest.raises(InputError) as caught:
            read_range(text)
        assert (caught.value.place, caught.value.value) == ("--iterations", text)


def test_numbers_in_words() -> None:
    assert [spans(numbers) for numbers in ([], [2], [1, 2, 3, 5, 7, 8])] == ["none", "2", "1 to 3, 5, 7 to 8"]


def test_iterations_with_their_rounds_and_samplers(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, labels=("x", "y"))
    maker.iteration(2, rounds=2)
    maker.iteration(3)
    maker.rollouts("iteration_000004", "i000004")  # without advantages
    second, third = read_iterations(maker.store, None, STORED)
    assert first_iteration(maker.store) == second.number == 2
    assert [each.rollouts.folder for each in second.rounds] == [
        "iteration_000002/rollouts",
        "iteration_000002/round_02/rollouts",
    ]
    assert [list(each.rewards) for each in (*second.rounds, *third.rounds)] == [["x", "y"]] * 3
    assert second.advantages.folder == "iteration_000002/round_02/advantages"
    assert second.samplers == {(0, BASE)}
    assert second.staleness(3) == 3


@pytest.mark.parametrize(
    ("chosen", "advantages", "place", "value"),
    [
        ((2, 9), STORED, "--iterations", "2-9"),
        (None, "storde", "--advantages", "storde"),
        (None, STORED, "made/iteration_000002/rollouts", None),
    ],
)
def test_iterations_that_cannot_be_used(
    tmp_path: Path, chosen: tuple[int, int] | None, advantages: str, place: str, value: str | None
) -> None:
    maker = whole_run(tmp_path)
    if value is None:
        flip_last_byte(maker.folder / "iteration_000002/rollouts/part-00000.parquet")
    before = contents(maker.folder)
    with pytest.raises(InputError) as caught:
        read_iterations(maker.store, chosen, advantages)
    (error,) = caught.value.errors
    assert (error.place, error.value) == (place, value)
    assert contents(maker.folder) == before


def test_a_policy_by_version(tmp_path: Path) -> None:
    store = whole_run(tmp_path).store
    policy, notes = choose_policy(store, 1, BASE)
    assert (policy, notes) == (read_policy(store, 1), ())
    assert (policy.version, policy.digest, policy.checkpoint) == (1, f"{1:064d}", store.find("policies/000001"))
    assert choose_policy(store, None, BASE)[0].version == 2
    base, _ = choose_policy(store, 0, BASE)
    assert (base.version, base.digest, base.checkpoint) == (0, BASE, None)
    assert choose_policy(ArtifactStore(str(tmp_path), "other"), None, BASE) == (base, ())


def test_damaged_pruned_and_missing_policies(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    first = maker.store.find("policies/000001")
    assert first is not None
    found = maker.store.manifest_at(maker.store.path("policies/000001"))
    assert found is not None
    pruned = {"by": "grpo prune --policies-last 1", "on": "2026-01-01"}
    delete_files(maker.store, first, list(found.files), pruned=pruned)
    flip_last_byte(maker.folder / "policies/000002/tokens/adapter_model.safetensors")
    before = contents(maker.folder)
    for version, word in ((1, "grpo prune --policies-last 1` on 2026-01-01"), (2, "sha256"), (7, "versions 2")):
        with pytest.raises(InputError) as caught:
            choose_policy(maker.store, version, BASE)
        (error,) = caught.value.errors
        assert (error.place, error.value) == ("--policy", version)
        assert word in error.hint
    policy, (note,) = choose_policy(maker.store, None, BASE)
    assert policy.version == 0
    assert "policies/000002/tokens/adapter_model.safetensors" in note
    assert contents(maker.folder) == before
