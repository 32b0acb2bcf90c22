"""An exported policy's evaluation, repeated from its folder alone: equal to the bit, or what is wrong and where."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.export.card_request import card_config, read_request
from flows.export.export import export
from flows.export.plan import plan_export
from flows.requests import ExportRequest, RepeatRequest
from flows.verification.repeated_evaluation import plan_repeat, repeat_evaluation
from tasks.verification.evaluation_card import EVALUATION_FILE, MAX_BYTES
from tasks.verification.repeated import RepeatedEvaluation
from tests.flows.conftest import REPOSITORY, Runs, Start, heard_of, refused
from tests.tiny_policies import TEXT_MODEL

CONFIGS = REPOSITORY / "configs"
SMALL: Mapping[str, object] = {
    "run__iterations": 1,
    "rollout__prompts_per_iteration": 2,
    "rollout__group_size": 2,
    "evaluate__limit": 2,
    "evaluate__samples_per_prompt": 2,
    "evaluate__every": 0,
}


def exported(root: Path, run: str, folder: Path, **options: Any) -> Path:
    export(plan_export(ExportRequest(run=run, folder=str(folder), root=str(root), **options)))
    return folder


def repeated(folder: Path, **options: Any) -> RepeatedEvaluation:
    request = RepeatRequest(folder=str(folder), **options)
    summary, _ = heard_of(lambda: asyncio.run(repeat_evaluation(request)))
    return summary


@pytest.fixture(scope="module")
def text_export(evaluated_text: tuple[Runs, Start], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last policy of the text run, with its card; no test changes it."""
    return exported(evaluated_text[0].root, "text", tmp_path_factory.mktemp("export") / "text")


@pytest.fixture
def folder(text_export: Path, tmp_path: Path) -> Path:
    """A copy of it, away from the run."""
    return Path(shutil.copytree(text_export, tmp_path / "sent"))


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the card by hand."""
    file = folder / EVALUATION_FILE
    card = json.loads(file.read_text())
    edit(card)
    file.write_text(json.dumps(card))


def test_the_evaluation_is_equal_to_the_bit_and_the_folder_unchanged(
    folder: Path, evaluated_text: tuple[Runs, Start]
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = repeated(folder)
    assert (found.level, found.problems, found.explanations) == ("equal", (), ())
    assert {each.title: (each.equal, each.samples) for each in found.scores} == {"reward": (6, 6), "answer": (6, 6)}
    training = evaluated_text[1].summary
    assert found.scores[0].computed == found.scores[0].stated == training.heldout_after
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def improve(card: dict[str, Any]) -> None:
    """Improve one sample's score, with the mean and the interval that follow from it."""
    for score in card["scores"]:
        score["values"][2] += 0.01
        score["mean"] += 0.01 / 6
        pair = [sum(score["values"][place : place + 2]) / 2 for place in (0, 2, 4)]
        mean = sum(pair) / 3
        # Student's t with two degrees of freedom.
        half = 4.302652729911275 * (sum((each - mean) ** 2 for each in pair) / 2 / 3) ** 0.5
        score["low"], score["high"] = mean - half, mean + half


def test_a_score_improved_by_hand_is_named(folder: Path) -> None:
    change(folder, improve)
    done = CliRunner().invoke(application, ["evaluate", str(folder), "--card", "--json"])
    found = RepeatedEvaluation.model_validate_json(done.stdout.splitlines()[-1])
    assert (done.exit_code, found.level, found.problems) == (1, "differs", ())
    score = found.scores[0]
    assert (score.level, score.equal, score.sample_id) == ("differs", 5, "heldout.p0001.s00")
    assert score.largest == pytest.approx(0.01)


def test_a_folder_without_a_card_cannot_be_tried(tmp_path: Path) -> None:
    done = CliRunner().invoke(application, ["evaluate", str(tmp_path), "--card", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["errors"][0]["place"]) == (2, "EXPORT")


def test_a_mean_improved_by_hand_is_no_mean_of_its_samples(folder: Path) -> None:
    change(folder, lambda card: card["scores"][0].update(mean=0.99))
    found = repeated(folder)
    assert found.level == "differs"
    assert [each.partition(" is ")[0] for each in found.problems] == ["reward: the stated mean"]


def test_a_changed_prompt_is_named(folder: Path) -> None:
    change(folder, lambda card: card["prompts"][1].update(prompt="sort: b a"))
    found = repeated(folder)
    name = json.loads((folder / EVALUATION_FILE).read_text())["prompts"][1]["prompt_id"]
    assert found.level == "differs"
    assert any(f"prompt {name} of default" in each for each in found.problems)
    assert found.scores[0].sample_id is None or found.scores[0].sample_id.startswith("heldout.p0001")


def test_weights_of_another_policy_are_named(folder: Path, evaluated_text: tuple[Runs, Start], tmp_path: Path) -> None:
    other = exported(evaluated_text[0].root, "text@1", tmp_path / "other")
    (name,) = (path.name for path in other.glob("*.safetensors"))
    shutil.copy(other / name, folder / name)
    found = repeated(folder)
    assert found.level == "differs"
    assert [each.partition(" is ")[0] for each in found.problems] == [name]


def test_an_export_without_prompts_says_that_nobody_can_repeat_it(
    evaluated_text: tuple[Runs, Start], tmp_path: Path
) -> None:
    folder = exported(evaluated_text[0].root, "text", tmp_path / "bare", without_prompts=True)
    card = json.loads((folder / EVALUATION_FILE).read_text())
    assert (card["prompts"], card["datasets"][0]["prompts"]) == ([], 3)
    (error,) = refused(lambda: read_request(RepeatRequest(folder=str(folder))))
    assert error.value == "no prompts"


def first(error_of: Callable[[], object]) -> tuple[str, str]:
    """The place of the first error, below the folder, and what was found there."""
    error, *_ = refused(error_of)
    return error.place.rpartition("/")[2], str(error.value)


def _too_deep(folder: Path) -> None:
    (folder / EVALUATION_FILE).write_text('{"settings": ' + "[" * 100_000)


def _too_large(folder: Path) -> None:
    with (folder / EVALUATION_FILE).open("r+b") as file:
        file.truncate(MAX_BYTES + 1)


HOSTILE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "too deep": (_too_deep, EVALUATION_FILE),
    "too large": (_too_large, EVALUATION_FILE),
    "another key": (
        lambda folder: change(folder, lambda card: card.update(run_this="x")),
        f"{EVALUATION_FILE}, run_this",
    ),
    "scores of other samples": (
        lambda folder: change(folder, lambda card: card["scores"][0]["values"].pop()),
        EVALUATION_FILE,
    ),
    "a path for a digest": (
        lambda folder: change(folder, lambda card: card["prompts"][0].update(sources=["../" * 21 + "x"])),
        f"{EVALUATION_FILE}, prompts.0.sources.0",
    ),
    "not a number": (
        lambda folder: (folder / EVALUATION_FILE).write_text(
            (folder / EVALUATION_FILE).read_text().replace('"mean": 0', '"mean": NaN, "x": 0', 1)
        ),
        f"{EVALUATION_FILE}, scores.0.mean",
    ),
    "a value whose square is not finite": (
        lambda folder: change(folder, lambda card: card["scores"][0]["values"].append(-1e200)),
        f"{EVALUATION_FILE}, scores.0.values.6",
    ),
    "prompts of no dataset": (
        lambda folder: change(folder, lambda card: card.update(datasets=[])),
        EVALUATION_FILE,
    ),
    "no kind": (
        lambda folder: change(folder, lambda card: card["settings"]["policy"].pop("kind")),
        f"{EVALUATION_FILE}, settings.policy.kind",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_export_writes_is_refused(name: str, folder: Path) -> None:
    edit, place = HOSTILE[name]
    edit(folder)
    assert first(lambda: read_request(RepeatRequest(folder=str(folder))))[0] == place


def test_more_samples_than_the_card_has_scores_are_not_sampled(folder: Path) -> None:
    change(folder, lambda card: card["settings"].update(samples_per_prompt=10**9))
    place, value = first(lambda: read_request(RepeatRequest(folder=str(folder))))
    assert (place, value) == (f"{EVALUATION_FILE}, samples", "6 samples")


def test_scores_in_the_role_of_others_are_refused(folder: Path, tmp_path: Path) -> None:
    change(folder, lambda card: card["scores"][1].update(role="guardrail"))
    place, value = first(lambda: plan_repeat(RepeatRequest(folder=str(folder)), tmp_path / "scratch"))
    assert (place, value) == (f"{EVALUATION_FILE}, scores", "reward, answer (guardrail)")


def test_what_a_strangers_card_names_needs_trust(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\ndef score(*_, **__): ...\n"
    )
    reward = {"reward": "function", "settings": {"function": f"{tmp_path}/evil.py:score"}}
    remote = {"reward": "remote", "name": "far", "settings": {"url": "http://127.0.0.1:9", "token_env": "HOME"}}
    remote["settings"] |= {"reward": "r", "reward_version": "1"}  # type: ignore[operator]
    change(folder, lambda card: card["settings"].update(rewards=[reward, remote]))
    request = RepeatRequest(folder=str(folder))
    errors = refused(lambda: card_config(read_request(request), request, tmp_path / "runs"))
    places = {error.place.rpartition(", ")[2] for error in errors}
    assert {"rewards.0.settings.function", "rewards.1.settings.url", "rewards.1.settings.token_env"} <= places
    assert not trace.exists()


LORA = {"policy__lora": {"rank": 4, "alpha": 8.0}}
FOUR = {"update__minibatch_size": 4, "update__micro_batch_size": 4}
OF_STREAMS = {
    f"update__{stream}__{size}_size": 2 for stream in ("tokens", "denoising") for size in ("minibatch", "micro_batch")
}
SHIPPED: Mapping[str, Mapping[str, object]] = {
    "tiny": FOUR,
    "tiny_text": {**FOUR, **LORA},
    "tiny_sd3": FOUR,
    "tiny_both": {"rollout__images_per_sample": 2, **OF_STREAMS},
    "tiny_edit": FOUR,
    "tiny_grounding": FOUR,
}
"""Every kind of policy and of prompt, with what makes its configuration small."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.usefixtures("server")
def test_every_kind_of_policy_is_repeated(name: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    runs.start_text("run", file=CONFIGS / f"{name}.yaml", **{**SMALL, **SHIPPED[name]})
    found = repeated(exported(runs.root, "run", tmp_path / "export"))
    assert (found.level, found.problems, found.explanations) == ("equal", (), ())
    if name == "tiny_text":
        base = shutil.copytree(TEXT_MODEL, tmp_path / "base")
        moved = repeated(tmp_path / "export", overrides=(f"policy.model={base}",), trust_code=True)
        assert (moved.level, moved.explanations) == ("equal", ())
    # Every weight of this one is trained, so the export above has them.
    if name != "tiny_grounding":
        merged = repeated(exported(runs.root, "run", tmp_path / "merged", merged=True))
        assert (merged.is_repeated, merged.problems) == (True, ())
        assert any("merged" in each for each in merged.explanations)
