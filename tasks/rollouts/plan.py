"""Plan what a sampling round or an evaluation samples: prompts, sample ids and seeds."""

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import derive_seed
from tasks.prompts.curriculum import DrawnPrompt
from tasks.runs.layout import evaluation_folder, previews_folder, round_folder


class KeptSeed(NamedTuple):
    """A seed that its preview has chosen."""

    sibling: int  # index among the previews of the prompt
    reward: float | None  # of the preview, which says nothing of the full image's; None: it could not be scored
    rank: float | None  # among the previews of the prompt: 1 is the best, and equal ones share their mean rank


class GroupPlan(BaseModel):
    """One prompt occurrence; its siblings are a group."""

    model_config = ConfigDict(frozen=True)

    group_id: str  # unique in the run
    prompt_id: str  # the prompt's stable name
    dataset: str
    prompt: str
    columns: dict[str, object]  # the prompt file's other columns
    target_uri: str | None
    target_sha256: str | None
    size: ImageSize | None = None  # of the images; None for texts
    sources: tuple[str, ...] = ()  # digests of the images in the prompt, in their order
    # The seeds that previews have chosen; empty: all of the group. Plans without previews do not mention them.
    kept: tuple[KeptSeed, ...] = Field((), exclude_if=operator.not_)


class Place(NamedTuple):
    """Place of a sample in its group: the token sample that it is made from, and which image of that it is."""

    token_sample: int
    image_number: int


class RolloutPlan(BaseModel):
    """Everything that one sampling round, or one evaluation, samples."""

    model_config = ConfigDict(frozen=True)

    folder: str  # folder of its stages in the run
    title: str  # name in logs and in Prefect's UI
    iteration: int  # of the training; for an evaluation the version of the policy, which that iteration made
    seed: int  # every sample's seed is derived from it and from the group id and the sibling's index
    group_size: int  # samples per group
    shared_noise: bool  # whether siblings share the decoder's first noise
    # In the order in which they are sampled: those of one image size together, the largest first.
    groups: tuple[GroupPlan, ...]
    images_of_samples: tuple[int, ...] = ()  # how many images each token sample of a group gets; empty: one each
    # Index of the first noisy denoising step, the same for all groups, since the steps of one window are compared;
    # None: no noisy steps.
    window_start: int | None = None

    @model_validator(mode="after")
    def _require_every_sample(self) -> Self:
        if self.images_of_samples and sum(self.images_of_samples) != self.group_size:
            raise ValueError("the images of all token samples are the samples of a group")
        return self

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each sample of a group."""
        counts = self.images_of_samples or (1,) * self.group_size
        return tuple(Place(sample, image) for sample, count in enumerate(counts) for image in range(count))

    def siblings(self, group: GroupPlan) -> Sequence[int]:
        """Return the index of each sample of a group, from which its seeds and its name are made."""
        return [each.sibling for each in group.kept] or range(self.group_size)

    def previews(self, per_prompt: int) -> Self:
        """Return the plan of a group's first so many seeds, without noisy steps: each image is the one of its noise."""
        change = {
            "folder": previews_folder(self.folder),
            "title": f"{self.title}, previews",
            "group_size": per_prompt,
            "images_of_samples": (per_prompt,),
            "window_start": None,
        }
        return self.model_copy(update=change)

    @property
    def named_sources(self) -> dict[str, str]:
        """The digests of the images in its prompts, each with the first prompt that has it."""
        found: dict[str, str] = {}
        for group in self.groups:
            for digest in group.sources:
                found.setdefault(digest, f"prompt {group.prompt_id}")
        return found

    def request(self, group: GroupPlan, sources: Mapping[str, SourceImage] | None = None) -> GroupRequest:
        """Return the ids and seeds of a group's samples; images of a token sample have one token seed."""
        places = self.places
        samples = self.siblings(group)
        noise = [0 if self.shared_noise else sample for sample in samples]
        steps = samples if self.window_start is not None else ()
        return GroupRequest(
            prompt=group.prompt,
            sample_ids=self.sample_ids(group),
            seeds=tuple(derive_seed(self.seed, "tokens", group.group_id, place.token_sample) for place in places),
            noise_seeds=tuple(derive_seed(self.seed, "noise", group.group_id, index) for index in noise),
            step_seeds=tuple(derive_seed(self.seed, "step", group.group_id, sample) for sample in steps),
            size=group.size,
            window_start=self.window_start,
            sources=tuple((sources or {})[digest] for digest in group.sources),
        )

    def sample_ids(self, group: GroupPlan) -> tuple[str, ...]:
        """Return the name of each sample of a group."""
        names = [f"s{sample:02d}" for sample in self.siblings(group)]
        if len(self.images_of_samples) > 1:
            names = [f"s{place.token_sample:02d}.r{place.image_number:02d}" for place in self.places]
        return tuple(f"{group.group_id}.{name}" for name in names)


def _groups(prompts: Mapping[str, DrawnPrompt]) -> tuple[GroupPlan, ...]:
    """Plan a group per prompt, by its group id, in the order of RolloutPlan."""
    groups = [
        GroupPlan(
            group_id=group_id,
            prompt_id=drawn.prompt.prompt_id,
            dataset=drawn.dataset,
            prompt=drawn.prompt.text,
            columns=dict(drawn.prompt.columns),
            target_uri=drawn.target.uri if drawn.target else None,
            target_sha256=drawn.target.sha256 if drawn.target else None,
            size=drawn.size,
            sources=tuple(source.digest for source in drawn.prompt.sources),
        )
        for group_id, drawn in prompts.items()
    ]
    # Memory that runs out then does so in the first batch.
    return tuple(sorted(groups, key=_sampling_order))


def _sampling_order(group: GroupPlan) -> tuple[object, ...]:
    """Put large images first, and what is sampled at once together; texts stay in their order."""
    return (-group.size.pixels, group.size, -len(group.sources)) if group.size else (0,)


def plan_round(
    prompts: Sequence[DrawnPrompt],
    *,
    seed: int,
    iteration: int,
    sampling_round: int,
    images_of_samples: Sequence[int],
    shared_noise: bool,
    window_start: int | None,
) -> RolloutPlan:
    """Plan one sampling round of a training iteration; later rounds replace groups without spread.

    There is one group per prompt; the other arguments are fields of the plan.
    """
    first = sampling_round == 1
    name = f"i{iteration:06d}" if first else f"i{iteration:06d}.d{sampling_round:02d}"
    return RolloutPlan(
        folder=round_folder(iteration, sampling_round),
        title=f"iteration {iteration}" if first else f"iteration {iteration}, round {sampling_round}",
        iteration=iteration,
        seed=seed,
        group_size=sum(images_of_samples),
        shared_noise=shared_noise,
        images_of_samples=tuple(images_of_samples) if set(images_of_samples) != {1} else (),
        window_start=window_start,
        groups=_groups({f"{name}.p{place:04d}": prompt for place, prompt in enumerate(prompts)}),
    )


def plan_evaluation(
    prompts: Sequence[DrawnPrompt], *, seed: int, version: int, samples_per_prompt: int, shared_noise: bool
) -> RolloutPlan:
    """Plan the held-out groups, without noisy steps, with the same ids and seeds for every policy version."""
    return RolloutPlan(
        folder=evaluation_folder(version),
        title=f"evaluation of policy {version}",
        iteration=version,
        seed=seed,
        group_size=samples_per_prompt,
        shared_noise=shared_noise,
        groups=_groups({f"heldout.p{index:04d}": prompt for index, prompt in enumerate(prompts)}),
    )
