"""Write the folder of `grpo init`, and check the result as a run would, so that it trains as it is."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.validation import NAME_PATTERN, Section
from flows.init.templates import CONFIGS, EXAMPLE_HELDOUT, EXAMPLE_PROMPTS, EXAMPLE_REWARD, MODALITIES, SHIPPED, Kind
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT

OWN = "own"
CONFIG, PROMPTS, HELDOUT, REWARD = "config.yaml", "prompts.txt", "heldout.txt", "reward.py"


class InitRequest(Section):
    """A folder with a commented configuration, and examples of what was not given."""

    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="folder to write, new or empty")
    kind: Kind = Field(
        "image",
        description="of the model: image, GLM-Image; diffusers, a text-to-image pipeline of diffusers; text, a "
        "language model",
    )
    prompts: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="your prompts; by default a file with examples"
    )
    targets: Annotated[str | None, Option(metavar="FOLDER")] = Field(
        None, min_length=1, description="your target images, for rewards such as r2: one per prompt, in order"
    )
    reward: Annotated[str, Option(metavar="NAME")] = Field(
        OWN,
        min_length=1,
        description="a reward of `grpo rewards list`, your function as FILE.py:NAME, or own: one in DIR/reward.py",
    )
    model: Annotated[str | None, Option(metavar="MODEL")] = Field(
        None, min_length=1, description="folder of a model, or hub name; by default the shipped tiny model"
    )

    @property
    def asks_for_nothing(self) -> bool:
        """Whether only the folder is given."""
        return self == InitRequest(folder=self.folder)


def write_folder(request: InitRequest) -> list[Path]:
    """Write the folder and return its files.

    Raises:
        InputError: something that was given cannot be used; nothing is left behind.
    """
    folder = Path(request.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", request.folder, "It is there and not empty; name a new folder.")
    if request.targets is not None and request.prompts is None:
        raise InputError("--targets", request.targets, "Give the --prompts that they belong to.")
    if request.targets is not None and request.kind == "text":
        raise InputError("--targets", request.targets, "A language model draws no images; leave it out.")
    files = _files(request, folder)
    # The first folder that does not exist yet.
    made = next((each for each in reversed((folder, *folder.parents)) if not each.exists()), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        _check(folder / CONFIG)
    except BaseException as error:
        for path in files:
            path.unlink(missing_ok=True)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError("DIR", request.folder, f"It cannot be written ({error}); name another.") from error
        raise
    return list(files)


def _check(config: Path) -> None:
    # Models' libraries are imported here, and wrong options are reported before.
    from configs.loader import read_config
    from flows.preflight.inputs import run_checks

    run_checks(read_config(config))


def _files(request: InitRequest, folder: Path) -> Mapping[Path, str]:
    files, modality = {folder / CONFIG: _config(request, folder)}, MODALITIES[request.kind]
    if request.prompts is None:
        files[folder / PROMPTS] = "\n".join(EXAMPLE_PROMPTS[modality]) + "\n"
        files[folder / HELDOUT] = "\n".join(EXAMPLE_HELDOUT[modality]) + "\n"
    if request.reward == OWN:
        files[folder / REWARD] = EXAMPLE_REWARD[modality]
    return files


def _config(request: InitRequest, folder: Path) -> str:
    shipped, place = SHIPPED[request.kind], request.folder.rstrip("/")
    name, model = folder.resolve().name, shipped["policy.model"]
    tiny = request.model is None or Path(request.model).expanduser().resolve() == CHECKOUT / model
    function = f"{place}/{REWARD}:reward" if request.reward == OWN else request.reward
    reward = f"function\n    name: mine\n    settings: {{function: {_quoted(function)}}}"
    values = {
        **(shipped if tiny else {}),
        "run.name": _quoted(name if re.fullmatch(NAME_PATTERN, name) else "mine"),
        "policy.model": _quoted(request.model or _shipped(model)),
        "data.prompts": _quoted(request.prompts or f"{place}/{PROMPTS}"),
        "rewards.reward": reward if ":" in function else _quoted(request.reward),
    }
    if request.prompts is None:
        values["evaluate.prompts"] = _quoted(f"{place}/{HELDOUT}")
    if request.targets is not None:
        values["data.targets"] = _quoted(request.targets)
    text = (CONFIGS / f"{request.kind}.yaml").read_text(encoding="utf-8")
    text = fill(text.replace(CONFIG, str(folder / CONFIG)), values)
    if request.prompts is None:
        return text
    # Nothing is held out of prompts that were given.
    rest, section, below = text.partition("evaluate:\n")
    return rest + "".join(f"# {line}\n" for line in (section + below).splitlines())


_SETTING = re.compile(r"(?P<start> *(?:# |- )?(?P<key>\w+): )(?P<value>.*?)(?P<comment> +#.*)?")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Give settings of a configuration other values; comments stay.

    Args:
        text: YAML, with each setting on a line of its own. One that is commented out becomes a setting.
        values: YAML by section and key, such as `policy.rank`; it replaces all that is below the key.
    """
    lines, section, replaced, left = [], "", math.inf, dict(values)
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if depth > replaced:
            continue
        section, replaced = section if depth else line.partition(":")[0], math.inf
        found = _SETTING.fullmatch(line)
        if found and (value := left.pop(f"{section}.{found['key']}", None)) is not None:
            line, replaced = f"{found['start'].replace('# ', '')}{value}{found['comment'] or ''}", depth
        lines.append(line)
    assert not left, f"the configuration has no {', '.join(left)}"
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Write a text as YAML, which reads JSON's quotes."""
    return json.dumps(value, ensure_ascii=False)


def _shipped(model: str) -> str:
    """Return the path of a shipped model: relative where the working directory is the checkout, as in its files."""
    return model if os.path.samefile(CHECKOUT, Path.cwd()) else str(CHECKOUT / model)
