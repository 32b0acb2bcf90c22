"""A first look for the files that a configuration names; a typo is reported before torch and Prefect are imported."""

from configs.schema import RunConfig
from configs.sections import PromptsSection
from grpo_core.errors import InputError, InputErrors
from grpo_core.policies.protocol import policy_family
from tasks.models.files import local_source
from tasks.prompts.files import find_files
from tasks.prompts.formats import ENDINGS
from tasks.prompts.hub import DatasetChoice, names_dataset


def refuse_missing_files(config: RunConfig) -> None:
    """Refuse a model's folder or a prompt file of this machine that does not exist or cannot be opened.

    Raises:
        InputErrors: with one entry per problem.
    """
    problems = []
    try:
        policy_family(config.policy.kind).refuse_missing(local_source(config.policy.model, config.policy.revision))
    except InputError as error:
        problems.append(error)
    sections: dict[str, PromptsSection] = {"data": config.data, "evaluate": config.evaluate}
    for place, section in sections.items():
        for index, dataset in enumerate(section.sets):
            choice = DatasetChoice(dataset.split, dataset.subset, dataset.revision, dataset.streaming)
            if "://" in dataset.prompts or names_dataset(dataset.prompts, choice):
                continue
            own = f"{place}.datasets.{index}" if section.datasets else place
            try:
                for file in find_files(dataset.prompts, place=f"{own}.prompts", endings=ENDINGS)[:1]:
                    file.open().close()
            except InputError as error:
                problems.append(error)
    if problems:
        raise InputErrors(problems)
