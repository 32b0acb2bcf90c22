"""`grpo prune`: what goes, what stays and why, and that everything which refers to it goes on as before."""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.command_line import application
from flows.evaluate_request import EvaluateRequest
from flows.inspection import inspect_run
from flows.pruning.plan import ASIDE, CALLS, ENDS, EVALUATIONS, PICTURES, UNSCORED, VERSIONS, WRITES
from flows.pruning.prune import PruneSummary, prune
from flows.pruning.request import PruneRequest, read_rules
from flows.replay_request import ReplayRequest, plan_replay
from flows.rescore import rescore
from flows.rescore_request import RescoreRequest, plan_rescore
from flows.reward_analysis import AnalysisRequest, analyse_rewards
from flows.scheduled import EVALUATE, RESCORE, TRAIN, ScheduledFlow, means_run
from flows.stored_iterations import held_versions
from grpo_core.errors import InputError, InputErrors
from tasks.storage.run_lock import locked
from tasks.storage.store import ArtifactStore

from .conftest import REPOSITORY, Runs, Start
from .deployed import deployed, make_pool, on_the_server

RUN = "pruned"
EVALUATED = {
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 1,
    "evaluate__samples_per_prompt": 1,
    "evaluate__every": 2,
}
ITERATIONS = 4
SSIM, PSNR = {"reward": "ssim", "weight": 0.5}, {"reward": "psnr", "weight": 0.5}


@pytest.fixture(scope="module")
def trained(server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runs, Start]]:
    """A picture run of four updates, evaluated at 0, 2 and 4; no test changes it."""
    runs = Runs(tmp_path_factory.mktemp("pruned"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        yield runs, runs.start(RUN, run__iterations=ITERATIONS, **EVALUATED)


@pytest.fixture
def runs(trained: tuple[Runs, Start], tmp_path: Path) -> Runs:
    """A copy of it."""
    copy = Runs(tmp_path / "runs")
    shutil.copytree(trained[0].root, copy.root)
    return copy


def pruned(runs: Runs, *sources: str, **asked: Any) -> PruneSummary:
    return prune(PruneRequest(sources or (RUN,), root=str(runs.root), **asked))


def removed(summary: PruneSummary, index: int = 0) -> dict[str, int]:
    return {each.kind: each.count for each in summary.runs[index].removed}


def kept(summary: PruneSummary, kind: str) -> dict[str, str]:
    return {name: each.reason for each in summary.runs[0].kept if each.kind == kind for name in each.names}


def refused(**asked: Any) -> list[str]:
    with pytest.raises((InputError, InputErrors)) as caught:
        prune(PruneRequest(**{"sources": (RUN,), **asked}))
    errors = caught.value.errors if isinstance(caught.value, InputErrors) else (caught.value,)
    return [str(error) for error in errors]


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file and folder with its time and, of a file, its sha256."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def contents(folder: Path) -> dict[str, str]:
    """Every file but locks and what their holders write for a moment."""
    return {name: sha for name, (_, sha) in tree(folder).items() if sha and ".lock" not in name and "lock" not in name}


def best(runs: Runs) -> int:
    """The version whose held-out samples have the highest mean reward."""
    means = {
        version: pl.read_parquet(runs.path("evaluations", f"{version:06d}", "advantages", "*.parquet", run=RUN))[
            "reward"
        ].mean()
        for version in (2, 4)
    }
    return max(means, key=lambda version: means[version])  # type: ignore[arg-type,return-value]


def pictures(runs: Runs, place: str, run: str = RUN) -> int:
    """How many samples have theirs."""
    table = pl.read_parquet(runs.path(place, "rollouts", "*.parquet", run=run))
    return table.height - table["image"].null_count()


def iteration(number: int) -> str:
    return f"iteration_{number:06d}"


class TestPruned:
    def test_dry_run_then_for_real_then_again_and_the_run_goes_on(
        self, runs: Runs, trained: tuple[Runs, Start]
    ) -> None:
        asked = {"policies_last": 1, "pictures_older_than": "1i", "evaluations": True}
        before, size = tree(runs.root), sum(path.stat().st_size for path in runs.root.rglob("*") if path.is_file())
        told = pruned(runs, dry_run=True, **asked)
        assert tree(runs.root) == before
        done = pruned(runs, **asked)
        assert (done.dry_run, done.model_dump(exclude={"dry_run"})) == (False, told.model_dump(exclude={"dry_run"}))
        stays = {4, best(runs)}
        assert held_versions(ArtifactStore(str(runs.root), RUN)) == sorted(stays)
        assert removed(done) == {VERSIONS: 4 - len(stays), PICTURES: 3, **({EVALUATIONS: 1} if best(runs) == 4 else {})}
        assert [pictures(runs, iteration(number)) for number in (1, 2, 3, 4)] == [0, 0, 0, 4]
        assert kept(done, VERSIONS) == ({} if best(runs) == 4 else {"2": "it has the best held-out reward"})
        assert set(kept(done, EVALUATIONS)) >= {"evaluations/000000"}
        assert ENDS in kept(done, EVALUATIONS)["evaluations/000000"]
        left = sum(path.stat().st_size for path in runs.root.rglob("*") if path.is_file())
        assert size - left == pytest.approx(done.bytes, rel=0.05)
        # Nothing is left to do, for it or for the run.
        after = contents(runs.root)
        again = pruned(runs, **asked)
        assert (again.bytes, removed(again), contents(runs.root)) == (0, {}, after)
        start = runs.start(RUN, run__iterations=ITERATIONS, **EVALUATED)
        assert start.stages == ()
        assert start.summary.policy_digest == trained[1].summary.policy_digest
        assert start.summary.set_aside == []
        assert start.summary.model_dump(exclude={"seconds", "folder", "contact_sheet"}) == trained[
            1
        ].summary.model_dump(exclude={"seconds", "folder", "contact_sheet"})

    def test_every_second_version_and_the_last_two(self, runs: Runs) -> None:
        done = pruned(runs, policies_every=2)
        assert held_versions(ArtifactStore(str(runs.root), RUN)) == [2, 3, 4]
        assert (removed(done), kept(done, VERSIONS)) == ({VERSIONS: 1}, {})
        assert not list(runs.path("policies", "000001", run=RUN).rglob("*.safetensors"))

    def test_by_age(self, runs: Runs) -> None:
        assert removed(pruned(runs, pictures_older_than="30d")) == {}
        long_ago = datetime.now(UTC).timestamp() - 40 * 86400
        manifest = runs.path(iteration(2), "rollouts.manifest.json", run=RUN)
        os.utime(manifest, (long_ago, long_ago))
        assert removed(pruned(runs, pictures_older_than="30d")) == {PICTURES: 1}
        assert [pictures(runs, iteration(number)) for number in (1, 2, 3, 4)] == [4, 0, 4, 4]

    def test_on_a_root_that_is_no_folder(self, runs: Runs) -> None:
        memory = fsspec.filesystem("memory")
        for lock in runs.root.rglob(".lock"):
            lock.unlink()
        memory.put(f"{runs.root}/", "/prune/", recursive=True)
        try:
            asked = {"policies_last": 1, "pictures_older_than": "0i", "evaluations": True}
            here = pruned(runs, **asked)
            there = prune(PruneRequest((RUN,), root="memory://prune", **asked))
            assert there.model_dump(exclude={"runs": {0: {"folder"}}}) == here.model_dump(
                exclude={"runs": {0: {"folder"}}}
            )
            store = ArtifactStore("memory://prune", RUN)
            assert held_versions(store) == held_versions(ArtifactStore(str(runs.root), RUN))
            place = f"{RUN}/{iteration(1)}/rollouts/part-00000.parquet"
            assert memory.cat_file(f"/prune/{place}") == (runs.root / place).read_bytes()
        finally:
            memory.rm("/prune", recursive=True)

    def test_what_is_left_over(self, runs: Runs) -> None:
        store = ArtifactStore(str(runs.root), RUN)
        store.write_file("damaged", b"12345")
        store.set_aside(["damaged"], reason="it is damaged")
        long_ago = datetime.now(UTC).timestamp() - 40 * 86400
        for name in ("aa.json", "bb.json"):
            store.write_file(f".calls/{name}", b"{}")
        os.utime(runs.path(".calls", "aa.json", run=RUN), (long_ago, long_ago))
        gone = runs.path(".incoming", "ended", "files", run=RUN)
        gone.mkdir(parents=True)
        (gone / "half").write_bytes(b"half")
        (gone.parent / "lock").touch()
        assert removed(pruned(runs, set_aside_older_than="30d", dry_run=True)) == {CALLS: 1, WRITES: 1}
        (reason,) = runs.path("set_aside", run=RUN).glob("*/reason.json")
        os.utime(reason, (long_ago, long_ago))
        done = pruned(runs, set_aside_older_than="30d")
        assert removed(done) == {ASIDE: 1, CALLS: 1, WRITES: 1}
        assert not gone.exists()
        assert not reason.parent.exists()
        assert [path.name for path in runs.path(".calls", run=RUN).iterdir()] == ["bb.json"]


class TestNeeded:
    def test_a_version_whose_evaluation_is_due(self, runs: Runs) -> None:
        shutil.rmtree(runs.path("evaluations", "000002", "rollouts", run=RUN))
        done = pruned(runs, policies_last=1, pictures_older_than="0i", evaluations=True, dry_run=True)
        assert "the next start of the run evaluates it" in kept(done, VERSIONS)["2"]

    def test_versions_that_sample_the_next_iterations(self, runs: Runs) -> None:
        path = runs.path("config.yaml", run=RUN)
        path.write_text(path.read_text().replace("staleness: 0", "staleness: 1"))
        done = pruned(runs, policies_last=1, dry_run=True)
        assert kept(done, VERSIONS)["3"] == "the next iterations are sampled by it"

    def test_damaged_versions_do_not_count_as_the_last(self, runs: Runs) -> None:
        (weights,) = runs.path("policies", "000004", run=RUN).rglob("adapter_model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        done = pruned(runs, policies_last=1)
        assert "it is damaged" in kept(done, VERSIONS)["4"]
        assert 3 in held_versions(ArtifactStore(str(runs.root), RUN))

    def test_pictures_that_are_to_be_scored(self, runs: Runs) -> None:
        runs.path(iteration(1), "rewards", "ssim.manifest.json", run=RUN).unlink()
        runs.path(iteration(2), "advantages", "advantages.parquet", run=RUN).unlink()
        done = pruned(runs, pictures_older_than="1i")
        assert kept(done, PICTURES) == {iteration(1): UNSCORED, iteration(2): UNSCORED}
        assert [pictures(runs, iteration(number)) for number in (1, 2, 3)] == [4, 4, 0]

    @pytest.mark.parametrize(("iterations", "needed"), [(3, True), (2, False)])
    def test_the_start_of_a_replay_that_is_not_at_its_end(self, runs: Runs, iterations: int, needed: bool) -> None:
        config = yaml.safe_load(runs.path("config.yaml", run=RUN).read_text())
        config |= {"replay": {"source": RUN, "policy": 1}, "run": {**config["run"], "iterations": iterations}}
        replay_of = runs.path("policies", run="slower")
        replay_of.mkdir(parents=True)
        (replay_of / "000002.manifest.json").write_text("{}")
        runs.path("config.yaml", run="slower").write_text(yaml.safe_dump(config))
        (runs.root / "notes.txt").write_text("a person's own")
        told = kept(pruned(runs, policies_last=2), VERSIONS)
        assert ("1" in told) == needed
        assert (1 in held_versions(ArtifactStore(str(runs.root), RUN))) == needed
        if needed:
            assert told["1"] == "the replay slower starts from it and is not finished"

    def test_what_the_present_configuration_may_take_back(self, runs: Runs) -> None:
        store = ArtifactStore(str(runs.root), RUN)
        store.write_file("was/run.json", runs.path("run.json", run=RUN).read_bytes())
        store.set_aside(["was"], reason="the configuration changed")
        (folder,) = runs.path("set_aside", run=RUN).iterdir()
        (folder / "was" / "run.json").rename(folder / "run.json")
        done = pruned(runs, set_aside_older_than="0d")
        assert list(kept(done, ASIDE)) == [f"set_aside/{folder.name}"]
        assert folder.exists()


class TestReadersOfWhatIsGone:
    @pytest.fixture
    def gone(self, runs: Runs) -> Runs:
        pruned(runs, policies_every=2, pictures_older_than="0i")
        return runs

    def test_a_removed_version_is_told_with_what_is_there(self, gone: Runs) -> None:
        told = (
            "--policy: got 1. Its files were removed by `grpo prune --policies-every 2 --policies-last 2`; pruned "
            "holds versions 2 to 4. Choose one of these; 0 is the model as it was given."
        )
        result = CliRunner().invoke(application, ["evaluate", RUN, "--policy", "1", "--root", str(gone.root)])
        assert (result.exit_code, result.stderr.strip()) == (2, f"error: {told}")
        with pytest.raises(InputErrors) as caught:
            plan_replay(ReplayRequest(RUN, str(gone.root), policy=1))
        assert str(caught.value) == told
        assert EvaluateRequest(run=RUN, root=str(gone.root)).plan.policy.version == 4

    def test_an_iteration_without_pictures_is_shown(self, gone: Runs, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        inspection = inspect_run(RUN, root=str(gone.root), iteration=2, html=page)
        (told,) = inspection.warnings
        assert told.startswith("iteration 2: its pictures were removed on 20")
        assert "`grpo prune --pictures-older-than 0i`; everything else of it is there" in told
        assert page.read_text().count("picture removed") >= 2
        assert inspection.run.finished
        shown = CliRunner().invoke(application, ["inspect", RUN, "--iteration", "2", "--root", str(gone.root)])
        assert shown.exit_code == 0
        assert "its pictures were removed" in " ".join(shown.output.split())

    def test_the_last_iteration_is_reported_again(self, gone: Runs, trained: tuple[Runs, Start]) -> None:
        start = gone.start(RUN, run__iterations=ITERATIONS, **EVALUATED)
        assert (start.stages, start.summary.policy_digest) == ((), trained[1].summary.policy_digest)

    def test_the_laboratory_scores_nothing_again(self, gone: Runs) -> None:
        summary, analysis = analyse_rewards(AnalysisRequest(RUN, root=str(gone.root)))
        reason = "the pictures were removed by `grpo prune`"
        assert summary.not_repeated == {"ssim": reason, "psnr": reason}
        assert [reward.noise for reward in analysis.rewards] == [None, None]

    def test_rescoring_needs_pictures_for_what_is_not_stored(self, gone: Runs) -> None:
        with pytest.raises(InputErrors) as caught:
            rescored(gone, SSIM, {"reward": "jpeg"})
        (told,) = caught.value.errors
        assert str(told) == (
            "rewards.1.jpeg: got 'jpeg'. pruned has no scores of it for iteration 1, 2, 3, 4, whose pictures were "
            "removed by `grpo prune`. Choose other --iterations, or rewards whose scores are stored."
        )
        assert rescored(gone, {**SSIM, "weight": 0.1}, PSNR) == {"ssim": 0, "psnr": 0}


def rescored(runs: Runs, *rewards: Mapping[str, object]) -> dict[str, int]:
    file = runs.root.parent / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": [dict(reward) for reward in rewards]}))
    plan = plan_rescore(RescoreRequest((RUN,), file, "other", root=str(runs.root)))
    return asyncio.run(rescore(plan)).summary.computed


class TestScheduled:
    def test_what_an_active_schedule_needs(self, runs: Runs) -> None:
        make_pool()
        file = runs.root.parent / "nightly.yaml"
        file.write_text(yaml.safe_dump({"rewards": [SSIM]}))
        overrides = [each for each in runs.overrides(**EVALUATED) if not each.startswith("run.name")]
        changed = [*overrides, "run.iterations=9", "evaluate.every=3"]
        deployed(run=RUN, cron="0 2 * * *", evaluation=True, rescorings=(file,), overrides=changed)
        asked = {"policies_last": 1, "pictures_older_than": "0i", "dry_run": True}
        # The training alone has a schedule, and would evaluate version 3 on its way.
        told = pruned(runs, **asked)
        assert "the schedule of grpo train/pruned evaluates it" in kept(told, VERSIONS)["3"]
        assert "1" not in kept(told, VERSIONS)
        assert removed(told)[PICTURES] == 4
        schedule(f"{RESCORE}/pruned-nightly", active=True)
        schedule(f"{EVALUATE}/pruned", active=True, parameters={"request": {**asked_of(runs), "policy": 1}})
        told = pruned(runs, **asked)
        assert told.schedules
        assert kept(told, VERSIONS)["1"] == "the schedule of grpo evaluate/pruned evaluates it"
        assert PICTURES not in removed(told)
        assert set(kept(told, PICTURES).values()) == {"the schedule of grpo rescore/pruned-nightly scores them again"}
        for name in (f"{RESCORE}/pruned-nightly", f"{EVALUATE}/pruned"):
            schedule(name, active=False)
        assert removed(pruned(runs, **asked))[PICTURES] == 4

    def test_a_server_that_does_not_answer(self, runs: Runs) -> None:
        before = tree(runs.root)
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            (told,) = refused(root=str(runs.root), policies_last=1)
        assert "PREFECT_API_URL: got 'http://127.0.0.1:9/api'. No server answers there" in told
        assert tree(runs.root) == before
        with temporary_settings({PREFECT_API_URL: None}):
            assert not pruned(runs, policies_last=1, dry_run=True).schedules

    @pytest.mark.parametrize(
        ("source", "root", "meant"),
        [
            (RUN, "{root}", True),
            ("{root}/pruned", "elsewhere", True),
            ("other", "{root}", False),
            (RUN, "{root}/../copy", False),
            # What is not here may be another machine's way to the same disk.
            (RUN, "/no/such/folder", True),
            (RUN, "s3://bucket/runs", False),
        ],
    )
    def test_which_run_a_flow_means(self, runs: Runs, source: str, root: str, meant: bool) -> None:
        shutil.copytree(runs.path("policies", run=RUN), runs.root.parent / "copy" / RUN)
        store = ArtifactStore(str(runs.root), RUN)
        assert means_run(store, source.format(root=runs.root), root.format(root=runs.root)) is meant


def asked_of(runs: Runs) -> dict[str, Any]:
    return EvaluateRequest(run=RUN, root=str(runs.root)).model_dump(mode="json")


def schedule(name: str, *, active: bool, parameters: dict[str, Any] | None = None) -> None:
    """Give a deployment one schedule."""
    identity = on_the_server(RUN)[name].id
    made = DeploymentScheduleCreate(
        schedule=IntervalSchedule(interval=timedelta(days=30)), active=active, parameters=parameters or {}
    )

    async def put() -> None:
        async with get_client() as client:
            for each in await client.read_deployment_schedules(identity):
                await client.delete_deployment_schedule(identity, each.id)
            await client.create_deployment_schedules(identity, [made])

    asyncio.run(put())


class TestRefused:
    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ({}, "grpo prune: got 'no rule'. Say what may go"),
            ({"policies_every": 0}, "--policies-every: got 0. Give 1 or more"),
            ({"policies_last": 0}, "--policies-last: got 0. Give 1 or more"),
            ({"pictures_older_than": "a month"}, "--pictures-older-than: got 'a month'. Write days or hours"),
            ({"pictures_older_than": "-3d"}, "--pictures-older-than: got '-3d'"),
            ({"set_aside_older_than": "3i"}, "--set-aside-older-than: got '3i'. What was set aside belongs to no"),
            ({"evaluations": True, "policies_last": 1}, "--evaluations: got True. Say how old"),
            ({"sources": (RUN, RUN), "policies_last": 1}, "A run stands twice"),
            ({"sources": ("prune",), "policies_last": 1}, "RUN: got 'prune'. Runs in"),
        ],
    )
    def test_in_one_message(self, trained: tuple[Runs, Start], asked: dict[str, Any], told: str) -> None:
        before = tree(trained[0].root)
        (message,) = refused(root=str(trained[0].root), **asked)
        assert told in message
        assert tree(trained[0].root) == before

    def test_by_the_program_with_exit_code_2(self, trained: tuple[Runs, Start]) -> None:
        result = CliRunner().invoke(application, ["prune", RUN, "--root", str(trained[0].root)])
        assert (result.exit_code, result.stderr[:6]) == (2, "error:")

    @pytest.mark.parametrize("place", ["", "rescored/mix"])
    def test_while_somebody_writes(self, runs: Runs, place: str) -> None:
        before = contents(runs.root)
        with locked(ArtifactStore(str(runs.root), RUN), place, setting="run.name", value=RUN):
            (told,) = refused(root=str(runs.root), policies_last=1)
            assert "It is being written by" in told
            assert f"process {os.getpid()}" in told
            assert removed(pruned(runs, policies_last=1, dry_run=True))
        assert contents(runs.root) == before


def test_the_program_prints_a_table_and_one_json_object(runs: Runs) -> None:
    given = ["prune", RUN, "--policies-last", "2", "--dry-run", "--json", "--root", str(runs.root)]
    result = CliRunner().invoke(application, given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["dry_run"], [each["run"] for each in told["runs"]]) == (True, [RUN])
    assert "would go" in result.stderr
    assert VERSIONS in result.stderr
    assert "nothing was changed" in result.stderr


def test_texts_have_no_pictures(empty: Runs) -> None:
    store = ArtifactStore(str(empty.root), "text")
    config = yaml.safe_load((REPOSITORY / "configs" / "tiny_text.yaml").read_text())
    store.write_file("config.yaml", yaml.safe_dump({**config, "storage": {"root": str(empty.root)}}).encode())
    store.write_file("run.json", b"{}")
    summary = prune(PruneRequest(("text",), root=str(empty.root), pictures_older_than="0i"))
    assert summary.runs[0].notes == ["its rollouts are texts, which have no pictures"]


def test_rules_have_defaults() -> None:
    assert read_rules(PruneRequest(("a",), policies_every=5)).last == 2
    assert read_rules(PruneRequest(("a",), policies_last=7)).last == 7
    assert read_rules(PruneRequest(("a",), pictures_older_than="3d")).last is None


def test_a_flow_of_each_kind_is_known() -> None:
    from flows.evaluate import evaluate
    from flows.rescore import rescore as rescore_flow
    from flows.train import train

    assert {train.name, evaluate.name, rescore_flow.name} == {TRAIN, EVALUATE, RESCORE}
    assert ScheduledFlow("x", TRAIN, {}).flow == TRAIN
