"""Checks of what files of this machine tell, before torch and Prefect are imported and before a server starts."""

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from configs.prompts import DataSection, DatasetSection
from configs.schema import RewardsFile, RunConfig
from flows.preflight.prompts import PromptFiles, check_prompts, read_prompt_files
from flows.preflight.rewards import check_rewards, reward_problems
from grpo_core.errors import InputError, raise_all
from grpo_core.policies.protocol import policy_family
from grpo_core.rewards.registry import build_reward
from tasks.models.initial import local_source
from tasks.models.reachable_hub import leave_unreachable_hub
from tasks.prompts.files import find_files
from tasks.prompts.formats import ENDINGS
from tasks.prompts.hub_datasets import DatasetChoice, names_dataset
from tasks.runs.trust import uses_of
from tasks.storage.artifacts.store import open_store
from tasks.storage.files import is_local, require_writable

A = TypeVar("A")
R = TypeVar("R")


def checked_once(check: Callable[[A], R], keep: Callable[[R], bool] = lambda result: True) -> Callable[[A], R]:
    """Keep the result of a check for this object, so that a flow gets what the command line has checked before it."""
    last: ContextVar[tuple[A, R] | None] = ContextVar(check.__name__, default=None)

    @functools.wraps(check)
    def checked(argument: A) -> R:
        known = last.get()
        if known is not None and known[0] is argument:
            return known[1]
        result = check(argument)
        if keep(result):
            last.set((argument, result))
        return result

    return checked


read_files = checked_once(read_prompt_files, keep=lambda files: not files.problems)
"""Read the prompt files of a configuration; what can be used is read once."""


def refuse_missing_files(config: RunConfig) -> None:
    """Refuse a missing model's folder, prompt file or function's file, and a run's folder with links out of it."""
    problems = list(_missing_model(config))
    for place, dataset in config.datasets:
        if "://" in dataset.prompts or _is_dataset(dataset):
            continue
        try:
            for file in find_files(dataset.prompts, place=f"{place}.prompts", endings=ENDINGS)[:1]:
                file.open().close()
        except InputError as error:
            problems.append(error)
    for use in uses_of(config):
        if use.file is not None and use.is_missing:
            hint = f"There is no file {use.file}. Give its path, from where grpo is started."
            problems.append(InputError(use.place, use.value, hint))
    try:
        open_store(config.storage, config.run.name).refuse_links()
    except InputError as error:
        problems.append(error)
    raise_all(problems)


def prepare_hub(config: RunConfig) -> None:
    """If the model or a dataset has the name of one on the Hugging Face hub, find out whether the hub answers."""
    datasets = [dataset.prompts for _, dataset in config.datasets if _is_dataset(dataset)]
    if not all(Path(name).expanduser().exists() for name in (config.policy.model, *datasets)):
        leave_unreachable_hub()


def check_files(config: RunConfig, *, storage: bool = True) -> None:
    """Check the prompts with their targets, what rewards need of them and of their own files, and the storage root.

    Nothing is written, and no library of models is imported. `storage` is false for a stored configuration, whose root
    may be another machine's. An InputError has an entry for each problem.
    """
    prepare_hub(config)
    files = read_files(config)
    checks = (check_prompts, check_rewards, *((check_storage,) if storage else ()))
    raise_all([*_missing_model(config), *(problem for check in checks for problem in check(config, files))])


def require_heldout(config: RunConfig) -> None:
    """Raise InputError if a run that is to be evaluated has no held-out prompts."""
    if not config.evaluate.sets:
        hint = f"{config.run.name} has no held-out prompts (evaluate.prompts); name a file of them."
        raise InputError("--prompts", None, hint)


def check_heldout_files(config: RunConfig) -> None:
    """Check what an evaluation needs of the same files; raises as check_files."""
    require_heldout(config)
    check_files(config.model_copy(update={"data": DataSection()}), storage=False)


def check_reward_files(file: RewardsFile) -> None:
    """Check what a file's rewards need of this machine; their settings are checked with the runs that are scored."""
    problems: list[InputError] = []
    for index, section in enumerate(file.rewards):
        try:
            reward = build_reward(section.reward, section.settings)
        except InputError:
            continue
        problems += reward_problems(f"rewards.{index}", section, reward)
    raise_all(problems)


def check_storage(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report a storage root that cannot be opened, or a folder of this machine that cannot be written."""
    try:
        store = open_store(config.storage, config.run.name)
        if is_local(store.filesystem):
            require_writable(Path(store.path()), "storage.root")
    except InputError as error:
        yield InputError(error.place, config.storage.root, error.hint)


def _is_dataset(dataset: DatasetSection) -> bool:
    choice = DatasetChoice(dataset.split, dataset.subset, dataset.revision, dataset.streaming)
    return names_dataset(dataset.prompts, choice)


def _missing_model(config: RunConfig) -> Iterator[InputError]:
    try:
        policy_family(config.policy.kind).refuse_missing(local_source(config.policy.model, config.policy.revision))
    except InputError as error:
        yield error
