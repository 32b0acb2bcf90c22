"""`grpo init`: a folder with a commented configuration for one's own prompts, rewards and model."""

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from pydantic import Field
from typer import Argument, Option

from configs.validation import NAME_PATTERN, Section
from grpo_core.errors import InputError, joined, raise_all
from grpo_core.policies.pipeline_files import find_model_file
from tasks.process import CHECKOUT

Kind = Literal["image", "diffusers", "text", "vision"]

CONFIGS = CHECKOUT / "configs" / "init"
"""The commented configurations, by kind; their numbers are those for a model of full size."""

_SMALL = {
    "run.iterations": "20",
    "policy.dtype": "float32",
    "policy.gradient_checkpointing": "false",
    "rollout.prompts_per_batch": "8",
    "update.micro_batch_size": "32",
}
_SMALL_ADAPTER = {"policy.rank": "16", "policy.alpha": "32.0"}
_SMALL_IMAGE = {"rollout.height": "64", "rollout.width": "64", "rollout.guidance_scale": "1.0"}

SHIPPED: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        "image": {
            **_SMALL,
            **_SMALL_ADAPTER,
            **_SMALL_IMAGE,
            "policy.model": "data/models/tiny-glm-image",
            "rollout.num_inference_steps": "4",
            "rollout.temperature": "1.0",
            "update.learning_rate": "1.0e-3",
        },
        "diffusers": {
            **_SMALL,
            **_SMALL_ADAPTER,
            **_SMALL_IMAGE,
            "policy.model": "data/models/tiny-sd3",
            # The length that the model was trained with.
            "rollout.max_sequence_length": "14",
            "rollout.num_inference_steps": "8",
            "rollout.sde_window_size": "3",
            "rollout.sde_window_range": "[0, 3]",
            "update.learning_rate": "5.0e-4",
        },
        "text": {
            **_SMALL,
            "policy.model": "data/models/tiny-text",
            "policy.lora": "null",
            "rollout.max_completion_length": "24",
            "update.learning_rate": "5.0e-4",
        },
        "vision": {
            **_SMALL,
            "policy.model": "data/models/tiny-vision",
            "policy.lora": "null",
            "rollout.max_completion_length": "6",
            "update.learning_rate": "1.0e-3",
        },
    }
)
"""What each configuration has for the shipped model of its kind instead: YAML by section and key."""

EXAMPLES = CHECKOUT / "data" / "init-examples"
"""Prompts, held-out prompts and a reward function of each kind, which are copied where none are given."""

_EXAMPLES: Mapping[Kind, str] = MappingProxyType({kind: kind for kind in get_args(Kind)} | {"diffusers": "image"})
_FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {"image": "middle_colour", "text": "sorted_letters", "vision": "near_the_box"}
)

MAX_COMPLETION_LENGTH = 256
"""Length of a completion if the model has room for it and for a prompt as long."""

OWN = "own"
CONFIG, PROMPTS, HELDOUT, REWARD = "config.yaml", "prompts", "heldout", "reward.py"


class InitRequest(Section):
    """A folder with a commented configuration, and examples of what was not given."""

    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="folder to write, new or empty")
    kind: Kind = Field(
        "image",
        description="of the model: image, GLM-Image; diffusers, a text-to-image pipeline of diffusers; text, a "
        "language model; vision, a language model that reads images",
    )
    prompts: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="your prompts; by default a file with examples"
    )
    targets: Annotated[str | None, Option(metavar="FOLDER")] = Field(
        None,
        min_length=1,
        description="your target images, for rewards such as r2: 0.png, 1.png, ... in the order of the prompts",
    )
    heldout: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="your held-out prompts, which are not trained on; sampled before and after"
    )
    heldout_targets: Annotated[str | None, Option(metavar="FOLDER")] = Field(
        None, min_length=1, description="the target images of your held-out prompts, named as those of --targets"
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


def write_folder(request: InitRequest) -> tuple[list[Path], tuple[str, ...]]:
    """Write the folder.

    Returns:
        Its files, and what a person should know about the prompts.

    Raises:
        InputError: something that was given cannot be used, and nothing is left behind; or the model does not take
            defaults of the configuration, which is left to be changed.
    """
    folder = Path(request.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", request.folder, "It is there and not empty; name a new folder.")
    raise_all([*_target_problems(request), *_heldout_problems(request)])
    files = _files(request, folder)
    # The first folder that does not exist yet.
    made = next((each for each in reversed((folder, *folder.parents)) if not each.exists()), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        notes = _check(request, folder / CONFIG)
    except UnfitDefaultsError:
        raise
    except BaseException as error:
        for path in files:
            path.unlink(missing_ok=True)
        for subfolder in {path.parent for path in files} - {folder}:
            shutil.rmtree(subfolder, ignore_errors=True)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError("DIR", request.folder, f"It cannot be written ({error}); name another.") from error
        raise
    return list(files), notes


def _target_problems(request: InitRequest) -> Iterator[InputError]:
    for targets, option, prompts, of in (
        (request.targets, "--targets", request.prompts, "--prompts"),
        (request.heldout_targets, "--heldout-targets", request.heldout, "--heldout"),
    ):
        if targets is not None and request.kind in ("text", "vision"):
            yield InputError(option, targets, "A language model draws no images; leave it out.")
        elif targets is not None and prompts is None:
            yield InputError(option, targets, f"Give the {of} that they belong to.")


def _heldout_problems(request: InitRequest) -> Iterator[InputError]:
    """Report held-out prompts that are the training prompts; one data set may have a split for each."""
    given = [Path(each).expanduser() for each in (request.prompts, request.heldout) if each is not None]
    if len(given) == 2 and all(each.is_file() for each in given) and given[0].samefile(given[1]):
        hint = "It is the file of --prompts too; give prompts that are not trained on, or leave it out."
        yield InputError("--heldout", request.heldout, hint)


class UnfitDefaultsError(InputError):
    """The model that was given does not take some of the defaults."""


_WRITTEN_FROM: Mapping[str, str] = MappingProxyType(
    {
        "data.prompts": "prompts",
        "data.targets": "targets",
        "evaluate.prompts": "heldout",
        "evaluate.targets": "heldout_targets",
        "policy.model": "model",
        "rewards.0": "reward",
    }
)
"""Key of the configuration -> the option that it is written from."""


def _with_option(request: InitRequest, error: InputError) -> InputError:
    """Name the option that was given in the place of the key that is written from it."""
    place, value, hint = error.place, error.value, error.hint
    for key, name in _WRITTEN_FROM.items():
        given, option = getattr(request, name), f"--{name.replace('_', '-')}"
        hint = re.sub(rf"\b{key}\b(?!\.)", option, hint)
        if given in (None, OWN):
            continue
        if key == "rewards.0" and place.startswith(f"{key}."):
            # That of a function repeats what was given.
            place, value, hint = option, given, hint.rpartition(f"got {given!r}. ")[2]
        elif re.match(rf"{key}(?![\w.])", place):
            place = place.replace(key, option, 1)
    return InputError(place, value, hint)


def _check(request: InitRequest, config: Path) -> tuple[str, ...]:
    """Return what a person should know about the inputs.

    Raises:
        UnfitDefaultsError: only defaults have to be changed.
        InputError: something that was given cannot be used.
    """
    # Models' libraries are imported here, and wrong options are reported before.
    from configs.loader import read_config
    from flows.preflight.inputs import run_checks

    try:
        return run_checks(read_config(config)).notes
    except InputError as error:
        if not all(each.place.startswith(("rollout.", "evaluate.num_", "update.")) for each in error.errors):
            raise joined(_with_option(request, each) for each in error.errors) from error
        hint = f"It is a default; change it in {config}, which has been written."
        first, *more = [(each.place, each.value, f"{each.hint} {hint}") for each in error.errors]
        raise UnfitDefaultsError(*first, more) from error


def _files(request: InitRequest, folder: Path) -> Mapping[Path, bytes]:
    """Return the content of each file that is written."""
    examples = EXAMPLES / _EXAMPLES[request.kind]
    files = {folder / CONFIG: _config(request, folder).encode()}
    for path in sorted(each for each in examples.rglob("*") if each.is_file()):
        if _needs_example(request, path):
            files[folder / path.relative_to(examples)] = path.read_bytes()
    return files


def _needs_example(request: InitRequest, path: Path) -> bool:
    """Whether nothing was given in the place of an example's file."""
    if path.name == REWARD:
        return request.reward == OWN
    return request.prompts is None and (path.stem != HELDOUT or request.heldout is None)


def _example(kind: Kind, stem: str) -> str:
    """Return the name of an example's file."""
    (path,) = (EXAMPLES / _EXAMPLES[kind]).glob(f"{stem}.*")
    return path.name


def _config(request: InitRequest, folder: Path) -> str:
    shipped, place = SHIPPED[request.kind], request.folder.rstrip("/")
    name, model = folder.resolve().name, shipped["policy.model"]
    tiny = request.model is None or Path(request.model).expanduser().resolve() == CHECKOUT / model
    example = f"{place}/{REWARD}:{_FUNCTIONS[_EXAMPLES[request.kind]]}"
    function = example if request.reward == OWN else request.reward
    reward = f"function\n    settings: {{function: {_quoted(function)}}}"
    values = {
        **(shipped if tiny else {}),
        "run.name": _quoted(name if re.fullmatch(NAME_PATTERN, name) else "mine"),
        "policy.model": _quoted(request.model or _shipped(model)),
        "data.prompts": _quoted(request.prompts or f"{place}/{_example(request.kind, PROMPTS)}"),
        "rewards.reward": reward if ":" in function else _quoted(request.reward),
    }
    if request.kind in ("text", "vision") and not tiny and (room := _context(request.model)) is not None:
        values["rollout.max_completion_length"] = str(min(MAX_COMPLETION_LENGTH, room // 2))
    heldout = request.heldout or (f"{place}/{_example(request.kind, HELDOUT)}" if request.prompts is None else None)
    given = {"evaluate.prompts": heldout, "data.targets": request.targets, "evaluate.targets": request.heldout_targets}
    values |= {key: _quoted(value) for key, value in given.items() if value is not None}
    text = (CONFIGS / f"{request.kind}.yaml").read_text(encoding="utf-8")
    text = fill(text.replace(CONFIG, shlex.quote(str(folder / CONFIG))), values)
    if heldout is not None:
        return text
    # Nothing is held out of prompts that were given alone.
    rest, section, below = text.partition("evaluate:\n")
    return rest + "".join(f"# {line}\n" for line in (section + below).splitlines())


def _context(model: str | None) -> int | None:
    """Return how many ids a language model of this machine reads and writes together; None if that is not known."""
    file = None if model is None else find_model_file(model, "config.json")
    try:
        config = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        room = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        # The check of what was written reports it.
        return None
    return room if isinstance(room, int) and room > 1 else None


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
