"""Every command, given a run whose every marked setting is bait: nothing runs, connects, writes or is sent."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from configs.schema import RunConfig
from flows import evaluate, replay, rescore, train
from flows.compare_runs import compare
from flows.export.plan import plan_export
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs, write_list_page
from flows.pipeline.requests import ExportRequest, SampleRequest
from flows.preflight.trust import EVALUATED, OF_MODEL
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.rewards.analyse import analyse_rewards
from flows.sample import open_source
from flows.watch_run import RunWatch
from grpo_core.errors import InputError
from grpo_core.uses import Uses, declared_uses
from tasks.runs.frames import open_run
from tasks.runs.lookup import find_run
from tasks.runs.stored import stored_config
from tasks.runs.trust import uses_of
from tests.configs.test_uses import SETTINGS
from tests.flows.conftest import TINY, Runs
from tests.flows.stranger import SECRET, Bait, bait, lay, sent_by_a_stranger

VALUE = "sk-0123456789-of-the-reader"
ALL = ("run", *EVALUATED, "data", "update", "advantages")

ASKING: Mapping[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "evaluate": (lambda root: evaluate("run", root=root, progress=False), EVALUATED),
    "replay": (lambda root: replay("run", root=root, progress=False), ALL),
    "rewards analyse": (lambda root: analyse_rewards("run", root=root), ("rewards",)),
    "export": (lambda root: plan_export(ExportRequest(run="run", root=root, folder=f"{root}-x")), OF_MODEL),
    "sample": (lambda root: open_source(SampleRequest(source="run", prompts=("a cup",), root=root)), OF_MODEL),
}
"""What asks, with the sections that it uses."""

READING: Mapping[str, Callable[[str], object]] = {
    "list": lambda root: write_list_page(root, list_runs(root), Path(f"{root}-list.html")),
    "inspect": lambda root: inspect_run("run", root=root, html=Path(f"{root}-run.html")),
    "watch": lambda root: RunWatch(find_run("run", root)).page(),
    "compare": lambda root: compare(["run", "other"], root=root, html=Path(f"{root}-compare.html")),
    "prune": lambda root: prune(PruneRequest(sources=("run",), root=root, policies_last=1)),
    "open_run": lambda root: (open_run("run", root=root).metrics(), open_run("run", root=root).config()),
}


@pytest.fixture
def laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bait]:
    monkeypatch.setenv(SECRET, VALUE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with bait(tmp_path / "bait") as found:
        yield found


def stranger(runs: Runs, laid: Bait, *, server: str = "") -> RunConfig:
    """Make the finished run a stranger's."""
    own = stored_config(find_run("run", str(runs.root)))
    sent_by_a_stranger(runs, "run", lay(own, laid, server=server))
    shutil.copytree(runs.path(), runs.path(run="other"))
    return stored_config(find_run("run", str(runs.root)))


def asked_of(command: Callable[[str], object], root: str) -> dict[str, InputError]:
    with pytest.raises(InputError) as caught:
        command(root)
    return {error.place: error for error in caught.value.errors}


def required(config: RunConfig, sections: tuple[str, ...]) -> set[str]:
    return {f"run/config.yaml, {use.place}" for use in uses_of(config, within=sections)}


def test_no_command_uses_what_a_run_of_images_names(finished: Runs, laid: Bait) -> None:
    config, root = stranger(finished, laid), str(finished.root)
    assert config.storage.root != f"{laid.url}/root"
    for command in READING.values():
        command(root)
    for name, (command, sections) in ASKING.items():
        assert asked_of(command, root).keys() == required(config, sections), name
    # The person's own configuration starts from its policy, or scores its samples, and names nothing of the rest.
    rescore("run", rewards=[{"reward": "jpeg"}], name="mine", root=root, progress=False)
    for key, start in (("run.continue_from", "run@2"), ("policy.adapter", "run@2")):
        own = {
            "run.name": "mine",
            "storage.root": root,
            "run.iterations": 1,
            key: start,
            "policy.model": "absent/model",
        }
        with pytest.raises(InputError):
            train(TINY, overrides=own, progress=False)
    assert laid.traces() == []


@pytest.mark.parametrize("by", ["url", "command"])
def test_no_command_uses_what_a_run_of_texts_names(
    text_run: Runs, laid: Bait, by: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config, root = stranger(text_run, laid, server=by), str(text_run.root)
    for command in READING.values():
        command(root)
    for name, (command, sections) in ASKING.items():
        asked = asked_of(command, root)
        assert asked.keys() == required(config, sections), name
        assert not any(VALUE in str(error) for error in asked.values())
    assert f"run/config.yaml, rollout.vllm.{by}" in asked_of(ASKING["evaluate"][0], root)
    assert laid.traces() == []
    assert VALUE not in "".join(capfd.readouterr())


def test_the_bait_covers_every_mark(laid: Bait, finished: Runs, text_run: Runs) -> None:
    """A setting that is marked tomorrow is bait, too."""
    found: set[tuple[str, Uses]] = set()
    for runs, servers in ((finished, ("",)), (text_run, ("url", "command"))):
        own = stored_config(find_run("run", str(runs.root)))
        for server in servers:
            sent_by_a_stranger(runs, "run", lay(own, laid, server=server))
            uses = uses_of(stored_config(find_run("run", str(runs.root))))
            found |= {(use.place.rpartition(".")[2], use.use) for use in uses}
    quiet = (Uses.NOTHING, Uses.ARGUMENTS, Uses.ROOT, Uses.OF_REWARD)
    marked = {(name, use) for kind in SETTINGS for name, use in declared_uses(kind).items() if use not in quiet}
    # That of a replay, which is no setting of the run that is read.
    assert marked - found == {("source", Uses.PLACE)}


def test_what_was_agreed_to_is_used(finished: Runs, laid: Bait) -> None:
    """The bait is live: with consent the code runs and the listener hears."""
    stranger(finished, laid)
    with pytest.raises(InputError):
        analyse_rewards("run", root=str(finished.root), repeats=2, trust_code=True)
    assert laid.trace.exists()
    assert laid.met


CONTROL = "\x1b[2K\rtrusted\u202e"


def test_what_is_asked_is_shown_whole_and_with_its_control_characters(finished: Runs, laid: Bait) -> None:
    hidden = f"{laid.url}/{CONTROL}{'x' * 1000}/end"
    values = lay(stored_config(find_run("run", str(finished.root))), laid)
    sent_by_a_stranger(finished, "run", values | {"data": {**values["data"], "prompts": hidden}})
    message = str(asked_of(ASKING["replay"][0], str(finished.root))["run/config.yaml, data.prompts"])
    assert message.isprintable()
    assert f"{'x' * 1000}/end" in message


@pytest.fixture(scope="module")
def text_source(undisturbed: object, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("texts"))
    runs.start_text(
        run="run",
        run__iterations=2,
        rollout__prompts_per_iteration=2,
        rollout__group_size=4,
        update__minibatch_size=8,
        evaluate__limit=2,
    )
    return runs


@pytest.fixture
def text_run(text_source: Runs, tmp_path: Path) -> Runs:
    return text_source.copied_to(tmp_path / "texts")
