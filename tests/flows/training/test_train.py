"""The training flow: which stages run, are reused or repeated, and that the policy is always the same."""

import shutil
import socket
import time
import uuid
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.objects import Artifact
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_HOME, temporary_settings

from grpo_core.errors import FailedSamplesError
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.similarity.pairs import SsimReward
from grpo_core.update.optimizer import PolicyOptimizer
from tests.flows.conftest import EVALUATED, REPOSITORY, Compare, Runs, Start

STAGES = ("collect rollouts", "score psnr", "score ssim", "compute advantages", "update policy")
FIRST, SECOND = (tuple(f"iteration {iteration}: {stage}" for stage in STAGES) for iteration in (1, 2))
ALL = FIRST + SECOND


class TestUndisturbed:
    def test_each_iteration_has_its_stages_and_makes_a_policy(self, undisturbed: tuple[Runs, Start]) -> None:
        runs, start = undisturbed
        assert (start.stages, start.summary.iterations) == (ALL, 2)
        assert runs.policy_digest(1) != runs.policy_digest(2) == start.summary.policy_digest

    def test_below_a_relative_root_no_file_names_the_machine_and_a_reward_may_change_the_working_directory(
        self, server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "data").symlink_to(REPOSITORY / "data")
        monkeypatch.chdir(tmp_path)
        call = "def leave(completions, **rest):\n    os.chdir('/')\n    return [0.5] * len(completions)\n"
        Path("leave.py").write_text(f"import os\nos.chdir('/')\n{call}")
        own = {"reward": "function", "settings": {"function": "leave.py:leave"}}
        start = Runs(Path("runs")).start(run__iterations=1, rewards=[{"reward": "ssim"}, own])
        assert start.summary.iterations == 1
        assert Path.cwd() == tmp_path
        words = [str(REPOSITORY), str(tmp_path), str(Path.home()), socket.gethostname(), hex(uuid.getnode())[2:]]
        files = [path for path in Path("runs").rglob("*") if path.is_file()]
        assert len(files) > 20
        found = [
            f"{path}: {word}"
            for path in files
            for word in words
            if len(word) > 4 and word.encode() in path.read_bytes()
        ]
        assert found == []


class TestPrefect:
    def test_each_iteration_leaves_a_report_and_a_table(self, undisturbed: tuple[Runs, Start]) -> None:
        kinds = {"grpo-run-report": "markdown", "grpo-run-metrics": "table"}
        with get_client(sync_client=True) as client:
            for key, kind in kinds.items():
                filtered = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
                artifacts = client.read_artifacts(artifact_filter=filtered)
                assert {artifact.type for artifact in artifacts} == {kind}
                for iteration in (1, 2):
                    # Runs of other tests may have this name too.
                    named = [str(each.data) for each in artifacts if each.description == f"run, iteration {iteration}"]
                    expected = "](data:image/" if kind == "markdown" else "grad_norm"
                    assert any(expected in content for content in named)
                    assert max(map(len, named)) < 300_000

    def test_a_report_that_the_server_refuses_ends_nothing(
        self, empty: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As a proxy with a limit of what it takes in does."""
        real = SyncPrefectClient.create_artifact

        def limited(client: SyncPrefectClient, artifact: ArtifactCreate) -> Artifact:
            if len(str(artifact.data)) < 1000:
                return real(client, artifact)
            request = httpx.Request("POST", "http://proxy/artifacts/")
            refused = httpx.HTTPStatusError("", request=request, response=httpx.Response(413, request=request))
            raise PrefectHTTPStatusError.from_httpx_error(refused)

        monkeypatch.setattr(SyncPrefectClient, "create_artifact", limited)
        start = empty.start(run__iterations=1)
        assert start.summary.iterations == 1
        assert empty.metrics(1)["reward"] == start.summary.reward_last
        assert any("iteration 1 is not in Prefect's UI" in line and "413" in line for line in caplog.messages)

    def test_the_end_names_the_pages_of_the_last_report_and_of_the_summary(
        self, undisturbed: tuple[Runs, Start]
    ) -> None:
        _, start = undisturbed
        contents = {}
        with get_client(sync_client=True) as client:
            for title, address in start.summary.pages.items():
                page, _, artifact = address.rpartition("/")
                assert page.endswith("/artifacts/artifact")
                assert str(client.api_url).startswith(page.removesuffix("/artifacts/artifact"))
                filtered = ArtifactFilter(id=ArtifactFilterId(any_=[uuid.UUID(artifact)]))
                (found,) = client.read_artifacts(artifact_filter=filtered)
                contents[title] = str(found.data)
        assert contents["last report"].startswith("# run: iteration 2\n")
        assert contents["summary"].startswith("# run: 2 iterations\n")
        assert "| policy digest |" in contents["summary"]
        assert start.summary.pages["last report"] in contents["summary"]


def _task_runs(run: str) -> dict[str, str | None]:
    """State name by task run name, of the last flow run of this name; waits for the server's recorder."""
    with get_client(sync_client=True) as client:
        filtered = FlowRunFilter(name=FlowRunFilterName(any_=[run]))
        for _ in range(600):
            found = client.read_task_runs(flow_run_filter=filtered)
            states = {task.name: task.state_name for task in found}
            if len(states) == len(STAGES) and set(states.values()) <= {"Cached", "Completed"}:
                return states
            time.sleep(0.2)
    return states


class TestReuse:
    def test_a_second_start_needs_the_run_folder_alone(self, finished: Runs, final: Compare, tmp_path: Path) -> None:
        elsewhere = Runs(tmp_path / "elsewhere")
        shutil.copytree(finished.path(), elsewhere.path())
        with temporary_settings({PREFECT_HOME: tmp_path / "another-home"}):
            again = elsewhere.start()
        assert again.stages == ()
        final(elsewhere, again)
        assert elsewhere.reasons() == []

    def test_learning_rate_changed_and_changed_back(self, finished: Runs, final: Compare) -> None:
        changed = finished.start(update__learning_rate=1e-3)
        assert changed.stages == ("iteration 1: update policy", *SECOND)
        assert finished.path("policies/000002/tokens/adapter_model.safetensors", run="run~1").is_file()
        back = finished.start()
        assert back.stages == ()
        final(finished, back)

    def test_another_run_of_the_root_copies_what_is_the_same(self, finished: Runs) -> None:
        other = finished.start("copied", update__learning_rate=1e-3, run__iterations=1)
        assert other.stages == (FIRST[4],)
        assert _task_runs("copied") == {**dict.fromkeys(FIRST[:4], "Cached"), FIRST[4]: "Completed"}
        assert other.summary.reused == {"run": 1}
        # Only what this run did itself counts as its time.
        assert other.summary.seconds.keys() == {"total", "update"}
        shutil.rmtree(finished.path())
        (ours,) = [finished.tables("copied")["iteration_000001/rollouts/part-00000.parquet"]]
        assert len(ours) == 4
        assert finished.start("copied", update__learning_rate=1e-3, run__iterations=1).stages == ()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("setting", "value", "stages"), [("rollout.group_size", 3, FIRST), ("rewards.0.weight", 0.9, FIRST[3:])]
    )
    def test_other_settings_repeat_the_stages_from_theirs_on(
        self, finished: Runs, setting: str, value: object, stages: tuple[str, ...]
    ) -> None:
        assert finished.start(run__iterations=1, **{setting: value}).stages == stages

    @pytest.mark.slow
    def test_evaluation_and_placement_change_no_training_stage(self, finished: Runs, final: Compare) -> None:
        changed = finished.start(**EVALUATED, placement__devices="cpu")
        baselines = tuple(f"baseline {name}: {stage}" for name in ("blank", "target") for stage in STAGES[1:4])
        evaluations = tuple(f"evaluation of policy {v}: {stage}" for v in (0, 2) for stage in STAGES[:4])
        assert changed.stages == baselines + evaluations
        assert changed.summary.policy_digest == finished.start().summary.policy_digest
        assert finished.reasons() == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class TestDamage:
    def test_deleted_and_truncated_files_of_many_kinds_at_once(self, finished: Runs, final: Compare) -> None:
        finished.path("iteration_000001/rollouts/part-00000.parquet").unlink()
        finished.path("iteration_000002/rollouts.manifest.json").unlink()
        truncate(finished.path("iteration_000002/rewards/ssim/scores.parquet"))
        truncate(finished.path("policies/000001/tokens/optimizer.safetensors"))
        shutil.rmtree(finished.path("policies/000002"))
        again = finished.start()
        assert again.stages == (FIRST[0], FIRST[4], SECOND[0], SECOND[2], SECOND[4])
        reasons = finished.reasons()
        for name in ("part-00000.parquet is missing", "rollouts.manifest.json is missing", "scores.parquet has sha256"):
            assert [name in reason for reason in reasons].count(True) == 1
        final(finished, again)

    @pytest.mark.slow
    def test_without_any_record_every_stage_is_done_again_to_the_bit(self, finished: Runs, final: Compare) -> None:
        shutil.rmtree(finished.root / ".stages")
        shutil.rmtree(finished.path(".stages"))
        again = finished.start()
        assert again.stages == ALL
        final(finished, again)
        assert all("another result of the same stage" in reason for reason in finished.reasons())


def without_last_update(runs: Runs) -> None:
    """Delete the last policy, so that the next start repeats its update alone."""
    shutil.rmtree(runs.path("policies", "000002"))


class TestFailure:
    def test_update_that_fails_half_way_leaves_no_trace_in_the_next_start(
        self, finished: Runs, final: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_last_update(finished)
        real = PolicyOptimizer.step

        def step_and_fail(self: PolicyOptimizer) -> None:
            real(self)
            raise RuntimeError("power cut")

        monkeypatch.setattr(PolicyOptimizer, "step", step_and_fail)
        with pytest.raises(RuntimeError, match="power cut"):
            finished.start()
        assert not finished.path("policies", "000002").exists()
        monkeypatch.undo()
        again = finished.start()
        assert again.stages == SECOND[4:]
        final(finished, again)

    def test_a_report_that_fails_beside_the_next_iteration_ends_the_run_and_is_made_up_for(
        self, finished: Runs, final: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*given: object) -> str:
            raise RuntimeError("no report")

        finished.path("iteration_000001", "metrics.parquet").unlink()
        monkeypatch.setattr("flows.training.callbacks.iteration_markdown", failing)
        with pytest.raises(RuntimeError, match="no report"):
            finished.start()
        assert not finished.path("iteration_000001", "metrics.parquet").exists()
        monkeypatch.undo()
        again = finished.start()
        assert again.stages == ()
        final(finished, again)

    def test_nan_of_a_reward_names_the_samples(
        self, finished: Runs, final: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.rmtree(finished.path("iteration_000002", "rewards", "ssim"))
        shutil.rmtree(finished.path("iteration_000002", "rewards", "psnr"))

        def broken(self: SsimReward, batch: ScoringBatch) -> list[Score]:
            return [Score(float("nan") if name.endswith("s01") else 0.5, 0.5) for name in batch.sample_ids]

        monkeypatch.setattr(SsimReward, "score", broken)
        with pytest.raises(FailedSamplesError) as caught:
            finished.start()
        named = [reason.partition(":")[0] for reason in caught.value.failed]
        assert (caught.value.reward, named) == ("ssim", ["i000002.p0000.s01", "i000002.p0001.s01"])
        monkeypatch.undo()
        assert finished.path("iteration_000002", "rewards", "psnr", "scores.parquet").is_file()
        again = finished.start()
        assert again.stages == (SECOND[2],)
        final(finished, again)
