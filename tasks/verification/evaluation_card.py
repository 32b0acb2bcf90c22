"""How an exported policy was evaluated, with all that repeating it needs: evaluation.json beside the weights.

The images of its prompts, sources and targets, are files named by their sha256 in the folder `evaluation`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PositiveInt, ValidationError, model_validator

from configs.schema import RunConfig
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from tasks.prompts.read import name_prompts
from tasks.reports.compared_runs import written_setting
from tasks.reports.report import Fact
from tasks.reports.text import counted
from tasks.storage.files import read_bounded
from tasks.verification.records import Machine

EVALUATION_FILE, IMAGES_FOLDER = "evaluation.json", "evaluation"
MAX_BYTES = 64 * 2**20  # of a file that is read; some hundred thousand samples

_LETTERS = 12
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# The squares of larger ones are not finite.
Value = Annotated[float, Field(ge=-1e150, le=1e150)]


class CardPrompt(BaseModel):
    """One held-out prompt; messages are JSON, as a run stores them.

    Attributes:
        columns: the prompt file's other columns.
        sources, target: sha256 of the images in the prompt, in their order, and of its target image.
        width, height: of its images; None for texts.
    """

    model_config = _STRICT

    prompt_id: str
    dataset: str
    prompt: str
    columns: dict[str, JsonValue]
    sources: tuple[Sha256, ...] = ()
    target: Sha256 | None = None
    width: PositiveInt | None = None
    height: PositiveInt | None = None


class CardDataset(BaseModel):
    """A file of held-out prompts: the name of the set and of the file, and the sha256 of its prompts here."""

    model_config = _STRICT

    name: str
    file: str
    prompts: int
    digest: Sha256


class CardScore(BaseModel):
    """A held-out score.

    Attributes:
        label: of the reward; of the mean of the mix, `reward`.
        mean: over the samples that have the score.
        low, high: ends of the 95 % interval of the mean over prompts; None with fewer than two.
        provenance: reward, version, settings and sha256 of the weights that the scores come from; None for the mix.
        values: of each sample; empty where only the mean is stated.
    """

    model_config = _STRICT

    label: str
    role: Literal["mix", "reward", "guardrail"]
    mean: float | None
    low: float | None
    high: float | None
    provenance: JsonValue = None
    values: tuple[Value | None, ...] = ()

    @property
    def title(self) -> str:
        """The label; that of a guardrail says so, since a reward may have the same."""
        return f"{self.label} (guardrail)" if self.role == "guardrail" else self.label


class CardSettings(BaseModel):
    """The sections of the configuration that determine an evaluation, as plain values.

    Attributes:
        rollout: of held-out samples.
        seed, samples_per_prompt: of the section `evaluate`.
        torch_threads: of the section `placement`: with another number a CPU rounds otherwise.
    """

    model_config = _STRICT

    policy: dict[str, JsonValue]
    rollout: dict[str, JsonValue]
    rewards: list[JsonValue]
    guardrails: dict[str, JsonValue]
    advantages: dict[str, JsonValue]
    seed: int
    samples_per_prompt: PositiveInt
    torch_threads: PositiveInt


class EvaluationCard(BaseModel):
    """How a policy version was evaluated.

    Attributes:
        policy_digest: sha256 of the version's weights in the run; `weights` are those of the exported files by name.
        merged: whether these are a model; False: adapters of the base `settings.policy.model`.
        base_digest: of the base's files; None where it covers an adapter that training started from too.
        machine: code and packages that the run recorded at its last start; `fingerprints` of the code of its stages.
        samples: ids of the samples, in the order of the scores' values.
        scores: of this version; `before` of the policy that training started from, empty if it was not evaluated.
        without_prompts: whether prompts and images were left out on purpose.
        missing: images that were not found when the policy was exported.
    """

    model_config = _STRICT

    format: Literal[1] = 1
    run: str
    version: int
    policy_digest: Sha256
    weights: dict[str, Sha256]
    merged: bool
    base_digest: str | None
    settings: CardSettings
    machine: Machine
    fingerprints: dict[str, str]
    datasets: tuple[CardDataset, ...]
    prompts: tuple[CardPrompt, ...]
    samples: tuple[str, ...]
    scores: tuple[CardScore, ...]
    before: tuple[CardScore, ...] = ()
    without_prompts: bool = False
    missing: tuple[Sha256, ...] = ()

    @model_validator(mode="after")
    def _score_every_sample(self) -> Self:
        if any(len(score.values) != len(self.samples) for score in self.scores):
            raise ValueError("a score has another number of values than there are samples")
        return self

    @model_validator(mode="after")
    def _describe_every_dataset(self) -> Self:
        if self.prompts and sorted(each.name for each in self.datasets) != sorted(
            {each.dataset for each in self.prompts}
        ):
            raise ValueError("its datasets are not those of its prompts")
        return self


def read_card(folder: Path) -> EvaluationCard:
    """Read the card of an exported folder; InputError if there is none, or it is not what an export writes."""
    from fsspec.implementations.local import LocalFileSystem

    file = folder / EVALUATION_FILE
    again = "Export the policy again: `grpo export RUN DIR`."
    if not file.is_file():
        hint = f"It has no {EVALUATION_FILE}, which an export of an evaluated policy has. {again}"
        raise InputError("EXPORT", str(folder), hint)
    try:
        return EvaluationCard.model_validate_json(read_bounded(LocalFileSystem(), str(file), MAX_BYTES))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{file}, {place}".rstrip(", "), first["msg"], f"No export wrote it. {again}") from error
    except OSError as error:
        raise InputError(str(file), error.strerror, again) from error


def settings_of(config: RunConfig) -> CardSettings:
    """Return what determines a run's evaluations, without its prompts."""
    dumped = config.model_dump(mode="json", include={"policy", "rewards", "guardrails", "advantages"})
    rollout = config.evaluation_rollout.model_dump(mode="json")
    evaluate = config.evaluate
    return CardSettings(
        **dumped,
        rollout=rollout,
        seed=evaluate.seed,
        samples_per_prompt=evaluate.samples_per_prompt,
        torch_threads=config.placement.torch_threads,
    )


def describe_datasets(prompts: Iterable[CardPrompt], files: Mapping[str, str]) -> tuple[CardDataset, ...]:
    """Count and digest the prompts of each set; `files` names each set's file."""
    sets: dict[str, list[CardPrompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return tuple(
        CardDataset(name=name, file=files.get(name, name), prompts=len(found), digest=prompts_digest(found))
        for name, found in sets.items()
    )


def prompts_digest(prompts: Sequence[CardPrompt]) -> str:
    """Return the sha256 of prompts with their columns, images and sizes."""
    described = [each.model_dump(mode="json", exclude={"dataset"}) for each in prompts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def changed_prompts(card: EvaluationCard) -> list[str]:
    """Name the prompts that are not those that the card's own names and digests are of, as sentences."""
    found = []
    for dataset in card.datasets:
        prompts = [each for each in card.prompts if each.dataset == dataset.name]
        names = name_prompts((each.prompt, *each.sources) for each in prompts)
        found += [
            f"prompt {each.prompt_id} of {dataset.name} has another text or other images than when it was named"
            for each, name in zip(prompts, names, strict=True)
            if each.prompt_id != name
        ]
        if prompts_digest(prompts) != dataset.digest:
            found.append(f"the prompts of {dataset.name} are not those of its sha256 {dataset.digest[:_LETTERS]}")
    return found


def evaluation_facts(card: EvaluationCard, config: RunConfig) -> list[Fact]:
    """Return how a version was evaluated: prompts, seeds, sampling, and what each score comes from."""
    rollout = config.evaluation_rollout
    sampling = {name: each for name, each in rollout.result_settings().items() if name not in rollout.training_settings}
    settings = ", ".join(f"{name} {written_setting(each)}" for name, each in sampling.items() if each is not None)
    sections = {(section.label, "reward"): section for section in config.rewards}
    return [
        *(
            ("held-out prompts", f"{each.file}: {counted(each.prompts, 'prompt')}, sha256 {each.digest[:_LETTERS]}")
            for each in card.datasets
        ),
        ("samples per prompt", f"{card.settings.samples_per_prompt}, seed {card.settings.seed}"),
        ("sampling", settings),
        *(
            (each.title, _origin(each, sections.get((each.label, each.role))))
            for each in card.scores
            if each.role != "mix"
        ),
    ]


def _origin(score: CardScore, section: RewardSection | None) -> str:
    known = score.provenance if isinstance(score.provenance, dict) else {}
    said = [f"{name} {known[name]}" for name in ("reward", "version") if name in known]
    weights = known.get("weights")
    files = weights.items() if isinstance(weights, dict) else ()
    said += [f"{file} sha256 {str(digest)[:_LETTERS]}" for file, digest in files]
    return ", ".join([*said, *([f"weight {section.weight:g}"] if section is not None else [])])
