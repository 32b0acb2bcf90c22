"""A first look for the files that a configuration names; a typo is reported before torch and Prefect are imported."""

from configs.schema import RunConfig
from flows.preflight.trust import uses_of
from grpo_core.errors import InputError, raise_all
from grpo_core.policies.protocol import policy_family
from tasks.models.initial import local_source
from tasks.prompts.files import find_files
from tasks.prompts.formats import ENDINGS
from tasks.prompts.read import DatasetChoice, names_dataset
from tasks.storage.artifacts.store import open_store


def refuse_missing_files(config: RunConfig) -> None:
    """Refuse a model's folder, a prompt file or a function's file of this machine that is not there.

    So is a run's folder with links that lead out of it.

    Raises:
        InputError: with one entry per problem.
    """
    problems = []
    try:
        policy_family(config.policy.kind).refuse_missing(local_source(config.policy.model, config.policy.revision))
    except InputError as error:
        problems.append(error)
    for place, dataset in config.datasets:
        choice = DatasetChoice(dataset.split, dataset.subset, dataset.revision, dataset.streaming)
        if "://" in dataset.prompts or names_dataset(dataset.prompts, choice):
            continue
        try:
            for file in find_files(dataset.prompts, place=f"{place}.prompts", endings=ENDINGS)[:1]:
                file.open().close()
        except InputError as error:
            problems.append(error)
    for use in uses_of(config):
        if use.is_missing:
            hint = f"There is no file {use.file}. Give its path, from where grpo is started."
            problems.append(InputError(use.place, use.value, hint))
    try:
        open_store(config.storage, config.run.name).refuse_links()
    except InputError as error:
        problems.append(error)
    raise_all(problems)
