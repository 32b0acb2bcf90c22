"""`grpo prune`: what is deleted, what is kept and why."""

import json
import os
import shutil
from datetime import UTC, datetime

import pytest
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.pruning.plan import CALLS, IMAGES, UNSCORED, VERSIONS, WRITES
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from tasks.runs.lookup import read_config_file, read_description, write_description
from tasks.runs.stored import stored_versions
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import REPOSITORY, Runs, Start
from tests.flows.pruning.conftest import (
    EVERYTHING,
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


class TestPruned:
    def test_dry_run_then_for_real_then_again_and_the_run_goes_on(
        self, runs: Runs, trained: tuple[Runs, Start]
    ) -> None:
        requested = {"policies_last": 1, "images_older_than": "1i"}
        before, size = tree(runs.root), sum(path.stat().st_size for path in runs.root.rglob("*") if path.is_file())
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
        left = sum(path.stat().st_size for path in runs.root.rglob("*") if path.is_file())
        assert size - left == pytest.approx(done.bytes, rel=0.05)
        # Nothing is left to do, for it or for the run.
        after = contents(runs.root)
        second = pruned(runs, **requested)
        assert (second.bytes, deleted(second), contents(runs.root)) == (0, {}, after)
        start = again(runs)
        assert start.stages == ()
        assert start.summary.quarantined == []
        assert start.summary.model_dump(exclude={"seconds", "folder", "contact_sheet"}) == trained[
            1
        ].summary.model_dump(exclude={"seconds", "folder", "contact_sheet"})

    def test_every_second_version_and_the_last_two(self, runs: Runs) -> None:
        done = pruned(runs, policies_every=2)
        assert stored_versions(ArtifactStore(str(runs.root), RUN)) == [2, 3, 4]
        assert (deleted(done), kept(done, VERSIONS)) == ({VERSIONS: 1}, {})
        assert not list(runs.path("policies", "000001", run=RUN).rglob("*.safetensors"))

    def test_by_age(self, runs: Runs) -> None:
        assert deleted(pruned(runs, images_older_than="30d")) == {}
        long_ago = datetime.now(UTC).timestamp() - 40 * 86400
        manifest = runs.path(iteration(2), "rollouts.manifest.json", run=RUN)
        os.utime(manifest, (long_ago, long_ago))
        assert deleted(pruned(runs, images_older_than="30d")) == {IMAGES: 1}
        assert [images(runs, iteration(number)) for number in (1, 2, 3, 4)] == [4, 0, 4, 4]

    def test_leftovers(self, runs: Runs) -> None:
        store = ArtifactStore(str(runs.root), RUN)
        long_ago = datetime.now(UTC).timestamp() - 40 * 86400
        for name in ("aa.json", "bb.json"):
            store.write_file(f".calls/{name}", b"{}")
        os.utime(runs.path(".calls", "aa.json", run=RUN), (long_ago, long_ago))
        gone = runs.path(".incoming", "ended", "files", run=RUN)
        gone.mkdir(parents=True)
        (gone / "half").write_bytes(b"half")
        (gone.parent / "lock").touch()
        assert deleted(pruned(runs, images_older_than="30d")) == {CALLS: 1, WRITES: 1}
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

    def test_images_that_are_to_be_scored(self, runs: Runs) -> None:
        runs.path(iteration(1), "rewards", "ssim.manifest.json", run=RUN).unlink()
        runs.path(iteration(2), "advantages", "advantages.parquet", run=RUN).unlink()
        done = pruned(runs, images_older_than="1i")
        assert kept(done, IMAGES) == {iteration(1): UNSCORED, iteration(2): UNSCORED}
        assert [images(runs, iteration(number)) for number in (1, 2, 3)] == [4, 4, 0]

    @pytest.mark.parametrize(
        ("iterations", "replayed", "needed"), [(3, True, True), (2, True, False), (3, False, True), (2, False, False)]
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


def test_the_program_prints_a_table_and_one_json_object(runs: Runs) -> None:
    given = ["prune", RUN, "--policies-last", "2", "--dry-run", "--json", "--root", str(runs.root)]
    result = CliRunner().invoke(application, given)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert (printed["dry_run"], [each["run"] for each in printed["runs"]]) == (True, [RUN])
    assert VERSIONS in result.stderr


def test_the_program_deletes_when_someone_says_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["prune", RUN, "--policies-last", "1", "--root", str(runs.root)]
    before = tree(runs.root)
    result = CliRunner().invoke(application, given)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    monkeypatch.setattr("flows.command_line.stored_runs.is_terminal", lambda: True)
    asked = CliRunner().invoke(application, given, input="n\n")
    assert asked.exit_code == 1
    assert VERSIONS in asked.stderr
    assert tree(runs.root) == before
    assert CliRunner().invoke(application, [*given, "--yes"]).exit_code == 0
    assert tree(runs.root) != before


def test_texts_have_no_images(empty: Runs) -> None:
    store = ArtifactStore(str(empty.root), "text")
    config = yaml.safe_load((REPOSITORY / "configs" / "tiny_text.yaml").read_text())
    content = yaml.safe_dump({**config, "storage": {"root": str(empty.root)}}).encode()
    write_description(store, {}, content)
    summary = prune(PruneRequest(sources=("text",), root=str(empty.root), images_older_than="0i"))
    (note,) = summary.runs[0].notes
    assert "texts" in note
