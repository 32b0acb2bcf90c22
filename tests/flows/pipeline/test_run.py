"""Opening a run's folder: what makes another run of it, and what it says of itself."""

import contextvars
import functools
import io
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from configs.loader import read_config
from configs.schema import RunConfig
from flows.command_line.options import RESTART, ask_about_change
from flows.pipeline import lineage
from flows.pipeline.lineage import ChangedRunError, read_valid_description
from flows.pipeline.run import changed_run, heldout_digest, start_run
from flows.preflight.inputs import check_inputs
from tasks.execution import caching
from tasks.execution.fingerprint import code_fingerprint
from tasks.progress import listen
from tasks.runs.lookup import find_run, read_config_file, runs_below, write_description
from tasks.runs.stored import stored_config
from tasks.storage.artifacts.run_folder import RunFolder
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import REPOSITORY, TINY, refused, sha256_of
from tests.processes import ProgressLog
from tests.tiny_policies import MODEL


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", note="round")


def write(path: Path, **columns: str) -> Path:
    path.write_text(json.dumps({"prompt": "a red circle"} | columns) + "\n")
    return path


def config(prompts: Path, *overrides: str) -> RunConfig:
    root = prompts.parent / "runs"
    sets = [f"storage.root={root}", f"data.prompts={prompts}", "data.target_column=null", "data.targets=null"]
    jpeg = ['rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]', "evaluate.prompts=null"]
    return read_config(TINY, [*sets, *jpeg, *overrides])


def reasons(prompts: Path, *overrides: str, accept_code: bool = False) -> list[str]:
    """Why the results became an earlier run when the run was opened once more; afterwards it has new ones."""
    log, made = ProgressLog(), config(prompts, *overrides)

    def opened() -> None:
        listen(log)
        with start_run(made, accept_code=accept_code):
            pass

    contextvars.copy_context().run(opened)
    (prompts.parent / "runs" / made.run.name / "iteration_000001").mkdir(exist_ok=True)
    lines = [line.removeprefix(f"{made.run.name}: ").partition("; its results are now the run ") for line in log.lines]
    return [reason for reason, became, _ in lines if became]


HELDOUT = ("evaluate.prompts=PROMPTS", "evaluate.targets=null", "evaluate.target_column=null")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("run.iterations=100", "evaluate.every=3", "placement.torch_threads=2"),
        ("rollout.prompts_per_batch=1", "rollout.decode_batch_size=2", "policy.gradient_checkpointing=true"),
        ("update.micro_batch_size=1", "rewards.0.max_failures=0.4", "rewards.0.batch_size=3", "rewards.0.processes=1"),
        (*HELDOUT, 'guardrails={"rewards": [{"reward": "sharpness"}], "rise": 0.5}'),
    ],
)
def test_what_leaves_the_run_as_it_is(prompts: Path, overrides: tuple[str, ...]) -> None:
    reasons(prompts)
    assert reasons(prompts, *(each.replace("PROMPTS", str(prompts)) for each in overrides)) == []


def test_each_change_makes_an_earlier_run(prompts: Path) -> None:
    reasons(prompts)
    reasons(prompts, OTHER)
    # The last one before was the first.
    (reason,) = reasons(prompts)
    assert "update.kl_coef 0.02 -> 0.01" in reason
    assert [each.run for each in runs_below(str(prompts.parent / "runs")) or ()] == ["tiny", "tiny~1", "tiny~2"]
    assert stored_config(find_run("tiny~2", str(prompts.parent / "runs"))).run.name == "tiny~2"
    # Each has the starts that it was made by.
    assert reasons(prompts) == []
    starts = [(prompts.parent / "runs" / run / "starts.jsonl").read_text() for run in ("tiny", "tiny~1", "tiny~2")]
    assert [text.count("\n") for text in starts] == [2, 1, 1]


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
    for accept_code in (False, True):
        with pytest.raises(ChangedRunError) as caught:
            reasons(prompts, OTHER, accept_code=accept_code)
        assert (caught.value.value, caught.value.iterations) == ("tiny", 1)
        assert "update.kl_coef 0.01 -> 0.02" in caught.value.difference
    assert sha256_of(trained) == before
    assert reasons(prompts, "run.iterations=100") == []
    (reason,) = reasons(prompts, OTHER, RESTART)
    assert "update.kl_coef 0.01 -> 0.02" in reason
    assert not (trained / "policies").exists()
    assert (trained.with_name("tiny~1") / "policies").exists()
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
    for start in ("tiny", "elsewhere/tiny", "other", "missing", "other@0", "other@7"):
        (error,) = refused(lambda start=start: reasons(prompts, f"run.continue_from={start}"))
        assert (error.place, error.value) == ("run.continue_from", start)
    assert not (prompts.parent / "runs" / "tiny" / "run.json").exists()


MINE = "from helper import VALUE\ndef score(prompts, completions, **columns):\n    return [VALUE for _ in prompts]\n"
LOSS = "from loss_helper import scale\ndef loss(inputs, settings):\n    return -scale * inputs.ratio\n"
Edit = Callable[[Path], object]
CHANGES: Sequence[tuple[Edit, str]] = (
    (
        lambda folder: [
            (folder / name).write_text(f'"""Words."""\n{(folder / name).read_text()}# A comment.\n')
            for name in ("mine.py", "helper.py", "own_loss.py", "loss_helper.py")
        ],
        "",
    ),
    (
        lambda folder: write(folder / "prompts.jsonl", note="square", other="x"),
        "the prompt file FOLDER/prompts.jsonl (data) changed: the column note",
    ),
    (
        lambda folder: write(folder / "prompts.jsonl", prompt="a blue circle", note="other", other="x"),
        "the prompt file FOLDER/prompts.jsonl (data) changed: the prompts",
    ),
    (
        lambda folder: (folder / "mine.py").write_text(MINE.replace("[VALUE", "[-VALUE")),
        "rewards.score mine.py changed: mine.py",
    ),
    (
        lambda folder: (folder / "helper.py").write_text("import numpy\nVALUE = 0.5\n"),
        "rewards.score mine.py changed: helper.py, package numpy",
    ),
    (
        lambda folder: (folder / "loss_helper.py").write_text("scale = 2.0\n"),
        "the loss own_loss.py (update.loss) changed: loss_helper.py",
    ),
    (
        lambda folder: (folder / "model" / "notes.txt").write_text("other"),
        "the model FOLDER/model changed: notes.txt",
    ),
    (
        lambda folder: [
            write(folder / "prompts.jsonl", prompt="a blue circle", note="oval", other="x"),
            (folder / "helper.py").write_text("import numpy\nVALUE = -0.5\n"),
        ],
        "rewards.score mine.py changed: helper.py; "
        "the prompt file FOLDER/prompts.jsonl (data) changed: the column note",
    ),
    (
        lambda folder: (folder / "mine.py").write_text(MINE.replace("from helper import VALUE", "VALUE = 0.5")),
        "rewards.score mine.py changed: helper.py, mine.py, package numpy",
    ),
)
"""Edits one after another, and what a start then says of each."""


def test_a_start_names_what_has_changed(tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", note="round", other="x")
    files = {"mine": MINE, "helper": "VALUE = 0.5\n", "own_loss": LOSS, "loss_helper": "scale = 1.0\n"}
    for file, text in files.items():
        (tmp_path / f"{file}.py").write_text(text)
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("one")
    mine = (
        f'rewards=[{{"reward": "function", "settings": {{"function": "{tmp_path}/mine.py:score"}}}}]',
        f"update.loss={tmp_path}/own_loss.py:loss",
        f"policy.model={tmp_path}/model",
    )
    assert reasons(prompts, *mine) == []
    for edit, reason in CHANGES:
        edit(tmp_path)
        assert reasons(prompts, *mine) == ([reason.replace("FOLDER", str(tmp_path))] if reason else [])
    assert reasons(prompts, *mine) == []


def test_a_change_of_a_run_that_recorded_no_parts_is_still_of_something(prompts: Path) -> None:
    reasons(prompts)
    store = find_run("tiny", str(prompts.parent / "runs"))
    described = dict(read_valid_description(store) or {})
    described["identity"] = {
        name: each for name, each in described["identity"].items() if name not in ("inputs", "heldout")
    }
    write_description(store, described, read_config_file(store))
    assert reasons(prompts) == []
    write_description(store, described, read_config_file(store))
    write(prompts, note="square")
    assert reasons(prompts) == ["the prompts or their targets changed"]


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
    heldout = [each.replace("PROMPTS", str(prompts)) for each in HELDOUT]
    reasons(prompts, *heldout)
    made = prompts.parent / "runs" / "tiny" / "evaluations" / "000000"
    made.mkdir(parents=True)
    assert reasons(prompts, *heldout, "evaluate.every=2") == []
    assert made.exists()
    assert reasons(prompts, *heldout, "evaluate.seed=1") == []
    assert not made.exists()
    assert list(made.parents[1].glob("quarantine/*/evaluations/000000"))


def test_changed_code_is_another_run_unless_it_is_accepted(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(prompts)
    edited = functools.cache(lambda roots: f"edited {code_fingerprint(roots)}" if "update" in roots[0] else "same")
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", lambda roots: "same")
    assert len(reasons(prompts)) == 1
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", edited)
    assert reasons(prompts, accept_code=True) == []
    # What was accepted stays accepted.
    assert reasons(prompts) == []
    described = json.loads((prompts.parent / "runs" / "tiny" / "run.json").read_text())
    assert list(described["accepted_code"].values()) == ["same"]
    for module in (caching, lineage):
        monkeypatch.setattr(module, "code_fingerprint", lambda roots: "other" if "update" in roots[0] else "same")
    assert reasons(prompts) == ["the code of update policy changed (--accept-code keeps the results)"]


@pytest.mark.parametrize(
    ("then", "step"),
    [
        *(pytest.param((), step, marks=() if step in (2, 5, 8) else pytest.mark.slow) for step in range(2, 9)),
        ((OTHER,), 4),
        pytest.param((OTHER,), 7, marks=pytest.mark.slow),
        ((OTHER, RESTART), 5),
    ],
)
def test_killed_while_the_earlier_run_is_made_the_next_start_finishes_it(
    prompts: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, step: int, then: tuple[str, ...]
) -> None:
    """Every change of the folder is a step; the next start may be any."""
    steps = itertools.count(1)
    whole = {name: getattr(RunFolder, name) for name in ("_move", "write_file")}

    def counted(name: str) -> Callable[..., None]:
        def change(*args: object, **kwargs: object) -> None:
            if next(steps) == step:
                raise KeyboardInterrupt
            whole[name](*args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in whole:
            patch.setattr(RunFolder, name, counted(name))
        with pytest.raises(KeyboardInterrupt):
            reasons(prompts, OTHER, RESTART)
    begun = bool(list(trained.glob(".becomes~*")))
    assert begun == (step > 2)
    reasons(prompts, *then)
    earlier = trained.with_name("tiny~1")
    assert not trained.with_name("tiny~2").exists()
    assert not list(trained.glob(".becomes*"))
    if not begun:
        assert (trained / "policies").exists()
        assert not earlier.exists()
        return
    assert not (trained / "policies").exists()
    assert (earlier / "policies" / "000001.manifest.json").exists()
    assert read_config_file(ArtifactStore(str(earlier.parent), "tiny~1")) != b""
    assert reasons(prompts, *then[:1]) == []


def test_without_its_description_it_becomes_an_earlier_run(prompts: Path) -> None:
    reasons(prompts)
    run = prompts.parent / "runs" / "tiny"
    (run / "notes").write_text("notes")
    (run / "run.json").write_bytes(b"{")
    (reason,) = reasons(prompts)
    assert "run.json is missing or damaged" in reason
    earlier = run.with_name("tiny~1")
    assert {path.name for path in earlier.iterdir()} == {
        *("config.yaml", "iteration_000001", "notes", "run.json", "starts.jsonl")
    }


def test_held_out_prompts_are_the_same_wherever_their_targets_are(tmp_path: Path) -> None:
    """The folder of targets is spelled in another way, then copied, then one of its images is another."""
    own = REPOSITORY / "data" / "targets"
    copied = shutil.copytree(own, tmp_path / "targets")
    folders: tuple[Path | str, ...] = ("data/targets", own, copied)

    def digest(folder: Path | str) -> str | None:
        config = read_config(TINY, (f"evaluate.targets={folder}", f"storage.root={tmp_path}/runs"))
        return heldout_digest(config, check_inputs(config).heldout)

    assert len({digest(each) for each in folders}) == 1
    first, second, *_ = sorted(copied.glob("*.png"))
    for image in sorted(copied.glob("*.png")):
        shutil.copy(first if image != first else second, image)
    assert digest(copied) != digest(own)
