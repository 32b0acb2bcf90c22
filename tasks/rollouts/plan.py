"""Plan what a sampling round or an evaluation samples: prompts, sample ids and seeds."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from grpo_core.collect import GroupRequest
from grpo_core.image_size import ImageSize
from grpo_core.seeds import derive_seed
from tasks.prompts.curriculum import DrawnPrompt
from tasks.runs.layout import evaluation_folder, round_folder


class GroupPlan(BaseModel):
    """One prompt occurrence; its siblings are a group.

    Attributes:
        group_id: unique in the run.
        prompt_id: the prompt's stable name.
        dataset: name of its prompt set.
        prompt: its text.
        columns: the prompt file's other columns.
        target_uri: the prompt's target image, if it has one.
        target_sha256: of that file.
        size: of the images; None for texts.
    """

    model_config = ConfigDict(frozen=True)

    group_id: str
    prompt_id: str
    dataset: str
    prompt: str
    columns: dict[str, object]
    target_uri: str | None
    target_sha256: str | None
    size: ImageSize | None = None


class RolloutPlan(BaseModel):
    """Everything that one sampling round, or one evaluation, samples.

    Attributes:
        folder: folder of its stages in the run.
        title: name in logs and in Prefect's UI.
        iteration: of the training; for an evaluation the version of the policy, which that iteration made.
        seed: every sample's seed is derived from it and from the group id and the sibling's index.
        group_size: samples per group.
        shared_noise: whether siblings share the decoder's noise.
        groups: in the order in which they are sampled: those of one image size together, the largest first.
    """

    model_config = ConfigDict(frozen=True)

    folder: str
    title: str
    iteration: int
    seed: int
    group_size: int
    shared_noise: bool
    groups: tuple[GroupPlan, ...]

    def request(self, group: GroupPlan) -> GroupRequest:
        """Return the ids and seeds of a group's samples."""
        siblings = range(self.group_size)
        noise = [0 if self.shared_noise else sibling for sibling in siblings]
        return GroupRequest(
            prompt=group.prompt,
            sample_ids=tuple(f"{group.group_id}.s{sibling:02d}" for sibling in siblings),
            seeds=tuple(derive_seed(self.seed, "tokens", group.group_id, sibling) for sibling in siblings),
            noise_seeds=tuple(derive_seed(self.seed, "noise", group.group_id, index) for index in noise),
            size=group.size,
        )


def _groups(prompts: Mapping[str, DrawnPrompt]) -> tuple[GroupPlan, ...]:
    """Plan a group per prompt, by its group id, in the order of RolloutPlan."""
    groups = [_group(group_id, prompt) for group_id, prompt in prompts.items()]
    # Memory that runs out then does so in the first batch.
    return tuple(sorted(groups, key=lambda group: (-group.size.pixels, group.size) if group.size else (0,)))


def _group(group_id: str, source: DrawnPrompt) -> GroupPlan:
    prompt, target = source.prompt, source.target
    return GroupPlan(
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        dataset=source.dataset,
        prompt=prompt.text,
        columns=dict(prompt.columns),
        target_uri=target.uri if target else None,
        target_sha256=target.sha256 if target else None,
        size=source.size,
    )


def plan_round(
    prompts: Sequence[DrawnPrompt],
    *,
    seed: int,
    iteration: int,
    sampling_round: int,
    group_size: int,
    shared_noise: bool,
) -> RolloutPlan:
    """Plan one sampling round of a training iteration; later rounds replace groups without spread.

    Args:
        prompts: one per group.
        shared_noise: whether siblings share the decoder's noise.
    """
    first = sampling_round == 1
    name = f"i{iteration:06d}"
    return RolloutPlan(
        folder=round_folder(iteration, sampling_round),
        title=f"iteration {iteration}" if first else f"iteration {iteration}, round {sampling_round}",
        iteration=iteration,
        seed=seed,
        group_size=group_size,
        shared_noise=shared_noise,
        groups=_groups(
            {
                f"{name}.p{place:04d}" if first else f"{name}.d{sampling_round:02d}.p{place:04d}": prompt
                for place, prompt in enumerate(prompts)
            }
        ),
    )


def plan_evaluation(
    prompts: Sequence[DrawnPrompt], *, seed: int, version: int, samples_per_prompt: int, shared_noise: bool
) -> RolloutPlan:
    """Plan the held-out groups: sample ids and seeds are the same for every policy version, so that samples pair up."""
    return RolloutPlan(
        folder=evaluation_folder(version),
        title=f"evaluation of policy {version}",
        iteration=version,
        seed=seed,
        group_size=samples_per_prompt,
        shared_noise=shared_noise,
        groups=_groups({f"heldout.p{index:04d}": prompt for index, prompt in enumerate(prompts)}),
    )
