"""Stages are retried a number of times, and do not repeat what shards have used up; changed images are named."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
from PIL import Image
from prefect import flow, task

from configs.loader import read_config
from configs.placement import PlacementSection, RetrySection, ShardedStagePlacement
from configs.schema import RunConfig
from flows.pipeline.run import changed_run, start_run
from grpo_core.errors import InputError
from tasks.execution import stage as stages
from tasks.execution.caching import LONGEST_DELAY, retry_options, stage_task, with_retries
from tasks.execution.errors import LostStageError, RetriesExhaustedError, StageTimeoutError
from tasks.execution.stage import Arguments, Part, Sharding
from tasks.rollouts import collect_rollouts as rollouts
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, StageContext, current_store, use_stage_context
from tasks.storage.prefect_results import registered_records
from tasks.storage.schemas import SCHEMA_VERSION
from tests.flows.conftest import REPOSITORY, Compare, Runs, heard_of, refused

LIMITS = RetrySection(tries=3, delay=0.01)
LOST, LATE, BROKEN = LostStageError("gone"), StageTimeoutError("late"), ConnectionResetError("hung up")


class Script:
    """Errors that are raised one after another, and then none; counts the tries."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.tries = list(errors), 0

    def next(self) -> None:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)


@task(name="scripted")
def scripted(script: Script) -> str:
    script.next()
    return "done"


def in_a_flow(body: Callable[[], Any]) -> Any:
    @flow
    async def around() -> Any:
        return body()

    return asyncio.run(around())


def options(limits: RetrySection = LIMITS) -> dict[str, Any]:
    return {"task_run_name": "a stage", **retry_options(PlacementSection(retries=limits))}


def test_temporary_errors_count_together_for_each_run_of_a_stage(server: None) -> None:
    done = [([], 1), ([LOST, LOST], 3), ([LATE, BROKEN], 3), ([httpx.ConnectError("refused")], 2)]
    failed = [
        ([LOST] * 9, 3),
        ([LOST, LATE, BROKEN], 3),
        ([LOST, InputError("a", 1, "hint")], 2),
        ([ArithmeticError("NaN")], 1),
        ([KeyError("a bug")], 1),
    ]
    scripts = [Script(*errors) for errors, _ in (*done, *failed)]
    stage = scripted.with_options(**options())

    def side_by_side() -> list[object]:
        futures = [stage.submit(script) for script in scripts]
        return [future.result(raise_on_failure=False) for future in futures]

    results = in_a_flow(side_by_side)
    assert [script.tries for script in scripts] == [tries for _, tries in (*done, *failed)]
    assert results[: len(done)] == ["done"] * len(done)
    # The error of the last try is what is raised.
    assert results[len(done) :] == [errors[tries - 1] for errors, tries in failed]


def test_delays_double_up_to_the_longest_for_any_number_of_retries() -> None:
    # Prefect refuses a task with more than 50 delays.
    stage = scripted.with_options(**options(RetrySection(tries=5004, delay=4)))
    assert stage.retries == 5003
    assert isinstance(stage.retry_delay_seconds, list)
    assert stage.retry_delay_seconds[:4] == [4.0, 8.0, 16.0, 32.0]
    assert stage.retry_delay_seconds[-1] == LONGEST_DELAY == 60


def test_with_one_try_there_is_no_retry(server: None) -> None:
    script = Script(LOST)
    limits = RetrySection(tries=1)
    with pytest.raises(LostStageError):
        in_a_flow(lambda: scripted.with_options(**options(limits))(script))
    assert script.tries == 1


def test_each_retry_is_logged(server: None) -> None:
    _, heard = heard_of(lambda: in_a_flow(lambda: scripted.with_options(**options())(Script(LOST, LATE))))
    assert heard.lines == [
        "a stage: gone; attempt 2 of 3 follows",
        "a stage: late; attempt 3 of 3 follows",
    ]


class Sharded:
    """A stage of two parts that follow scripts, as does the joining; nothing goes to a pool."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = {name: scripts.get(name, Script()) for name in ("first", "second", "joined")}

        def collect(name: str, placement: PlacementSection) -> ArtifactRef:
            self.scripts[name].next()
            return made(name)

        # A stage's key wants the code of a function of the project.
        collect.__module__, collect.__qualname__ = "tasks.rollouts.collect_rollouts", "collect_rollouts_task"
        self.task = stage_task(
            "scripted parts",
            lambda inputs: {"name": inputs["name"]},
            kind="rollouts",
            sharding=Sharding(cut, self.join),
        )(collect)

    def join(self, arguments: Arguments, parts: list[ArtifactRef]) -> ArtifactRef:
        self.scripts["joined"].next()
        return made("+".join(part.folder for part in parts))

    def run(self, root: Path) -> ArtifactRef:
        placement = PlacementSection(retries=LIMITS, rollouts=ShardedStagePlacement(pool="nowhere", shards=2))

        @flow
        async def whole() -> ArtifactRef:
            store = ArtifactStore(str(root), "run")
            use_stage_context(StageContext(store, records=await registered_records()))
            return with_retries(self.task, "all of it", placement)("whole", placement)

        return asyncio.run(whole())

    @property
    def tries(self) -> Counter[str]:
        return Counter({name: script.tries for name, script in self.scripts.items()})


def cut(arguments: Arguments, count: int) -> list[Part]:
    placement = PlacementSection(retries=LIMITS)
    return [Part(f"{name} part", {"name": name, "placement": placement}) for name in ("first", "second")][:count]


def made(name: str) -> ArtifactRef:
    store = current_store()
    with store.staging() as staged:
        (staged / "file").write_text(name)
        return commit_artifact(store, staged, name, digest=name, schema_version=1, rows=1, seconds=0.0, metrics={})


@pytest.fixture(autouse=True)
def no_stage_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_REGISTERED", dict(stages._REGISTERED))


def test_the_stage_does_not_repeat_what_a_shard_has_used_up(server: None, tmp_path: Path) -> None:
    sharded = Sharded({"first": Script(*[LOST] * 99), "second": Script(BROKEN, LOST)})
    with pytest.raises(RetriesExhaustedError, match="LostStageError: gone"):
        sharded.run(tmp_path)
    assert sharded.tries == Counter(first=3, second=3, joined=0)


def test_an_error_that_would_come_again_ends_the_stage_unchanged(server: None, tmp_path: Path) -> None:
    sharded = Sharded({"second": Script(InputError("rollout", 1, "hint"))})
    (error,) = refused(lambda: sharded.run(tmp_path))
    assert (error.place, error.value) == ("rollout", 1)
    assert sharded.tries == Counter(first=1, second=1, joined=0)
    assert sharded.run(tmp_path).folder == "first+second"
    # The part that was done is not done again.
    assert sharded.tries == Counter(first=1, second=2, joined=1)


def test_joining_the_shards_is_retried_too(server: None, tmp_path: Path) -> None:
    sharded = Sharded({"first": Script(LOST, LATE), "joined": Script(BROKEN)})
    assert sharded.run(tmp_path).folder == "first+second"
    assert sharded.tries == Counter(first=3, second=1, joined=2)


def test_a_connection_that_comes_back_gives_the_same_run(
    finished: Runs, final: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.path("iteration_000002", "rollouts.manifest.json").unlink()
    calls, collect = Counter[str](), rollouts.collect_rollouts

    def failing_twice(*args: Any, **kwargs: Any) -> Iterator[Any]:
        calls["collect"] += 1
        groups = collect(*args, **kwargs)
        yield next(groups)
        if calls["collect"] <= 2:
            raise BROKEN
        yield from groups

    monkeypatch.setattr(rollouts, "collect_rollouts", failing_twice)
    final(finished, finished.start(placement__retries__delay=0.05))
    assert calls["collect"] == 3
    assert not [path for path in finished.path(".incoming").iterdir() if path.is_dir()]


TINY_EDIT = REPOSITORY / "configs" / "tiny_edit.yaml"
PROMPTS = ("make it red", "make it blue", "make it red", "a circle")
"""Two of one text; the last has no image."""


def change(path: Path) -> None:
    """Change one pixel."""
    with Image.open(path) as image:
        changed = image.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    changed.save(path)


def write(folder: Path) -> None:
    for index in range(len(PROMPTS)):
        for kind in ("before", "after"):
            Image.new("RGB", (64, 64), (20 * index, 90, 30 if kind == "after" else 200)).save(
                folder / f"{kind}{index}.png"
            )
    rows = [
        {"prompt": prompt, "image": f"before{index}.png" if index < 3 else None, "target": f"after{index}.png"}
        for index, prompt in enumerate(PROMPTS)
    ]
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path) -> RunConfig:
    changes = {
        "run.name": "run",
        "storage.root": str(folder / "runs"),
        "data.prompts": str(folder / "edits.jsonl"),
        "data.targets": str(folder),
        "evaluate": {"every": 0},
    }
    return read_config(TINY_EDIT, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def train(folder: Path, sampled: int) -> None:
    """Make a run whose one iteration has sampled so many of the prompts, in their order."""
    with start_run(config(folder)) as run, run.store.staging() as staged:
        groups = sorted(run.plan(1, 1, len(PROMPTS)).groups, key=lambda group: str(group.target_uri))[:sampled]
        names = ("dataset", "prompt_id", "prompt", "sources", "target_sha256")
        rows = pl.DataFrame({name: [getattr(group, name) for group in groups] for name in names})
        pl.concat([rows, rows]).write_parquet(staged / "part-00000.parquet")
        commit_artifact(
            run.store,
            staged,
            "iteration_000001/rollouts",
            digest="0" * 64,
            schema_version=SCHEMA_VERSION,
            rows=2 * sampled,
            seconds=1.0,
            metrics={},
        )
    (folder / "runs" / "run" / "policies").mkdir()
    (folder / "runs" / "run" / "policies" / "000001.manifest.json").write_text("")


CASES: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "a target": (4, ("after1",), ("the target FOLDER/after1.png of the prompt 'make it blue' changed",)),
    "a source": (4, ("before1",), ("the image FOLDER/before1.png of the prompt 'make it blue' changed",)),
    "several": (
        4,
        ("after3", "before0", "before2"),
        (
            "the target FOLDER/after3.png of the prompt 'a circle' changed",
            "the image FOLDER/before0.png of the prompt 'make it red' changed",
            "the image FOLDER/before2.png of the prompt 'make it red' changed",
        ),
    ),
    "one that was not sampled": (2, ("after3",), ()),
    "one of two, of which one was not sampled": (2, ("before0",), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changed(tmp_path: Path, case: str) -> None:
    sampled, changed, named = CASES[case]
    write(tmp_path)
    train(tmp_path, sampled)
    assert changed_run(config(tmp_path)) is None
    for name in changed:
        change(tmp_path / f"{name}.png")
    found = changed_run(config(tmp_path))
    assert found is not None
    kinds = {"after": "the target images", "before": "the images in prompts"}
    assert any(kinds[name.rstrip("0123456789")] in found.difference for name in changed)
    assert tuple(found.difference.split("; ")[1:]) == tuple(each.replace("FOLDER", str(tmp_path)) for each in named)


def test_without_its_rollouts_the_kind_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    train(tmp_path, 4)
    change(tmp_path / "after1.png")
    part = tmp_path / "runs/run/iteration_000001/rollouts/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    found = changed_run(config(tmp_path))
    assert found is not None
    assert found.difference.endswith("(data) changed: the target images")
    assert not (tmp_path / "runs" / "run" / "quarantine").exists()


def test_many_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.pipeline.changes._SHOWN", 2)
    write(tmp_path)
    train(tmp_path, 4)
    for index in range(4):
        change(tmp_path / f"after{index}.png")
    found = changed_run(config(tmp_path))
    assert found is not None
    assert found.difference.count(".png of the prompt") == 2
    assert found.difference.endswith("; 2 more images changed")
