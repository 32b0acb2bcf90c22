"""Write the folder of `grpo init`, and check the result as a run would, so that it trains as it is."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.validation import NAME_PATTERN, Section
from flows.init import templates
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT

OWN = "own"
CONFIG, PROMPTS, HELDOUT, REWARD = "config.yaml", "prompts.txt", "heldout.txt", "reward.py"


class InitRequest(Section):
    """A folder with a commented configuration, and examples of what was not given."""

    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="folder to write, new or empty")
    kind: templates.Kind = Field(
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
        InputError, InputErrors: something that was given cannot be used; nothing is left behind.
    """
    folder = Path(request.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", request.folder, "It is there and not empty; name a new folder.")
    if request.targets is not None and request.prompts is None:
        raise InputError("--targets", request.targets, "Give the --prompts that they belong to.")
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
    files, modality = {folder / CONFIG: _config(request, folder)}, templates.MODALITIES[request.kind]
    if request.prompts is None:
        files[folder / PROMPTS] = "\n".join(templates.PROMPTS[modality]) + "\n"
        files[folder / HELDOUT] = "\n".join(templates.HELDOUT[modality]) + "\n"
    if request.reward == OWN:
        files[folder / REWARD] = templates.REWARD[modality]
    return files


def _config(request: InitRequest, folder: Path) -> str:
    shipped, adapted = CHECKOUT / templates.TINY[request.kind], templates.MODALITIES[request.kind] == "image"
    tiny = request.model is None or Path(request.model).expanduser().resolve() == shipped
    name, function = folder.resolve().name, request.reward if ":" in request.reward else None
    if request.reward == OWN:
        function = f"{request.folder.rstrip('/')}/{REWARD}:reward"
    lora = templates.LORA.format(
        rank=16 if tiny else 32, alpha=32.0 if tiny else 64.0, checkpointing="false" if tiny else "true"
    )
    heldout = templates.EVALUATE.format(prompts=_quoted(f"{request.folder.rstrip('/')}/{HELDOUT}"))
    return templates.CONFIG.format(
        file=folder / CONFIG,
        name=_quoted(name if re.fullmatch(NAME_PATTERN, name) else "mine"),
        iterations=20 if tiny else 200,
        kind=templates.POLICIES[request.kind],
        model=_quoted(request.model or _shipped(templates.TINY[request.kind])),
        dtype="float32" if tiny else "bfloat16",
        lora=lora if adapted or not tiny else "  lora: null                # trains every weight\n",
        prompts=_quoted(request.prompts or f"{request.folder.rstrip('/')}/{PROMPTS}"),
        targets=templates.TARGETS.format(folder=_quoted(request.targets)) if request.targets is not None else "",
        batch=8 if tiny else 4,
        sampling=templates.SAMPLING[request.kind, tiny],
        reward="function" if function else _quoted(request.reward),
        settings=templates.SETTINGS.format(function=_quoted(function)) if function else "",
        learning_rate=templates.LEARNING_RATES[request.kind, tiny],
        kl_coef=templates.KL_COEFS[request.kind],
        rows=64,
        micro=32 if tiny else 4,
        evaluate=heldout if request.prompts is None else templates.NO_EVALUATE,
    )


def _quoted(value: str) -> str:
    """Write a text as YAML, which reads JSON's quotes."""
    return json.dumps(value, ensure_ascii=False)


def _shipped(model: str) -> str:
    """Return the path of a shipped model: relative where the working directory is the checkout, as in its files."""
    return model if os.path.samefile(CHECKOUT, Path.cwd()) else str(CHECKOUT / model)
