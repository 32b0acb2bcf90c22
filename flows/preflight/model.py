"""The model: whether its files are there, and whether it can do what the configuration asks for."""

from collections.abc import Iterator, Sequence

from configs.schema import RunConfig
from flows.preflight.prompts import PromptFiles, first_sizes, sizes_of
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.seeds import derive_seed
from tasks.models.files import local_source
from tasks.models.initial import initial_digest
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import PromptSet
from tasks.runs.stored import adapter_version
from tasks.storage.artifacts.store import open_store


def check(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report missing files, settings that the model cannot sample with, and sizes that it cannot generate."""
    family = policy_family(config.policy.kind)
    try:
        family.refuse_missing(source_of(config))
        family.refuse_unusable(source_of(config), config.rollout)
        _refuse_evaluation(config)
    except InputError as error:
        yield error
        return
    yield from _size_problems(config, prompts)


def _refuse_evaluation(config: RunConfig) -> None:
    """Raise InputError if the model cannot sample held-out prompts with the settings that only they have."""
    try:
        policy_family(config.policy.kind).refuse_unusable(source_of(config), config.evaluation_rollout)
    except InputError as error:
        field = error.place.removeprefix("rollout.")
        own = getattr(config.evaluate, field, None) is not None
        raise InputError(f"evaluate.{field}" if own else error.place, error.value, error.hint) from error


def _size_problems(config: RunConfig, prompts: PromptFiles) -> list[InputError]:
    """Return an error for each size that the model cannot generate, with the nearest that it can."""
    refuse = policy_family(config.policy.kind).refuse_unusable
    source = source_of(config)
    problems = []
    for size, where in sizes_of(config, prompts, prompts.sets):
        try:
            refuse(source, config.rollout.model_copy(update=size._asdict()))
        except InputError as error:
            problems.append(InputError(where, str(size), error.hint))
    return first_sizes(problems)


def refuse_prompt_texts(config: RunConfig, sets: Sequence[PromptSet]) -> None:
    """Raise InputError when the model cannot read one of the prompts; only its tokenizer is loaded."""
    family = policy_family(config.policy.kind)
    texts = [prompt.text for each in sets for prompt in each.prompts]
    family.refuse_prompts(source_of(config), config.rollout, texts)


def trained_model(config: RunConfig) -> ModelSpec:
    """Describe the model that a run trains; a hub name may be downloaded.

    Raises:
        InputError: its files, or those of its adapter, cannot be found.
    """
    adapter = adapter_version(config)
    return ModelSpec(
        section=config.policy,
        digest=initial_digest(config.policy, open_store(config.storage, config.run.name), adapter),
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        references=config.references,
        adapter=adapter,
    )


def source_of(config: RunConfig) -> str:
    """Return the folder or hub name that the model is loaded from."""
    return local_source(config.policy.model, config.policy.revision)
