"""Opening a run's folder: what makes another run of it, and what it says of itself."""

import functools
import io
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from configs.loader import read_config
from configs.schema import RunConfig
from flows.command_line.questions import RESTART, ask_about_change
from flows.pipeline import lineage
from flows.pipeline.lineage import ChangedRunError
from flows.pipeline.run import changed_run, open_run
from grpo_core.errors import InputError
from tasks.execution import caching
from tasks.execution.fingerprint import code_fingerprint
from tests.flows.conftest import REPOSITORY, TINY, sha256_of


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", note="round")


def write(path: Path, **columns: str) -> Path:
    path.write_text(json.dumps({"prompt": "a red circle", **columns}) + "\n")
    return path


def config(prompts: Path, *overrides: str) -> RunConfig:
    root = prompts.parent / "runs"
    sets = [f"storage.root={root}", f"data.prompts={prompts}", "data.target_column=null", "data.targets=null"]
    jpeg = ['rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]', "evaluate.prompts=null"]
    return read_config(TINY, [*sets, *jpeg, *overrides])


def reasons(prompts: Path, *overrides: str, accept_code: bool = False) -> list[str]:
    """Why the folder's content was moved to `previous/`, after opening the run once more."""
    root = prompts.parent / "runs"
    with open_run(config(prompts, *overrides), accept_code=accept_code):
        pass
    return [json.loads(note.read_text())["reason"] for note in sorted(root.glob("tiny/previous/*/reason.json"))]


def test_opened_again_as_it_was(prompts: Path) -> None:
    assert reasons(prompts) == []
    assert reasons(prompts, "run.iterations=100", "evaluate.every=3", "placement.torch_threads=2") == []


def test_another_value_is_another_run(prompts: Path) -> None:
    reasons(prompts)
    assert reasons(prompts, "update.kl_coef=0.02") == ["the configuration changed: update.kl_coef 0.01 -> 0.02"]


@pytest.fixture
def trained(prompts: Path) -> Path:
    """The folder of a run that has made a policy."""
    reasons(prompts)
    run = prompts.parent / "runs" / "tiny"
    (run / "policies").mkdir()
    (run / "policies" / "000001.manifest.json").write_text("")
    return run


OTHER = "update.kl_coef=0.02"


def test_policies_of_other_settings_stay_until_someone_chooses(prompts: Path, trained: Path) -> None:
    before = sha256_of(trained)
    choices = r"update.kl_coef 0.01 -> 0.02.* --run .* --continue-from .*--restart"
    for accept_code in (False, True):
        with pytest.raises(ChangedRunError, match=choices):
            reasons(prompts, OTHER, accept_code=accept_code)
    assert sha256_of(trained) == before
    assert reasons(prompts, "run.iterations=100", "placement.torch_threads=2") == []
    (reason,) = reasons(prompts, OTHER, RESTART)
    assert "update.kl_coef 0.01 -> 0.02" in reason
    assert not (trained / "policies").exists()
    # It is a decision of that start alone.
    assert "on_change" not in (trained / "config.yaml").read_text()


def test_a_person_is_asked(prompts: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trained.parent / "tiny-2").mkdir()
    change = changed_run(config(prompts, OTHER))
    assert change is not None
    answers = {
        "1": ['run.name="tiny-3"'],
        "2": ['run.name="tiny-3"', 'run.continue_from="tiny"'],
        "3": [RESTART],
    }
    for answer, overrides in answers.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(f"7\n{answer}\n"))
        assert ask_about_change(change) == overrides
    for same in ((), (OTHER, RESTART)):
        assert changed_run(config(prompts, *same)) is None


def test_a_start_that_is_not_there_is_refused(prompts: Path) -> None:
    reasons(prompts, "run.name=other")
    hints = {
        "tiny": "its own name",
        "elsewhere/tiny": "no path",
        "other": "no valid policy",
        "missing": "grpo list",
        "other@0": "from 1",
        "other@7": "policy versions none",
    }
    for start, hint in hints.items():
        with pytest.raises(InputError, match=f"run.continue_from: got '{start}'.*{hint}"):
            reasons(prompts, f"run.continue_from={start}")
    assert not (prompts.parent / "runs" / "tiny" / "run.json").exists()


def test_another_column_of_the_same_prompts_is_another_run(prompts: Path) -> None:
    reasons(prompts)
    write(prompts, note="square")
    assert reasons(prompts) == ["the model, prompts, or a reward's function or weights changed"]


def test_how_a_reward_is_asked_and_what_is_watched_leave_the_run_as_it_is(prompts: Path) -> None:
    reasons(prompts)
    requested = ["rewards.0.max_failures=0.4", "rewards.0.batch_size=3", "rewards.0.processes=1"]
    heldout = [f"evaluate.prompts={prompts}", "evaluate.targets=null", "evaluate.target_column=null"]
    guarded = ['guardrails={"rewards": [{"reward": "sharpness"}], "rise": 0.5}']
    assert reasons(prompts, *requested, *heldout, *guarded) == []
    assert reasons(prompts, "rewards.0.clamp=[0.0, 0.5]") == [
        "the configuration changed: rewards.jpeg.clamp None -> [0.0, 0.5]"
    ]


def test_an_edited_reward_function_is_another_run(prompts: Path) -> None:
    file = prompts.parent / "mine.py"
    mine = f'rewards=[{{"reward": "function", "settings": {{"function": "{file}:score"}}}}]'
    file.write_text("def score(prompts, completions, **columns):\n    return [0.5 for _ in prompts]\n")
    assert reasons(prompts, mine) == []
    assert reasons(prompts, mine) == []
    file.write_text("def score(prompts, completions, **columns):\n    return [-0.5 for _ in prompts]\n")
    assert reasons(prompts, mine) == ["the model, prompts, or a reward's function or weights changed"]


def test_a_guardrail_asks_nothing_of_the_prompts_that_are_trained_on(prompts: Path) -> None:
    heldout = write(prompts.parent / "heldout.jsonl", target="blue-heart-top-left-black.png")
    targets = [f"evaluate.prompts={heldout}", "evaluate.targets=data/targets", "evaluate.target_column=target"]
    assert reasons(prompts, *targets, 'guardrails.rewards=[{"reward": "ssim"}]') == []


def test_the_description_says_the_versions(prompts: Path) -> None:
    reasons(prompts)
    described = json.loads((prompts.parent / "runs" / "tiny" / "run.json").read_text())
    assert described["versions"]["torch"] == version("torch")
    assert described["versions"]["pytorch-msssim"] == version("pytorch-msssim")
    assert str(REPOSITORY) not in json.dumps(described)


def test_evaluations_of_another_evaluate_section_go_aside(prompts: Path) -> None:
    heldout = [f"evaluate.prompts={prompts}", "evaluate.targets=null", "evaluate.target_column=null"]
    reasons(prompts, *heldout)
    made = prompts.parent / "runs" / "tiny" / "evaluations" / "000000"
    made.mkdir(parents=True)
    assert reasons(prompts, *heldout, "evaluate.every=2") == []
    assert made.exists()
    (reason,) = reasons(prompts, *heldout, "evaluate.seed=1")
    assert "seed changed" in reason
    assert not made.exists()


def test_what_changes_memory_leaves_the_run_as_it_is(prompts: Path) -> None:
    reasons(prompts)
    sizes = ["rollout.prompts_per_batch=1", "rollout.decode_batch_size=2", "update.micro_batch_size=1"]
    assert reasons(prompts, *sizes, "policy.gradient_checkpointing=true") == []


def test_changed_code_is_another_run_unless_it_is_accepted(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(prompts)
    edited = functools.cache(lambda roots: f"edited {code_fingerprint(roots)}" if "update" in roots[0] else "same")
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", lambda roots: "same")
    (first,) = reasons(prompts)
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", edited)
    assert reasons(prompts, accept_code=True) == [first]
    # What was accepted stays accepted.
    assert reasons(prompts) == [first]
    described = json.loads((prompts.parent / "runs" / "tiny" / "run.json").read_text())
    assert list(described["accepted_code"].values()) == ["same"]
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", lambda roots: "other" if "update" in roots[0] else "same")
    assert reasons(prompts)[1:] == ["the code of update policy changed (--accept-code keeps the results)"]


def test_every_start_is_recorded_with_its_lineage(prompts: Path) -> None:
    path = prompts.parent / "runs" / "tiny" / "starts.jsonl"
    for _ in range(2):
        reasons(prompts)
    assert len(path.read_text().splitlines()) == 2
    reasons(prompts, "update.learning_rate=1e-5")
    assert len(path.read_text().splitlines()) == 1


def test_killed_while_it_moved_to_previous_it_goes_on_to_move(prompts: Path, trained: Path) -> None:
    (trained / "previous" / "0001-000000").mkdir(parents=True)
    (trained / "config.yaml").rename(trained / "previous" / "0001-000000" / "config.yaml")
    reasons(prompts, OTHER, RESTART)
    assert not (trained / "policies").exists()


def test_without_its_description_all_that_policies_made_goes_aside(prompts: Path) -> None:
    reasons(prompts)
    run = prompts.parent / "runs" / "tiny"
    made = ["iteration_000001", "policies", "evaluations", "evaluations_of", "rescored"]
    for name in [*made, "notes"]:
        (run / name).mkdir()
        (run / name / "file").write_text(name)
    (run / "run.json").write_bytes(b"{")
    (reason,) = reasons(prompts)
    assert "run.json is missing or damaged" in reason
    (aside,) = (run / "previous").iterdir()
    assert {path.name for path in aside.iterdir()} == {*made, "reason.json"}
    assert (run / "notes" / "file").read_text() == "notes"
