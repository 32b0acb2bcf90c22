"""Write the folder of `grpo init`, and check it."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from flows.init.config_text import CONFIG, EXAMPLES, HELDOUT, REWARD, config_text
from flows.init.starting_point import Start
from flows.requests import OWN, InitRequest
from grpo_core.errors import InputError, joined, raise_all
from grpo_core.policies.protocol import policy_family


def write_folder(request: InitRequest) -> tuple[list[Path], tuple[str, ...]]:
    """Write the folder; return its files, and what a person should know about the prompts.

    Raises:
        InputError: something that was given cannot be used, and nothing is left behind; or the model does not take
            defaults of the configuration, which is left to be changed.
    """
    folder = Path(request.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", request.folder, "It is there and not empty; name a new folder.")
    start = Start.of(request)
    raise_all([*start.problems(), *_target_problems(request, start), *_heldout_problems(request)])
    files = _files(start, folder)
    # The first folder that does not exist yet.
    made = next((each for each in reversed((folder, *folder.parents)) if not each.exists()), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        notes = _check(start, folder / CONFIG)
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


def _target_problems(request: InitRequest, start: Start) -> Iterator[InputError]:
    for targets, option, prompts, of in (
        (request.targets, "--targets", request.prompts, "--prompts"),
        (request.heldout_targets, "--heldout-targets", request.heldout, "--heldout"),
    ):
        if targets is not None and policy_family(start.kind).modality == "text":
            yield InputError(option, targets, "A language model draws no images; leave it out.")
        elif targets is not None and prompts is None:
            yield InputError(option, targets, f"Give the {of} that they belong to.")
    if request.target_column is not None and request.prompts is None:
        yield InputError("--target-column", request.target_column, "Give the --prompts that have it.")


def _heldout_problems(request: InitRequest) -> Iterator[InputError]:
    """Report held-out prompts that are the training prompts; one data set may have a split for each."""
    given = [Path(each).expanduser() for each in (request.prompts, request.heldout) if each is not None]
    if len(given) == 2 and all(each.is_file() for each in given) and given[0].samefile(given[1]):
        hint = "It is the file of --prompts too; give prompts that are not trained on, or leave it out."
        yield InputError("--heldout", request.heldout, hint)


class UnfitDefaultsError(InputError):
    """The model that was given does not take some of the defaults."""


_WRITTEN_FROM: Mapping[str, str] = {
    "data.prompts": "prompts",
    "data.targets": "targets",
    "data.target_column": "target_column",
    "evaluate.prompts": "heldout",
    "evaluate.targets": "heldout_targets",
    "policy.model": "model",
    "rewards.0": "reward",
}
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


def _check(start: Start, config: Path) -> tuple[str, ...]:
    """Return what a person should know about the inputs; UnfitDefaultsError: only defaults have to be changed."""
    # Models' libraries are imported here, and wrong options are reported before.
    from configs.loader import read_config
    from flows.preflight.inputs import run_checks
    from flows.preflight.machine import describe_work

    notes: tuple[str, ...] = ()
    try:
        checked = read_config(config)
        notes = (f"from configs/{start.name}.yaml: {describe_work(checked)}",)
        return (*run_checks(checked).notes, *notes)
    except InputError as error:
        # What the rewards of a shipped file lack is brought before a start, which says so too.
        kept = ("rewards.", "guardrails.") if start.reward is None else ("guardrails.",)
        lacking = [each for each in error.errors if each.place.startswith(kept)]
        wrong = [each for each in error.errors if not each.place.startswith(kept)]
        if not wrong:
            return (*notes, *(f"before a start: {each}" for each in lacking))
        if not all(each.place.startswith(("rollout.", "evaluate.num_", "update.")) for each in wrong):
            raise joined(_with_option(start.request, each) for each in wrong) from error
        hint = f"It is a default; change it in {config}, which has been written."
        first, *more = [(each.place, each.value, f"{each.hint} {hint}") for each in wrong]
        raise UnfitDefaultsError(*first, more) from error


def _files(start: Start, folder: Path) -> Mapping[Path, bytes]:
    """Return the content of each file that is written: the configuration, and examples of what was not given."""
    request, examples = start.request, EXAMPLES / start.examples
    kept = request.prompts is not None or start.keeps_data
    left_out = {REWARD} if start.reward != OWN else set()
    left_out |= {HELDOUT} if request.heldout is not None else set()
    files = {folder / CONFIG: config_text(start, folder).encode()}
    for path in sorted(each for each in examples.rglob("*") if each.is_file()):
        if not {path.name, path.stem} & left_out and (path.name == REWARD or not kept):
            files[folder / path.relative_to(examples)] = path.read_bytes()
    return files
