"""Held-out scores of a policy version: what is drawn, what is taken as it is stored, and what is refused."""

import asyncio
import contextvars
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.evaluation.evaluate import EvaluateSummary, evaluate
from flows.evaluation.request import EvaluateRequest
from grpo_core.errors import InputError, InputErrors
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tasks.storage.locks.run_lock import locked
from tests.flows.conftest import REPOSITORY, Heard, Runs, Start

SMALL_TEXT = {
    "run__iterations": 2,
    "rollout__prompts_per_iteration": 2,
    "rollout__group_size": 2,
    "update__minibatch_size": 4,
    "update__micro_batch_size": 4,
    "evaluate__limit": 3,
    "evaluate__samples_per_prompt": 2,
    "evaluate__every": 0,
}
STAGES = ["collect rollouts", "score answer", "compute advantages"]


@pytest.fixture(scope="module")
def trained(server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runs, Start]]:
    """A text run of two updates, evaluated before and after; no test changes it."""
    runs = Runs(tmp_path_factory.mktemp("evaluated"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        yield runs, runs.start_text(**SMALL_TEXT)


@pytest.fixture
def runs(trained: tuple[Runs, Start], tmp_path: Path) -> Runs:
    """A copy of it."""
    copy = Runs(tmp_path / "runs")
    shutil.copytree(trained[0].root, copy.root)
    return copy


def evaluated(runs: Runs, run: str = "text", **requested: object) -> tuple[EvaluateSummary, Heard]:
    heard = Heard([], [])
    request = EvaluateRequest(run=run, root=str(runs.root), **requested)  # type: ignore[arg-type]

    def body() -> EvaluateSummary:
        listen(heard)
        return asyncio.run(evaluate(request))

    return contextvars.copy_context().run(body), heard


def refused(runs: Runs, run: str = "text", **requested: object) -> list[str]:
    before = content(runs)
    with pytest.raises((InputError, InputErrors)) as caught:
        _ = EvaluateRequest(run=run, root=str(runs.root), **requested).plan  # type: ignore[arg-type]
    assert content(runs) == before
    errors = caught.value.errors if isinstance(caught.value, InputErrors) else (caught.value,)
    return [str(error) for error in errors]


def content(runs: Runs, run: str = "text") -> dict[str, str]:
    """Every file of the run that is no evaluation of its own, with its sha256."""
    paths = [path for path in runs.path(run=run).rglob("*") if path.is_file()]
    kept = [path for path in paths if not {"evaluations_of", ".stages", ".incoming"} & set(path.parts)]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def table(summary: EvaluateSummary, name: str) -> pl.DataFrame:
    return pl.read_parquet(f"{summary.folder}/{name}/**/*.parquet")


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


class TestStored:
    def test_what_the_training_evaluated_is_taken_as_it_is(self, runs: Runs, trained: tuple[Runs, Start]) -> None:
        before, told = content(runs), trained[1].summary
        for policy, expected in ((0, told.heldout_before), (2, told.heldout_after), (None, told.heldout_after)):
            summary, heard = evaluated(runs, policy=policy)
            assert (summary.heldout, summary.stored, heard.stages) == (expected, True, [])
            assert summary.folder == str(runs.path("evaluations", f"{policy if policy == 0 else 2:06d}", run="text"))
        assert summary.policy_digest == told.policy_digest
        assert content(runs) == before
        assert not runs.path("evaluations_of", run="text").exists()

    def test_what_is_damaged_is_drawn_again_elsewhere_and_comes_to_the_same(
        self, runs: Runs, trained: tuple[Runs, Start]
    ) -> None:
        flip(next(runs.path("evaluations", "000002", "advantages", run="text").glob("*.parquet")))
        before = content(runs)
        summary, heard = evaluated(runs)
        assert heard.stages == [f"evaluation of policy 2: {stage}" for stage in STAGES]
        assert summary.heldout == trained[1].summary.heldout_after
        assert content(runs) == before
        drawn = pl.read_parquet(runs.path("evaluations", "000002", "rollouts", "*.parquet", run="text"))
        assert table(summary, "rollouts").equals(drawn)

    def test_a_second_start_computes_nothing(self, runs: Runs) -> None:
        first, _ = evaluated(runs, policy=1)
        again, heard = evaluated(runs, policy=1)
        assert (first.stored, again.stored, heard.stages) == (False, True, [])
        assert again.model_dump(exclude={"seconds", "stored"}) == first.model_dump(exclude={"seconds", "stored"})


class TestOtherPrompts:
    FILE = "data/prompts/letters_train.jsonl"

    def test_figures_are_those_of_the_tables_and_the_run_stays_as_it_is(self, runs: Runs) -> None:
        before = content(runs)
        summary, _ = evaluated(runs, policy=1, prompts=self.FILE, overrides=("evaluate.limit=2",))
        assert content(runs) == before
        assert Path(summary.folder).parent.name.startswith("letters_train-")
        rollouts, scores = table(summary, "rollouts"), table(summary, "rewards")
        requested = [json.loads(line) for line in (REPOSITORY / self.FILE).read_text().splitlines()[:2]]
        assert rollouts["prompt"].to_list() == [row["prompt"] for row in requested for _ in range(2)]
        assert set(rollouts["policy_digest"]) == {summary.policy_digest}
        assert set(rollouts["policy_version"]) == {1}
        assert summary.samples == 4
        assert summary.heldout == pytest.approx(scores["value"].mean())
        assert summary.rewards["answer"].mean == pytest.approx(scores["value"].mean())
        assert summary.rewards["answer"].std == pytest.approx(scores["value"].std())
        assert summary.rewards["answer"].without == summary.rewards["answer"].failed == 0

    def test_versions_stand_side_by_side_and_draw_with_the_same_seeds(self, runs: Runs) -> None:
        requested = {"prompts": self.FILE, "overrides": ("evaluate.limit=2",)}
        folders = [Path(evaluated(runs, policy=version, **requested)[0].folder) for version in (0, 1)]
        assert folders[0].parent == folders[1].parent
        first, second = (pl.read_parquet(folder / "rollouts" / "*.parquet") for folder in folders)
        assert first.select("sample_id", "seed", "prompt").equals(second.select("sample_id", "seed", "prompt"))

    def test_other_sampling_or_rewards_have_a_place_of_their_own(self, runs: Runs) -> None:
        hotter, _ = evaluated(runs, overrides=("rollout.temperature=3.0",))
        shorter, _ = evaluated(runs, overrides=('rewards=[{reward: format, settings: {pattern: "^[a-z]+$"}}]',))
        own, _ = evaluated(runs)
        assert len({hotter.folder, shorter.folder, own.folder}) == 3
        assert list(shorter.rewards) == ["format"]
        assert own.stored


class TestWhileTheRunIsHeld:
    def test_a_training_that_goes_on_is_no_obstacle(self, runs: Runs) -> None:
        store = ArtifactStore(str(runs.root), "text")
        with locked(store, setting="run.name", value="text"):
            summary, _ = evaluated(runs, policy=1)
        assert summary.samples == 6

    def test_the_same_evaluation_twice_at_once_is_refused(self, runs: Runs) -> None:
        request = EvaluateRequest(run="text", policy=1, root=str(runs.root))
        store = ArtifactStore(str(runs.root), "text")
        with (
            locked(store, request.plan.rounds.folder, setting="--policy", value="1"),
            pytest.raises(InputError, match=r"--policy: got '1'\. It is being written by"),
        ):
            asyncio.run(evaluate(request))


class TestRefused:
    def test_a_version_that_is_not_there(self, runs: Runs) -> None:
        (told,) = refused(runs, policy=7)
        assert told.startswith("--policy: got 7.")
        assert "1 to 2" in told

    def test_a_damaged_version_is_refused_by_number_and_passed_over_by_default(self, runs: Runs) -> None:
        weights = next(runs.path("policies", "000002", run="text").rglob("*.safetensors"))
        flip(weights)
        (told,) = refused(runs, policy=2)
        assert "policies/000002/" in told
        assert "has sha256" in told
        before = content(runs)
        summary, heard = evaluated(runs)
        assert summary.policy == 1
        assert any("version 2" in line and weights.name in line for line in heard.lines)
        assert content(runs) == before

    def test_a_run_that_is_not_there_or_of_a_newer_program(self, runs: Runs) -> None:
        assert "Runs in" in refused(runs, run="txet")[0]
        description = runs.path("run.json", run="text")
        description.write_bytes(dump_checked({**load_checked(description.read_bytes()), "schema_version": 99}))
        (told,) = refused(runs)
        assert "got 'schema version 99'. This program reads version" in told

    @pytest.mark.parametrize(
        ("requested", "words"),
        [
            ({"overrides": ("update.learning_rate=1",)}, "An evaluation takes the policy as it was trained"),
            ({"overrides": ("policy.model=elsewhere",)}, "An evaluation takes the policy as it was trained"),
            ({"overrides": ("evaluate.samples_per_prompts=1",)}, "did you mean samples_per_prompt?"),
            ({"overrides": ("evaluate.prompts=null",)}, "--prompts: got None. text has no held-out prompts"),
            ({"prompts": "nowhere.jsonl"}, "evaluate.prompts"),
        ],
    )
    def test_what_cannot_be_asked_for(self, runs: Runs, requested: dict[str, object], words: str) -> None:
        assert words in refused(runs, **requested)[0]

    def test_a_model_that_has_changed(self, runs: Runs) -> None:
        description = runs.path("run.json", run="text")
        description.write_bytes(dump_checked({**load_checked(description.read_bytes()), "model_digest": "0" * 64}))
        assert "Its files have changed since text began (000000000000)" in refused(runs, policy=0)[0]


def test_the_command_tells_the_table_and_one_json_object(runs: Runs, trained: tuple[Runs, Start]) -> None:
    arguments = ["evaluate", "text", "--root", str(runs.root), "--json"]
    ended = CliRunner().invoke(application, arguments)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["heldout"] == trained[1].summary.heldout_after
    assert (told["run"], told["policy"], told["samples"]) == ("text", 2, 6)
    assert "held-out reward" in ended.stderr
    ended = CliRunner().invoke(application, [*arguments, "--policy", "9"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: --policy: got 9.")


def test_a_server_that_does_not_answer_is_told_before_any_work(runs: Runs) -> None:
    before = content(runs)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        ended = CliRunner().invoke(application, ["evaluate", "text", "--root", str(runs.root)])
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.startswith("error: PREFECT_API_URL: got 'http://127.0.0.1:9/api'. No server answers there")
    assert content(runs) == before
