"""A run folder of somebody hostile: every setting that is marked as used is bait, and a listener that notices."""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from configs.rollouts import VllmSection
from configs.schema import RunConfig
from grpo_core.rewards.registry import REWARDS, reward_class
from grpo_core.rewards.reward import Reward
from grpo_core.uses import Uses, declared_uses, settings_fields
from tasks.storage.files import dump_checked, load_checked
from tests.flows.conftest import Runs

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
    """What hostile settings name.

    Attributes:
        url: of a listener on loopback.
        trace: file that is there once code or a command has run; folders beside it once something was written there.
        module: Python file with the function `evil`.
        met: the first bytes of each connection to the listener.
    """

    url: str
    trace: Path
    module: Path
    met: list[bytes] = field(default_factory=list)

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
    """Return a run's configuration with bait in every marked setting that it can have.

    Args:
        server: of vLLM, of a run of texts: `url` or `command`; empty for none.
    """
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


def sent_by_a_stranger(runs: Runs, run: str, values: Mapping[str, Any]) -> None:
    """Replace a run's configuration."""
    change_config(runs.path(run=run), lambda own: (own.clear(), own.update(json.loads(json.dumps(values)))))
