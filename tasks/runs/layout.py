"""The names in a run folder: paths for what writes there, parsers for what reads. No other module contains them.

iteration_000001/rollouts, rewards/<label>, advantages     stages of an iteration; artifacts
iteration_000001/rollouts/part-00000.parquet               a row per sample; one file per shard, and so of the next two
iteration_000001/rollouts/images-00000.parquet             its images
iteration_000001/rollouts/states/part-00000-00000.safetensors   latents of noisy denoising steps, which an update reads
iteration_000001/round_02/...                              the same for its second sampling round
iteration_000001/previews/...                              rollouts, rewards and advantages of a round's previews
iteration_000001/metrics.parquet
policies/000001/<stream>                                   what an update made of each component; an artifact
evaluations/000001/..., guardrails/<label>                 held-out prompts, sampled by version 1
evaluations_of/<prompts>/000001/...                        the same with other prompts or settings
rescored/<name>/iteration_000001/...                       other rewards over stored rollouts
sources/<sha256>                                           an image in prompts, as the file that it was
trackers.json, tensorboard                                 what trackers call the run; TensorBoard's logs
vllm.log                                                   what the vLLM server of the run wrote

Beside them the storage keeps `quarantine/` (damaged and replaced files) and `.incoming/` (unfinished files):
tasks/storage/artifacts/run_folder.py. What an earlier configuration made is another run: `NAME~1`, `NAME~2`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tasks.storage.artifacts.reference import ArtifactRef

ROLLOUTS, REWARDS, ADVANTAGES, UPDATE, GUARDRAILS = "rollouts", "rewards", "advantages", "update", "guardrails"
STAGES = (ROLLOUTS, REWARDS, ADVANTAGES, UPDATE)  # in their order; the artifact of the update is a policy

PREVIEWS = "previews"
PREVIEW_STAGES = tuple(f"{PREVIEWS}/{stage}" for stage in (ROLLOUTS, REWARDS, ADVANTAGES))
"""The stages that choose the seeds of a sampling round, each with its place in the round's folder."""

PART_FILE, IMAGES_FILE = "part-{:05d}.parquet", "images-{:05d}.parquet"
STATES_FILE = "states/part-{:05d}-{:05d}.safetensors"
"""Files of an artifact of rollouts, by the number of the shard; the states of one may need several."""
PARTS, IMAGES, STATES = "part-*.parquet", "images-*.parquet", "states/part-*.safetensors"
"""Patterns of these files. Only rewards and reports read images, and only an update reads states."""

REWARD_COLUMN, ADVANTAGE_COLUMN = "rewards/", "advantages/"
"""Prefixes of columns of joined samples: single rewards, followed by a label; advantages, followed by a stream."""

EXTRA_FILE, EXTRA_COLUMN = "extra/columns.parquet", "extra/"
"""Beside a table of scores: what its function reported about samples (TRL's `log_extra`); prefix of these columns."""

SCORES_FILE, ADVANTAGES_FILE = "scores.parquet", "advantages.parquet"
STATE_FILE = "training_state.json"
POLICIES, EVALUATIONS, OTHER_EVALUATIONS = "policies", "evaluations", "evaluations_of"
RESCORED, ANALYSIS = "rescored", "analysis"
STORED, RECOMPUTED = "stored", "recomputed"
"""Names of advantages that are no rescoring: those of the run, and those computed again from its rewards."""

SOURCES = "sources"  # folder of the images in prompts
LOCKED_APART = (f"{RESCORED}/*", f"{EVALUATIONS}/*", f"{OTHER_EVALUATIONS}/*/*")  # locked without the run

Baseline = Literal["blank", "target"]
"""Images that no policy made, among the evaluations: in the colour of the target's background, and the target."""

BASELINES: tuple[Baseline, ...] = get_args(Baseline)

REWARDS_FILE = "rewards.yaml"  # in a rescoring's folder: the rewards that it was made with, as JSON, which is YAML too

REPORT_PAGE, REPORT_FILE = "report.html", "report.json"
CONTACT_SHEET, HELDOUT_TEXTS = "contact_sheet.png", "heldout.md"
SIGNS_FILE = "guardrails.json"

TRACKERS_FILE, TENSORBOARD = "trackers.json", "tensorboard"
"""What each tracker calls the run, and the iteration that it was last given; the folder of TensorBoard's logs."""

VLLM_LOG = "vllm.log"  # what the vLLM server that the run has started wrote, of all its starts

_ITERATION, _ROUND = re.compile(r"iteration_(\d{6,})"), re.compile(r"round_(\d{2,})")


def iteration_folder(iteration: int) -> str:
    """Return the folder of an iteration and of its first sampling round."""
    return f"iteration_{iteration:06d}"


def round_folder(iteration: int, sampling_round: int) -> str:
    """Return the folder of a sampling round, from 1; the first is the iteration's own."""
    folder = iteration_folder(iteration)
    return folder if sampling_round == 1 else f"{folder}/round_{sampling_round:02d}"


def previews_folder(folder: str) -> str:
    """Return the folder of a sampling round's previews."""
    return f"{folder}/{PREVIEWS}"


def is_previews(folder: str) -> bool:
    """Return whether it is the folder of a sampling round's previews."""
    return folder.endswith(f"/{PREVIEWS}")


def metrics_file(iteration: int) -> str:
    """Return the table of an iteration's metrics."""
    return f"{iteration_folder(iteration)}/metrics.parquet"


def policy_folder(version: int) -> str:
    """Return the artifact of a policy version."""
    return f"{POLICIES}/{version:06d}"


def source_file(digest: str) -> str:
    """Return the file of an image in prompts, by its sha256."""
    return f"{SOURCES}/{digest}"


def evaluation_folder(version: int, others: str | None = None) -> str:
    """Return the folder of a policy version's evaluation; `others` names prompts or settings that are not the run's."""
    return f"{EVALUATIONS if others is None else f'{OTHER_EVALUATIONS}/{others}'}/{version:06d}"


def is_evaluation(folder: str) -> bool:
    """Return whether a folder of the run is one of held-out samples, or of baselines."""
    return folder.partition("/")[0] in (EVALUATIONS, OTHER_EVALUATIONS)


def baseline_folder(baseline: Baseline) -> str:
    """Return the folder of images that no policy made, scored as the held-out samples are."""
    return f"{EVALUATIONS}/{baseline}"


def rescoring_folder(name: str, folder: str = "") -> str:
    """Return a rescoring's folder, or within it the counterpart of a folder of the run."""
    return f"{RESCORED}/{name}/{folder}".rstrip("/")


def stage_folder(artifact: str) -> str:
    """Return the folder that an artifact's stage shares with the other stages of its sampling round."""
    return artifact.rsplit("/", 1)[0]


def parse_iteration(name: str) -> int | None:
    """Return the number of an iteration's folder; None for any other name."""
    found = _ITERATION.fullmatch(name)
    return int(found[1]) if found else None


def is_later_round(name: str) -> bool:
    """Return whether a name in an iteration's folder is that of a sampling round after the first."""
    return _ROUND.fullmatch(name) is not None


def is_result(name: str) -> bool:
    """Return whether a name in a run folder is a result of the run, not a file that a person put there."""
    results = (POLICIES, EVALUATIONS, OTHER_EVALUATIONS, RESCORED, TRACKERS_FILE, TENSORBOARD)
    return parse_iteration(name) is not None or name in results


@dataclass(frozen=True)
class SamplingRound:
    """One collection of rollouts, with a table of scores by reward label; each has a row per sample."""

    rollouts: ArtifactRef
    rewards: Mapping[str, ArtifactRef]
    previews: "StoredEvaluation | None" = None  # what has chosen their seeds

    @property
    def stages(self) -> tuple[ArtifactRef, ...]:
        """All artifacts, rollouts first."""
        return (self.rollouts, *self.rewards.values())


@dataclass(frozen=True)
class StoredIteration:
    """One stored iteration, every file verified."""

    number: int
    rounds: tuple[SamplingRound, ...]  # the sampling rounds that the advantages cover
    advantages: ArtifactRef
    samplers: frozenset[tuple[int, str]]  # version and digest of the policies that sampled the rows

    def staleness(self, version: int) -> int:
        """Return the fewest versions between a row's policy and a policy that is trained on the rows."""
        return min(abs(version - sampler) for sampler, _ in self.samplers)


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation, or a round's previews, every file verified; rewards and guardrails are tables by label."""

    rollouts: ArtifactRef
    advantages: ArtifactRef
    rewards: Mapping[str, ArtifactRef]
    guardrails: Mapping[str, ArtifactRef]
