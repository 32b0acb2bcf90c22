"""Each command refuses a run with a link that leads out of it, before any work, and leaves its end alone."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from flows import evaluate, replay, rescore, train
from flows.compare_runs import compare
from flows.export.plan import plan_export
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs
from flows.pipeline.requests import ExportRequest, SampleRequest
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.rewards.analyse import analyse_rewards
from flows.sample import open_source
from tasks.runs.frames import open_run
from tasks.storage.links import LinkError
from tests.flows.conftest import TINY, Runs, refused
from tests.flows.pruning.conftest import tree

COMMANDS: Mapping[str, Callable[[str, str], object]] = {
    "train": lambda run, root: train(TINY, overrides={"run.name": run, "storage.root": root}, progress=False),
    "prune": lambda run, root: prune(PruneRequest(sources=(run,), root=root, policies_last=1)),
    "inspect": lambda run, root: inspect_run(run, root=root),
    "evaluate": lambda run, root: evaluate(run, root=root, progress=False),
    "rescore": lambda run, root: rescore(run, rewards=[{"reward": "ssim"}], name="again", root=root, progress=False),
    "replay": lambda run, root: replay(run, root=root, progress=False),
    "compare": lambda run, root: compare([run, run], root=root),
    "export": lambda run, root: plan_export(ExportRequest(run=run, root=root, folder="exported")),
    "sample": lambda run, root: open_source(SampleRequest(source=run, prompts=("a cup",), root=root)),
    "rewards analyse": lambda run, root: analyse_rewards(run, root=root),
    "open_run": lambda run, root: open_run(run, root=root).metrics(),
}
NAMES = (
    *(".calls", ".stages", ".incoming", ".lock", "quarantine", "config.yaml", "run.json", "starts.jsonl"),
    *("policies/000002", "iteration_000001", "iteration_000001/rollouts/part-00000.parquet", "tensorboard", ""),
)


def put_link(runs: Runs, outside: Path, name: str) -> Path:
    """Move what has this name in the run out of it, or make a folder with an old file there, and link to it."""
    outside.mkdir()
    place, end = runs.path(name), outside / "end"
    if place.exists():
        place.rename(end)
    else:
        end.mkdir()
        (end / "old.json").touch()
        os.utime(end / "old.json", (0, 0))
    place.symlink_to(end)
    return place


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_a_link(finished: Runs, tmp_path: Path, command: str) -> None:
    place = put_link(finished, tmp_path / "outside", "policies/000002")
    before = tree(tmp_path)
    # A comparison names the run twice.
    error, *_ = refused(lambda: COMMANDS[command]("run", str(finished.root)))
    assert (error.place, error.value) == (str(place), str(tmp_path / "outside" / "end"))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_link_anywhere_in_a_run_is_refused(finished: Runs, tmp_path: Path, name: str) -> None:
    place = put_link(finished, tmp_path / "outside", name)
    before = tree(tmp_path)
    for command in ("prune", "inspect"):
        (error,) = refused(lambda command=command: COMMANDS[command]("run", str(finished.root)))  # type: ignore[misc]
        assert (type(error), error.place) == (LinkError, str(place))
    (listed,) = list_runs(str(finished.root))
    assert listed.state in ("finished", "refused")
    assert tree(tmp_path) == before


def test_a_root_that_is_a_link_is_a_root(finished: Runs, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(finished.root)
    (listed,) = list_runs(str(link))
    assert (listed.run, listed.state) == ("run", "finished")
    (link / "latest").symlink_to("run")
    assert (
        inspect_run("latest", root=str(link)).run.policy_digest == inspect_run("run", root=str(link)).run.policy_digest
    )


def test_the_list_names_a_refused_run_among_the_others(finished: Runs, tmp_path: Path) -> None:
    finished.path(run="elsewhere").symlink_to(tmp_path)
    found = {each.run: each for each in list_runs(str(finished.root))}
    assert {name: each.state for name, each in found.items()} == {"run": "finished", "elsewhere": "refused"}
    assert str(tmp_path) in (found["elsewhere"].problem or "")


def test_a_run_is_pruned_next_to_one_with_a_link(finished: Runs, tmp_path: Path) -> None:
    """Pruning looks in all runs for what they start from."""
    other = finished.path(run="other")
    (other / "policies").mkdir(parents=True)
    (other / "config.yaml").symlink_to(tmp_path / "secrets.yaml")
    (tmp_path / "secrets.yaml").write_text("\nreplay: {source: run, policy: 1}\nrun: {iterations: 9}\n")
    summary = prune(PruneRequest(sources=("run",), root=str(finished.root), policies_last=1))
    assert summary.bytes > 0
