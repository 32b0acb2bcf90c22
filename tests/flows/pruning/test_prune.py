"""`grpo prune`: what is deleted, what is kept and why, and what is refused."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner

from configs.sections import KeepPoliciesSection
from flows.command_line.main import application
from flows.evaluation import plan_evaluate
from flows.pruning.plan import CALLS, IMAGES, UNSCORED, VERSIONS, WRITES, Needs, OtherConfigs, add_dependents
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.requests import EvaluateRequest
from tasks.runs.layout import evaluation_folder
from tasks.runs.lookup import read_config_file, read_description, write_description
from tasks.runs.stored_policies import stored_versions
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import locked
from tests.flows.conftest import REPOSITORY, Runs, Start, flip, refused
from tests.flows.pruning.conftest import (
    EVERYTHING,
    ITERATIONS,
    RUN,
    again,
    best,
    contents,
    deleted,
    images,
    iteration,
    kept,
    pruned,
    tree,
)


def size_of(runs: Runs) -> int:
    return sum(path.stat().st_size for path in runs.root.rglob("*") if path.is_file())


class TestPruned:
    def test_dry_run_then_for_real_then_again_and_the_run_continues(
        self, runs: Runs, trained: tuple[Runs, Start]
    ) -> None:
        requested = {"policies_last": 1, "images_older_than": "1i"}
        before, size = tree(runs.root), size_of(runs)
        planned = pruned(runs, dry_run=True, **requested)
        assert tree(runs.root) == before
        done = pruned(runs, **requested)
        assert (done.dry_run, done.model_dump(exclude={"dry_run"})) == (False, planned.model_dump(exclude={"dry_run"}))
        stays = {4, best(runs)}
        assert stored_versions(ArtifactStore(str(runs.root), RUN)) == sorted(stays)
        assert deleted(done) == {VERSIONS: 4 - len(stays), IMAGES: 3}
        assert [images(runs, iteration(number)) for number in (1, 2, 3, 4)] == [0, 0, 0, 4]
        assert kept(done, VERSIONS) == ({} if best(runs) == 4 else {"2": "it has the best held-out reward"})
        assert images(runs, "evaluations/000002") == 1
        assert size - size_of(runs) == pytest.approx(done.bytes, rel=0.05)
        # Nothing is left to do, for it or for the run.
        after = contents(runs.root)
        second = pruned(runs, **requested)
        assert (second.bytes, deleted(second), contents(runs.root)) == (0, {}, after)
        start = again(runs)
        assert start.stages == ()
        assert start.summary.quarantined == []
        others = {"seconds", "folder", "contact_sheet", "pages"}
        assert start.summary.model_dump(exclude=others) == trained[1].summary.model_dump(exclude=others)

    def test_by_age(self, runs: Runs) -> None:
        """Images by that of their rollouts, and what calls and writes have left."""
        assert deleted(pruned(runs, images_older_than="30d")) == {}
        store, ago = ArtifactStore(str(runs.root), RUN), datetime.now(UTC).timestamp() - 40 * 86400
        for name in ("aa.json", "bb.json"):
            store.write_file(f".calls/{name}", b"{}")
        for old in (
            runs.path(".calls", "aa.json", run=RUN),
            runs.path(iteration(2), "rollouts.manifest.json", run=RUN),
        ):
            os.utime(old, (ago, ago))
        gone = runs.path(".incoming", "ended", "files", run=RUN)
        gone.mkdir(parents=True)
        (gone / "half").write_bytes(b"half")
        (gone.parent / "lock").touch()
        assert deleted(pruned(runs, images_older_than="30d")) == {CALLS: 1, WRITES: 1, IMAGES: 1}
        assert [images(runs, iteration(number)) for number in (1, 2, 3, 4)] == [4, 0, 4, 4]
        assert not gone.exists()
        assert [path.name for path in runs.path(".calls", run=RUN).iterdir()] == ["bb.json"]


class TestNeeded:
    def test_a_version_whose_evaluation_is_due(self, runs: Runs) -> None:
        shutil.rmtree(runs.path("evaluations", "000002", "rollouts", run=RUN))
        done = pruned(runs, **EVERYTHING, dry_run=True)
        assert "evaluates" in kept(done, VERSIONS)["2"]

    def test_versions_that_sample_the_next_iterations(self, runs: Runs) -> None:
        store = ArtifactStore(str(runs.root), RUN)
        config = read_config_file(store).replace(b"staleness: 0", b"staleness: 1")
        write_description(store, read_description(store), config)
        done = pruned(runs, policies_last=1, dry_run=True)
        assert "sampled" in kept(done, VERSIONS)["3"]

    def test_damaged_versions_do_not_count_as_the_last(self, runs: Runs) -> None:
        (weights,) = runs.path("policies", "000004", run=RUN).rglob("adapter_model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        done = pruned(runs, policies_last=1)
        assert "damaged" in kept(done, VERSIONS)["4"]
        assert 3 in stored_versions(ArtifactStore(str(runs.root), RUN))

    def test_damaged_rollouts_are_passed_by(self, runs: Runs) -> None:
        part = runs.path(iteration(1), "rollouts", "part-00000.parquet", run=RUN)
        flip(part)
        left = part.read_bytes()
        done = pruned(runs, policies_last=1, images_older_than="1i")
        assert deleted(done)[IMAGES] == 2
        (note,) = [each for each in done.runs[0].notes if "damaged" in each]
        assert f"{RUN}/{iteration(1)}/rollouts" in note
        # Only the next start moves them.
        assert not runs.path("quarantine", run=RUN).exists()
        assert part.read_bytes() == left

    def test_images_that_are_to_be_scored(self, runs: Runs) -> None:
        runs.path(iteration(1), "rewards", "ssim.manifest.json", run=RUN).unlink()
        runs.path(iteration(2), "advantages", "advantages.parquet", run=RUN).unlink()
        done = pruned(runs, images_older_than="1i")
        assert kept(done, IMAGES) == {iteration(1): UNSCORED, iteration(2): UNSCORED}
        assert [images(runs, iteration(number)) for number in (1, 2, 3)] == [4, 4, 0]

    @pytest.mark.parametrize(
        ("iterations", "replayed", "needed"), [(3, True, True), (2, True, False), (3, False, True)]
    )
    def test_the_start_of_a_run_or_replay_that_is_not_at_its_end(
        self, runs: Runs, iterations: int, replayed: bool, needed: bool
    ) -> None:
        config = yaml.safe_load(runs.path("config.yaml", run=RUN).read_text())
        config["run"] |= {"iterations": iterations, "continue_from": None if replayed else f"{RUN}@1"}
        config |= {"replay": {"source": RUN, "policy": 1}} if replayed else {}
        replay_of = runs.path("policies", run="slower")
        replay_of.mkdir(parents=True)
        (replay_of / "000002.manifest.json").write_text("{}")
        runs.path("config.yaml", run="slower").write_text(yaml.safe_dump(config))
        (runs.root / "notes.txt").write_text("a person's own")
        versions = kept(pruned(runs, policies_last=2), VERSIONS)
        assert ("1" in versions) == needed
        assert (1 in stored_versions(ArtifactStore(str(runs.root), RUN))) == needed


def test_the_program_deletes_when_someone_says_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["prune", RUN, "--policies-last", "1", "--root", str(runs.root)]
    before = tree(runs.root)
    result = CliRunner().invoke(application, given)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    monkeypatch.setattr("flows.command_line.subcommands.is_terminal", lambda: True)
    asked = CliRunner().invoke(application, given, input="n\n")
    assert asked.exit_code == 1
    assert VERSIONS in asked.stderr
    assert tree(runs.root) == before
    done = CliRunner().invoke(application, [*given, "--yes", "--json"])
    printed = json.loads(done.stdout.splitlines()[-1])
    assert (printed["dry_run"], [each["run"] for each in printed["runs"]]) == (False, [RUN])
    assert tree(runs.root) != before


def problems(**requested: Any) -> list[tuple[str, object]]:
    errors = refused(lambda: prune(PruneRequest(**{"sources": (RUN,), **requested})))
    return [(error.place, error.value) for error in errors]


WRONG: list[tuple[dict[str, Any], str, object]] = [
    ({}, "grpo prune", "no rule"),
    ({"policies_every": 0}, "--policies-every", 0),
    ({"policies_last": 0}, "--policies-last", 0),
    ({"images_older_than": "a month"}, "--images-older-than", "a month"),
    ({"images_older_than": "-3d"}, "--images-older-than", "-3d"),
    ({"states_older_than": "3w"}, "--states-older-than", "3w"),
    ({"sources": (RUN, RUN), "policies_last": 1}, "RUN", [RUN, RUN]),
    ({"sources": ("prune",), "policies_last": 1}, "RUN", "prune"),
]


class TestRefused:
    def test_with_place_and_value(self, trained: tuple[Runs, Start]) -> None:
        root = trained[0].root
        before = tree(root)
        for requested, place, value in WRONG:
            assert problems(root=str(root), **requested) == [(place, value)]
        assert tree(root) == before

    @pytest.mark.parametrize("place", ["", "rescored/mix"])
    def test_while_another_process_writes(self, runs: Runs, place: str) -> None:
        before = contents(runs.root)
        with locked(ArtifactStore(str(runs.root), RUN), place, setting="run.name", value=RUN):
            assert problems(root=str(runs.root), policies_last=1) == [("RUN", f"{RUN}/{place}".rstrip("/"))]
            assert deleted(pruned(runs, policies_last=1, dry_run=True))
        assert contents(runs.root) == before


def test_rules_have_defaults() -> None:
    assert PruneRequest(sources=("a",), policies_every=5).retention.last == 2
    assert PruneRequest(sources=("a",), policies_last=7).retention.last == 7
    retention = PruneRequest(sources=("a",), images_older_than="3d").retention
    assert (retention.last, retention.by) == (None, "grpo prune --images-older-than 3d")


def test_texts_have_no_images(empty: Runs) -> None:
    store = ArtifactStore(str(empty.root), "text")
    config = yaml.safe_load((REPOSITORY / "configs" / "tiny_text.yaml").read_text())
    content = yaml.safe_dump({**config, "storage": {"root": str(empty.root)}}).encode()
    write_description(store, {}, content)
    summary = prune(PruneRequest(sources=("text",), root=str(empty.root), images_older_than="0i"))
    (note,) = summary.runs[0].notes
    assert "texts" in note


def start(runs: Runs, keep: dict[str, Any], **changes: object) -> Start:
    """Start the finished run again with these policies to be kept."""
    return again(runs, **{"run__keep_policies": keep, **changes})


def stored(runs: Runs, run: str = RUN) -> list[int]:
    return stored_versions(ArtifactStore(str(runs.root), run))


def test_the_last_and_the_best_stay_and_the_run_continues(runs: Runs, trained: tuple[Runs, Start]) -> None:
    # Versions of these runs have a few kB.
    start(runs, {"last": 1, "above_gb": 1})
    assert stored(runs) == [*range(1, ITERATIONS + 1)]
    first = start(runs, {"last": 1, "above_gb": 1e-6})
    assert stored(runs) == sorted({best(runs), ITERATIONS})
    assert not list(runs.path("policies", "000001", run=RUN).rglob("*.safetensors"))
    assert images(runs, "iteration_000001") == 4
    assert first.summary.policy_digest == trained[1].summary.policy_digest
    assert first.summary.heldout_after == trained[1].summary.heldout_after
    # Version 1, which is due now, cannot be evaluated any more.
    again = start(runs, {"last": 1}, evaluate__every=1)
    assert (again.stages, again.summary.policy_digest) == ((), first.summary.policy_digest)
    assert not runs.path("evaluations", "000001", run=RUN).exists()
    (error,) = refused(lambda: plan_evaluate(EvaluateRequest(run=f"{RUN}@1", root=str(runs.root))))
    assert "run.keep_policies" in error.hint


@pytest.mark.slow
def test_the_best_stays_where_its_evaluation_is_not_due_any_more(runs: Runs) -> None:
    assert best(runs) < ITERATIONS
    start(runs, {"last": 1}, evaluate__every=0)
    assert stored(runs) == [best(runs), ITERATIONS]


@pytest.mark.slow
def test_what_is_in_use_stays(runs: Runs) -> None:
    store = ArtifactStore(str(runs.root), RUN)
    other = {
        "replayed": f"run: {{iterations: 9}}\nreplay: {{source: {RUN}, policy: 2}}\n",
        "adapted": f"policy: {{adapter: {RUN}@3}}\n",
    }
    for run, config in other.items():
        runs.path(run=run).mkdir()
        runs.path("config.yaml", run=run).write_text(config)
    with locked(store, evaluation_folder(1, "letters"), setting="RUN", value=RUN):
        start(runs, {"last": 1, "best": False})
        assert stored(runs) == [1, 2, 3, ITERATIONS]
    for run in other:
        runs.path("config.yaml", run=run).unlink()
    start(runs, {"last": 1, "every": 3, "best": False})
    assert stored(runs) == [3, ITERATIONS]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_ended_while_it_deletes_it_ends_with_the_same_policy(
    empty: Runs, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"run__staleness": staleness, "update__reference": {"refresh_every": 2}, "update__kl_coef": 0.1}
    undisturbed = Runs(tmp_path / "undisturbed").start("kept", run__iterations=3, **changes)
    whole, calls = LocalFileSystem.rm_file, []

    def rm_file(filesystem: LocalFileSystem, path: str) -> None:
        if "policies" in path:
            calls.append(path)
            if len(calls) == 2:
                raise KeyboardInterrupt
        whole(filesystem, path)

    keep = {"run__keep_policies": {"last": 1}, "run__iterations": 3, **changes}
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "rm_file", rm_file)
        with pytest.raises(KeyboardInterrupt):
            empty.start("kept", **keep)
    assert len(calls) == 2
    ended = empty.start("kept", **keep)
    assert ended.summary.policy_digest == undisturbed.summary.policy_digest
    assert stored(empty, "kept") == [[3], [2, 3]][staleness]


@pytest.mark.parametrize(
    ("section", "iterations", "staleness", "size", "expected"),
    [
        # The last two, the best, and the one that is being written.
        ({}, 200, 0, 1, 4),
        ({"last": 1, "best": False}, 200, 3, 1, 5),
        ({"every": 10, "best": False}, 200, 0, 1, 23),
        ({"last": 5}, 3, 0, 1, 3),
        ({"above_gb": 1}, 200, 0, 10**9, 200),
        ({"above_gb": 1}, 200, 0, 10**9 + 1, 4),
    ],
)
def test_the_most_that_is_stored_at_once(
    section: dict[str, Any], iterations: int, staleness: int, size: int, expected: int
) -> None:
    assert KeepPoliciesSection(**section).count(iterations, staleness, size) == expected


def test_a_configuration_of_another_run_is_read_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real, read = ArtifactStore(str(tmp_path), "run"), ArtifactStore.read_shared, list[str]()

    def noted(store: ArtifactStore, name: str, *arguments: Any) -> bytes | None:
        read.append(name)
        return real(store, name, *arguments)

    monkeypatch.setattr(ArtifactStore, "read_shared", noted)
    for name, adapter in (("run", "null"), ("other", "run@3"), ("apart", "null")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"policy:\n  adapter: {adapter}\n")
    (tmp_path / "empty").mkdir()
    configs = OtherConfigs()

    def needed() -> dict[int, list[str]]:
        add_dependents(needs := Needs(), store, configs)
        return dict(needs.policies)

    for _ in range(4):
        assert needed() == {3: ["the run other starts from its adapter"]}
    assert sorted(read) == ["apart/config.yaml", "other/config.yaml"]
    (tmp_path / "apart" / "config.yaml").write_text("policy:\n  adapter: run@7\n")
    assert list(needed()) == [7, 3]
    assert len(read) == 3
