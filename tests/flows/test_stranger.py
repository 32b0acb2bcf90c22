"""Every command, given a run whose every marked setting is bait: nothing runs, connects, writes or is sent."""

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from configs.rollouts import VllmSection
from configs.schema import RunConfig
from flows import evaluate, replay, rescore, train
from flows.compare_runs import compare
from flows.export.plan import plan_export
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs, write_list_page
from flows.preflight.trust import EVALUATED, OF_MODEL
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.requests import ExportRequest, SampleRequest
from flows.rewards.analyse import analyse_rewards
from flows.sample import open_source
from flows.watch_run import RunWatch
from grpo_core.errors import InputError
from grpo_core.rewards.registry import REWARDS, reward_class
from grpo_core.rewards.reward import Reward
from grpo_core.uses import Uses, declared_uses, settings_fields
from tasks.runs.frames import open_run
from tasks.runs.lookup import find_run
from tasks.runs.stored import stored_config
from tasks.runs.trust import uses_of
from tasks.storage.files import dump_checked, load_checked
from tests.configs.test_uses import SETTINGS
from tests.flows.conftest import TINY, Runs, Start

SECRET = "STRANGERS_WISH"
"""The environment variable that the run asks for."""

_EVIL = """
import pathlib
pathlib.Path({trace!r}).touch()


def evil(*_, **__):
    return []
"""


@dataclass
class Bait:
    """What hostile settings name."""

    url: str
    trace: Path
    """A file that is there once code or a command has run; folders beside it once something was written there."""
    module: Path
    met: list[bytes] = field(default_factory=list)
    """The first bytes of each connection to the listener."""

    def value(self, use: Uses, kind: Any) -> Any:
        """Return bait for a setting of this annotation."""
        values = {
            Uses.CODE: f"{self.module}:evil",
            Uses.ARGUMENTS: {"x": 1},
            Uses.COMMAND: f"touch {self.trace}",
            Uses.ADDRESS: self.url,
            Uses.VARIABLE: SECRET,
            Uses.PLACE: f"{self.url}/place.json",
            Uses.FOLDER: f"{self.url}/images",
            Uses.WRITTEN: f"{self.trace}-written",
            Uses.ROOT: f"{self.url}/root",
        }
        text = str(kind)
        if use is Uses.ARGUMENTS and "bool" in text and "Mapping" not in text:
            return False
        return [values[use]] if use is Uses.ADDRESS and text.startswith("typing.Annotated[tuple") else values[use]

    def settings(self, kind: type, *without: str) -> dict[str, Any]:
        """Return bait for every marked field of a settings class that is used."""
        kinds = settings_fields(kind)
        left_out = (Uses.NOTHING, Uses.OF_REWARD)
        return {
            name: self.value(use, kinds[name])
            for name, use in declared_uses(kind).items()
            if use not in left_out and name not in without
        }

    def traces(self) -> list[str]:
        """What was made, run or connected to."""
        return [*map(str, self.trace.parent.glob(f"{self.trace.name}*")), *map(repr, self.met)]


@contextmanager
def bait(folder: Path) -> Iterator[Bait]:
    """Lay bait in a folder, with a listener that notes every connection and answers nothing."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        laid = Bait(f"http://127.0.0.1:{listener.getsockname()[1]}", folder / "trace", folder / "evil.py")
        laid.module.write_text(_EVIL.format(trace=str(laid.trace)))

        def note() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5.0)
                    try:
                        laid.met.append(connection.recv(1000))
                    except OSError:
                        laid.met.append(b"")

        noting = threading.Thread(target=note, daemon=True)
        noting.start()
        try:
            yield laid
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            noting.join()


def lay(config: RunConfig, laid: Bait, *, server: str = "") -> dict[str, Any]:
    """Return a run's configuration with bait in every marked setting; of texts with a vLLM `url` or `command`."""
    values = _laid(config, laid)
    kind = "text" if server else "image"
    fitting = [name for name in REWARDS if kind in _media(reward_class(name))]
    baited = [
        {"reward": name, "name": name, "settings": settings}
        for name in fitting
        if (settings := laid.settings(reward_class(name)) | _REQUIRED.get(name, {}))
    ]
    values["rewards"] += [{**each, "weight": 0.0} for each in baited]
    values["guardrails"]["rewards"] = [{**each, "name": f"{each['name']}_guard"} for each in baited]
    # An adapter and low-rank matrices exclude each other.
    values["policy"]["lora"] = None
    if server:
        other = {"url": "command", "command": "url"}[server]
        values["rollout"] |= {"engine": "vllm", "vllm": laid.settings(VllmSection, other)}
    return values


def _media(kind: type[Reward]) -> tuple[str, ...]:
    """What a reward scores by its default settings, which some rewards refuse."""
    return object.__new__(kind).needs.media


_REQUIRED: Mapping[str, dict[str, Any]] = {
    "diversity": {"measure": "clip"},
    "judge": {"model": "m"},
    "remote": {"reward": "r", "reward_version": "1"},
}


def _laid(section: BaseModel, laid: Bait) -> dict[str, Any]:
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), BaseModel):
            values[name] = _laid(inner, laid)
    return values | laid.settings(type(section))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a run's folder says about the run, as whoever sends it can, checksums included."""
    values = yaml.safe_load((folder / "config.yaml").read_bytes())
    change(values)
    content = yaml.safe_dump(values).encode()
    (folder / "config.yaml").write_bytes(content)
    described = load_checked((folder / "run.json").read_bytes())
    (folder / "run.json").write_bytes(dump_checked({**described, "config_sha256": hashlib.sha256(content).hexdigest()}))


def sent_by_a_stranger(runs: Runs, values: Mapping[str, Any]) -> None:
    """Replace the run's configuration."""
    change_config(runs.path(), lambda own: (own.clear(), own.update(json.loads(json.dumps(values)))))


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
    sent_by_a_stranger(runs, lay(own, laid, server=server))
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
            sent_by_a_stranger(runs, lay(own, laid, server=server))
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
    sent_by_a_stranger(finished, values | {"data": {**values["data"], "prompts": hidden}})
    message = str(asked_of(ASKING["replay"][0], str(finished.root))["run/config.yaml, data.prompts"])
    assert message.isprintable()
    assert f"{'x' * 1000}/end" in message


@pytest.fixture
def text_run(evaluated_text: tuple[Runs, Start], tmp_path: Path) -> Runs:
    runs = Runs(tmp_path / "texts")
    shutil.copytree(evaluated_text[0].path(run="text"), runs.path())
    return runs
