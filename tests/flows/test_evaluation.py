"""Held-out scores of a policy version: what is sampled, what is reused, and what is refused."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl
import pytest
from PIL import Image
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from configs.loader import read_config
from configs.validation import validated
from data.recipes.shapes import BACKGROUNDS
from flows.command_line.main import application
from flows.evaluation import EvaluateSummary, evaluate, plan_evaluate
from flows.inspect_run import inspect_run
from flows.preflight.inputs import check_evaluation
from flows.requests import EvaluateRequest
from grpo_core.errors import InputError
from grpo_core.rewards.similarity.pairs import SsimReward
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tasks.storage.run_lock import locked
from tests.flows.conftest import REPOSITORY, Heard, Runs, Start, flip, heard_of, refused, sha256_of
from tests.grpo_core.rewards.conftest import make_batch


@pytest.fixture
def runs(evaluated_text: tuple[Runs, Start], tmp_path: Path) -> Runs:
    """A copy of it."""
    return evaluated_text[0].copied_to(tmp_path / "runs")


def evaluated(runs: Runs, run: str = "text", **requested: object) -> tuple[EvaluateSummary, Heard]:
    request = validated(EvaluateRequest, {"run": run, "root": str(runs.root), **requested})
    return heard_of(lambda: asyncio.run(evaluate(request)))


def test_any_algorithms_policy_can_be_evaluated() -> None:
    config = read_config("configs/tiny_sd3_nft.yaml", ["evaluate.limit=2"])
    assert [len(each.prompts) for each in check_evaluation(config).heldout] == [2]


def problem(runs: Runs, run: str = "text", **requested: object) -> InputError:
    """The one problem of a request; nothing is written."""
    before = content(runs)
    (error,) = refused(
        lambda: plan_evaluate(validated(EvaluateRequest, {"run": run, "root": str(runs.root), **requested}))
    )
    assert content(runs) == before
    return error


def content(runs: Runs) -> dict[str, str]:
    """Every file of the run except evaluations outside the training."""
    return sha256_of(runs.path(run="text"), "evaluations_of", ".stages", ".incoming")


def table(summary: EvaluateSummary, name: str) -> pl.DataFrame:
    return pl.read_parquet(f"{summary.folder}/{name}/**/*.parquet")


class TestStored:
    def test_what_the_training_evaluated_is_reused(self, runs: Runs, evaluated_text: tuple[Runs, Start]) -> None:
        before, training = content(runs), evaluated_text[1].summary
        rewards = {0: training.heldout_before, 2: training.heldout_after, None: training.heldout_after}
        for policy, expected in rewards.items():
            summary, heard = evaluated(runs, "text" if policy is None else f"text@{policy}")
            assert (summary.heldout, summary.stored, heard.stages) == (expected, True, [])
            assert summary.folder == str(runs.path("evaluations", f"{policy if policy == 0 else 2:06d}", run="text"))
        assert summary.policy_digest == training.policy_digest
        assert content(runs) == before
        assert not runs.path("evaluations_of", run="text").exists()

    def test_a_damaged_evaluation_is_computed_again_elsewhere_with_the_same_result(
        self, runs: Runs, evaluated_text: tuple[Runs, Start]
    ) -> None:
        flip(next(runs.path("evaluations", "000002", "advantages", run="text").glob("*.parquet")))
        before = content(runs)
        summary, heard = evaluated(runs)
        stages = ("collect rollouts", "score answer", "compute advantages")
        assert heard.stages == [f"evaluation of policy 2: {stage}" for stage in stages]
        assert summary.heldout == evaluated_text[1].summary.heldout_after
        assert content(runs) == before
        drawn = pl.read_parquet(runs.path("evaluations", "000002", "rollouts", "part-*.parquet", run="text"))
        assert table(summary, "rollouts").equals(drawn)

    def test_a_second_start_computes_nothing(self, runs: Runs) -> None:
        # A training in progress is no obstacle.
        with locked(ArtifactStore(str(runs.root), "text"), setting="run.name", value="text"):
            first, _ = evaluated(runs, "text@1")
        assert first.samples == 6
        again, heard = evaluated(runs, "text@1")
        assert (first.stored, again.stored, heard.stages) == (False, True, [])
        assert again.model_dump(exclude={"seconds", "stored"}) == first.model_dump(exclude={"seconds", "stored"})


class TestOtherPrompts:
    FILE = "data/prompts/letters_train.jsonl"

    def test_the_summary_agrees_with_the_tables_and_the_run_is_unchanged(self, runs: Runs) -> None:
        before = content(runs)
        summary, _ = evaluated(runs, "text@1", prompts=self.FILE, overrides=["evaluate.limit=2"])
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
        # Versions share a folder and their seeds.
        initial, _ = evaluated(runs, "text@0", prompts=self.FILE, overrides=["evaluate.limit=2"])
        assert Path(initial.folder).parent == Path(summary.folder).parent
        shared = ("sample_id", "seed", "prompt")
        assert table(initial, "rollouts").select(shared).equals(rollouts.select(shared))

    @pytest.mark.slow
    def test_other_sampling_or_rewards_have_their_own_folder(self, runs: Runs) -> None:
        hotter, _ = evaluated(runs, overrides=["rollout.temperature=3.0"])
        shorter, _ = evaluated(runs, overrides=['rewards=[{reward: format, settings: {pattern: "^[a-z]+$"}}]'])
        own, _ = evaluated(runs)
        assert len({hotter.folder, shorter.folder, own.folder}) == 3
        assert list(shorter.rewards) == ["format"]
        assert own.stored


class TestWhileItIsLocked:
    def test_the_same_evaluation_twice_at_once_is_refused(self, runs: Runs) -> None:
        request = EvaluateRequest(run="text@1", root=str(runs.root))
        store = ArtifactStore(str(runs.root), "text")
        with locked(store, plan_evaluate(request).rollouts.folder, setting="RUN", value="text@1"):
            (error,) = refused(lambda: asyncio.run(evaluate(request)))
        assert (error.place, error.value) == ("RUN", "text@1")


WRONG: list[tuple[dict[str, Any], str, object]] = [
    ({"run": "text@7"}, "RUN", "text@7"),
    ({"run": "txet"}, "RUN", "txet"),
    ({"overrides": ["update.learning_rate=1"]}, "--set", "update.learning_rate=1"),
    *(
        ({"overrides": [override]}, "--set", override)
        for override in ("evaluate.every=2", "guardrails.on_fall=stop", "advantages.max_rounds=2")
    ),
    ({"overrides": ["rollout.group_size=7"]}, "rollout.group_size", 7),
    ({"overrides": ["policy.model=elsewhere"]}, "policy.model", "elsewhere"),
    ({"overrides": ["policy.dtype=bfloat16"]}, "--set", "policy.dtype=bfloat16"),
    ({"overrides": ["evaluate.samples_per_prompts=1"]}, "evaluate.samples_per_prompts", "samples_per_prompts"),
    ({"overrides": ["evaluate.prompts=null"]}, "--prompts", None),
    ({"prompts": "nowhere.jsonl"}, "evaluate.prompts", "nowhere.jsonl"),
    ({"run": "text@last"}, "RUN", "text@last"),
    ({"polcy": 2}, "polcy", "polcy"),
]


class TestRefused:
    def test_a_damaged_version_is_refused_by_number_and_skipped_by_default(self, runs: Runs) -> None:
        weights = next(runs.path("policies", "000002", run="text").rglob("*.safetensors"))
        flip(weights)
        error = problem(runs, "text@2")
        assert (error.place, error.value) == ("RUN", "text@2")
        before = content(runs)
        summary, heard = evaluated(runs)
        assert summary.policy == 1
        assert any(weights.name in line for line in heard.lines)
        assert content(runs) == before

    @pytest.mark.parametrize(
        ("key", "value", "place"), [("schema_version", 99, "text/run.json"), ("model_digest", "0" * 64, "policy.model")]
    )
    def test_a_run_of_a_newer_program_or_another_model(self, runs: Runs, key: str, value: object, place: str) -> None:
        description = runs.path("run.json", run="text")
        description.write_bytes(dump_checked({**load_checked(description.read_bytes()), key: value}))
        assert problem(runs, "text@0").place == place

    def test_each_mistake_has_its_place_and_value(self, evaluated_text: tuple[Runs, Start]) -> None:
        for requested, place, value in WRONG:
            error = problem(evaluated_text[0], **requested)
            assert (error.place, error.value) == (place, value)


def test_the_command_prints_the_rewards_and_one_json_object(runs: Runs, evaluated_text: tuple[Runs, Start]) -> None:
    arguments = ["evaluate", "text", "--root", str(runs.root), "--json"]
    ended = CliRunner().invoke(application, arguments)
    assert ended.exit_code == 0, ended.output
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["heldout"] == evaluated_text[1].summary.heldout_after
    assert (summary["run"], summary["policy"], summary["samples"]) == ("text", 2, 6)
    assert f"{summary['heldout']:.3f}" in ended.stderr


def test_an_unreachable_server_is_reported_before_any_work(runs: Runs) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        error = problem(runs, "text@1")
    assert (error.place, error.value) == ("PREFECT_API_URL", "http://127.0.0.1:9/api")


HELD_OUT = {
    "run__iterations": 1,
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 2,
    "evaluate__samples_per_prompt": 1,
    "rewards": [{"reward": "ssim", "weight": 0.5}, {"reward": "r2", "weight": 2.0}],
}


def test_blank_images_and_targets_are_scored_once_by_the_runs_rewards(empty: Runs) -> None:
    first = empty.start(**HELD_OUT)
    drawn = [stage for stage in first.stages if stage.startswith("baseline")]
    assert drawn == [
        f"baseline {name}: {stage}"
        for name in ("blank", "target")
        for stage in ("score r2", "score ssim", "compute advantages")
    ]
    earned = []
    for row in (REPOSITORY / HELD_OUT["evaluate__prompts"]).read_text().splitlines()[:2]:  # type: ignore[operator]
        name = row.partition('"target": "')[2].partition(".png")[0]
        with Image.open(REPOSITORY / "data" / "targets" / f"{name}.png") as target:
            blank = Image.new("RGB", target.size, BACKGROUNDS[name.rpartition("-")[2]])
            (score,) = SsimReward().score(make_batch([blank], [target]))
        earned.append(score.value)
    # A single colour has no R²; the target has all of both.
    expected = {"blank": 0.5 * fmean(value for value in earned if value is not None), "target": 2.5}
    assert len(earned) == 2
    assert first.summary.heldout_baselines == pytest.approx(expected)
    assert inspect_run("run", root=str(empty.root)).summary(None).heldout_baselines == first.summary.heldout_baselines
    again = empty.start(**HELD_OUT)
    assert again.stages == ()
    assert again.summary.heldout_baselines == first.summary.heldout_baselines
