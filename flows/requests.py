"""What commands are asked for: one model is the options in the terminal and the form in Prefect's UI.

Nothing that takes long to import is imported here: options are shown and checked at once.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.policy_name import FORM, PolicyName
from configs.validation import RUN_NAME_PATTERN, Name, Section
from configs.yaml_files import override_path
from grpo_core.errors import InputError, raise_all
from grpo_core.pipeline_files import PolicyKind

SET = "change one value, as section.key=value; ~section.key leaves one out"
Overrides = Annotated[tuple[str, ...], Option("--set", metavar="KEY=VALUE")]
Root = Annotated[
    str,
    Option(metavar="DIR"),
    Field(min_length=1, description="where runs are stored: a folder or any fsspec URL"),
]
Runs = Annotated[
    tuple[str, ...],
    Argument(metavar="RUN..."),
    Field(min_length=1, description="runs under the storage root, or paths of their folders"),
]
RunPolicy = Annotated[str, Argument(metavar=FORM)]
_VERSION = "@N for policy version N, @best for the one with the highest held-out reward"

MAX_STALENESS = 4
"""Versions; as many as systems allow that sample while they train (Fu et al., 2025, AReaL, arXiv:2505.24298)."""


Trust = Annotated[bool, Option("--trust-code")]
TRUST = "run, connect to, send and read what the run itself names, and remember it"

# The stored rollouts or an option of the command decide these.
_FIXED_IN_REPLAYS = {
    "data": "Prompts are those of the stored rollouts; leave it out.",
    "storage": "A replay is stored next to its source; name that root with --root.",
    "replay": "Give it as an option; see grpo replay --help.",
    "run.name": "Name the replay with --run.",
    "run.continue_from": "Name the source's policy to start from as RUN@N.",
    "run.iterations": "A replay makes one update for each of the source's --iterations.",
    "run.staleness": "A replay samples no rollouts; --max-staleness says how old the stored ones may be.",
    "advantages.max_rounds": "A replay samples no further rounds; leave it out.",
    "policy.kind": "The stored rollouts are of the source's model; leave it out.",
    "policy.train": "The stored rollouts are of the source's streams; leave it out.",
}

# The evaluation of a policy does not depend on any other section of its run.
_IN_EVALUATIONS = ("evaluate", "rollout", "rewards", "advantages", "guardrails", "placement", "storage.cache")
_OF_TRAINING = ("evaluate.every", "advantages.max_rounds")
_IN_SAMPLES = ("rollout", "placement")
_OF_A_REWARD = re.compile(r"(guardrails\.)?rewards\.\d+\.settings\.")
_MOVED = "policy.model"
"""The model of a run may be elsewhere; its digest has to be the same."""


def refuse_overrides(overrides: Sequence[str], hint: Callable[[str], str | None]) -> None:
    """Refuse the settings of `--set` that a command cannot change: those for whose path there is a hint."""
    hints = {override: hint(override_path(override)) for override in overrides}
    raise_all(InputError("--set", override, found) for override, found in hints.items() if found)


class _PolicyRequest(Section):
    run: RunPolicy = Field(
        min_length=1,
        description=f"a run under the storage root, or the path of its folder; {_VERSION}; by default the last one",
    )

    @property
    def named(self) -> PolicyName:
        """The run and the version."""
        return PolicyName.parse(self.run)


class EvaluateRequest(_PolicyRequest):
    """Evaluates a policy version on held-out prompts with fixed seeds; what is stored is not computed again."""

    prompts: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="prompt file to use instead of the run's held-out prompts"
    )
    overrides: Overrides = Field((), description=SET)
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        if path in _OF_TRAINING or (path.startswith("guardrails.") and not path.startswith("guardrails.rewards")):
            return "Only a training reads it; leave it out."
        changeable = (*_IN_EVALUATIONS, _MOVED)
        if any(path == part or path.startswith((f"{part}.", f"{part}_")) for part in changeable):
            return None
        return f"An evaluation takes the policy as it was trained; {', '.join(_IN_EVALUATIONS[:-1])} can be changed."

    @property
    def changes(self) -> list[str]:
        """All overrides: the requested file replaces the run's held-out prompts; targets are found in the same way."""
        if self.prompts is None:
            return list(self.overrides)
        unset = dict.fromkeys(("split", "subset", "revision", "prompt_column", "columns", "limit"))
        changed: dict[str, object] = {
            "prompts": self.prompts,
            "share": None,
            "datasets": [],
            "streaming": False,
            **unset,
        }
        return [*(f"evaluate.{key}={json.dumps(value)}" for key, value in changed.items()), *self.overrides]


class RepeatRequest(Section):
    """Repeats the evaluation of an exported policy from its folder alone, and compares."""

    folder: Annotated[str, Argument(metavar="EXPORT")] = Field(min_length=1, description="a folder of `grpo export`")
    overrides: Overrides = Field((), description="policy.model=PATH, placement, or a setting of a reward")
    trust_code: Trust = Field(False, description=TRUST)

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        if path == _MOVED or path.partition(".")[0] == "placement" or _OF_A_REWARD.match(path):
            return None
        return f"A card is repeated as it is; {_MOVED}, placement and rewards.N.settings can be changed."


class RescoreRequest(Section):
    """Scores stored rollouts with other rewards or weights, and reports what changed."""

    sources: Runs
    rewards: Annotated[str, Option(metavar="FILE")] = Field(
        min_length=1, description="YAML file with `rewards:`, and optionally `advantages:`"
    )
    name: Annotated[Name, Option(metavar="NAME")] = Field(
        description="name of the rescoring, a folder below rescored/ in each run"
    )
    iterations: Annotated[str | None, Option(metavar="A-B")] = Field(
        None, description="iterations to score; by default all"
    )
    html: Annotated[str | None, Option(metavar="FILE")] = Field(None, description="write one page that needs no server")
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"


_IN_VERIFICATIONS = ("placement", "storage.cache")


class VerifyRequest(Section):
    """Computes stored stages of a run again and compares; nothing in the run is changed."""

    run: Annotated[str, Argument(metavar="RUN")] = Field(
        min_length=1, description="a run under the storage root, or the path of its folder"
    )
    iterations: Annotated[str | None, Option(metavar="all|N|N:M|sample:K")] = Field(
        None,
        description="what to compute again: all iterations, some, or K random stages; by default three random "
        "iterations for each kind of stage; every checksum is verified by default and with all",
    )
    stages: Annotated[str | None, Option(metavar="KIND,...")] = Field(
        None, description="only these of rollouts, rewards, advantages, update and evaluation"
    )
    tolerance: Annotated[str | None, Option(metavar="bits|N")] = Field(
        None,
        description="what counts as rounding: nothing, or N units in the last place of float32 at the largest value; "
        "by default nothing on the run's own processor and packages",
    )
    seed: Annotated[int | None, Option(metavar="N")] = Field(
        None, ge=0, description="of a random choice; by default another each time, which is printed"
    )
    overrides: Overrides = Field(
        (), description="change policy.model, where the model is elsewhere than in training, or placement"
    )
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"

    @property
    def named(self) -> PolicyName:
        """The run, without a version."""
        return PolicyName(self.run, None)

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        changeable = (*_IN_VERIFICATIONS, _MOVED)
        if any(path == part or path.startswith((f"{part}.", f"{part}_")) for part in changeable):
            return None
        return f"A run is verified as it was made; only {_MOVED} and placement can be changed."


class ReplayRequest(Section):
    """Trains a policy from another run's stored rollouts, off-policy corrected; no training rollouts are sampled."""

    source: RunPolicy = Field(
        min_length=1,
        description=f"a run under the storage root, or the path of its folder; {_VERSION} of the source to start from; "
        "by default the initial model",
    )
    advantages: Annotated[str | None, Option(metavar="NAME")] = Field(
        None, description="stored, recomputed, or a name below rescored/; by default stored unless --set changes them"
    )
    iterations: Annotated[str | None, Option(metavar="A-B")] = Field(
        None, description="iterations of the source; by default all"
    )
    max_staleness: Annotated[int, Option(metavar="K")] = Field(
        MAX_STALENESS, ge=0, description="maximum versions between a row's policy and the policy that is trained"
    )
    name: Annotated[str | None, Option("--run", metavar="NAME")] = Field(
        None, pattern=RUN_NAME_PATTERN, description="name of the replay; by default RUN-replay"
    )
    overrides: Overrides = Field((), description=SET)
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        fixed = (hint for key, hint in _FIXED_IN_REPLAYS.items() if path == key or path.startswith(f"{key}."))
        return next(fixed, None)

    @property
    def named(self) -> PolicyName:
        """The source and the version to start from."""
        return PolicyName.parse(self.source)

    @property
    def run_name(self) -> str:
        """Name of the replay."""
        return self.name or f"{self.named.run.rstrip('/').rpartition('/')[2]}-replay"


class ExportRequest(_PolicyRequest):
    """Writes a policy version as a folder that diffusers, transformers and peft load."""

    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="a new or an empty folder")
    merged: Annotated[bool, Option("--merged")] = Field(
        False, description="write the model with the adapter merged into its weights"
    )
    push_to_hub: Annotated[str | None, Option(metavar="REPO")] = Field(
        None, min_length=1, description="also upload the folder to this repository of the Hugging Face hub"
    )
    without_prompts: Annotated[bool, Option("--without-prompts")] = Field(
        False, description="leave out the held-out prompts and their images, which repeat the evaluation"
    )
    overrides: Overrides = Field((), description="policy.model=PATH, where the model is elsewhere than in training")
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        return None if path == _MOVED else f"Only {_MOVED} can be changed for an export."


class SampleRequest(Section):
    """Draws or answers prompts with a run's policy, an exported folder or any model."""

    source: Annotated[str, Argument(metavar=f"{FORM}|MODEL")] = Field(
        min_length=1,
        description=f"a run ({_VERSION}; by default the last one), a folder of `grpo export`, or a model's folder",
    )
    prompts: Annotated[tuple[str, ...], Argument(metavar="PROMPT...")] = Field(
        min_length=1, description="texts, each in quotes"
    )
    seed: int = Field(0, ge=0, description="the same seed gives the same samples")
    samples: Annotated[int, Option("--n", metavar="K")] = Field(1, ge=1, description="samples per prompt")
    out: Annotated[str | None, Option(metavar="DIR")] = Field(
        None, min_length=1, description="folder for images; by default samples"
    )
    images: Annotated[tuple[str, ...], Option("--image", metavar="FILE")] = Field(
        (), description="an image in each of the prompts; may be repeated"
    )
    overrides: Overrides = Field((), description="change rollout or placement, such as rollout.temperature=0.7")
    trust_code: Trust = Field(False, description=TRUST)
    root: Root = "runs"

    def hint_against(self, path: str) -> str | None:
        """Return what to do instead of changing this setting; None where it can be changed."""
        changeable = path == _MOVED or path.partition(".")[0] in _IN_SAMPLES
        return None if changeable else f"Only {' and '.join(_IN_SAMPLES)} can be changed for samples."

    @property
    def moved(self) -> tuple[str, ...]:
        """The overrides that say where the model is."""
        return tuple(each for each in self.overrides if override_path(each) == _MOVED)


class DeployRequest(Section):
    """Registers a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""

    cron: Annotated[str | None, Option(metavar="EXPRESSION")] = Field(
        None, description='when to train, such as "0 2 * * *"; "" ends the schedule'
    )
    timezone: Annotated[str | None, Option(metavar="TZ")] = Field(
        None, description="time zone of --cron; by default UTC"
    )
    pool: str = Field(
        "training", description="work pool whose workers run it; created for `grpo worker` if it is missing"
    )
    image: str | None = Field(
        None, min_length=1, description="container image with this checkout, for pools such as kubernetes or docker"
    )
    name: str | None = Field(None, description="name of the deployments; by default the run's")
    evaluate: Annotated[bool, Option("--evaluate")] = Field(False, description="also register evaluations of the run")
    verify: Annotated[bool, Option("--verify")] = Field(False, description="also register verifications of the run")
    rescore: Annotated[tuple[str, ...], Option("--rescore", metavar="FILE")] = Field(
        (), description="also register a rescoring with these rewards"
    )


OWN = "own"
"""A reward of `grpo init`: the function in the written folder."""


class InitRequest(Section):
    """A folder with a commented configuration, and examples of what was not given."""

    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="folder to write, new or empty")
    template: Annotated[str | None, Option("--from", metavar="NAME")] = Field(
        None,
        min_length=1,
        description="shipped configuration to begin with, such as flux1_dev; by default the one that fits the model's "
        "files, with examples of what is not given",
    )
    model: Annotated[str | None, Option(metavar="MODEL")] = Field(
        None, min_length=1, description="folder or hub name; by default that of the configuration"
    )
    kind: PolicyKind | None = Field(
        None,
        description="without a model: begin with a shipped tiny one of glm_image (default), diffusers, causal_lm or "
        "vision_lm",
    )
    prompts: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="prompts; by default a file with examples"
    )
    targets: Annotated[str | None, Option(metavar="FOLDER")] = Field(
        None,
        min_length=1,
        description="target images, named in a column of the prompts, or 0.png, 1.png, ... in their order",
    )
    target_column: Annotated[str | None, Option(metavar="NAME")] = Field(
        None,
        min_length=1,
        description="column with the file of each target; by default the one whose cells are all files of --targets",
    )
    heldout: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="held-out prompts, which are not trained on"
    )
    heldout_targets: Annotated[str | None, Option(metavar="FOLDER")] = Field(
        None, min_length=1, description="their target images"
    )
    reward: Annotated[str | None, Option(metavar="NAME")] = Field(
        None,
        min_length=1,
        description="a reward of `grpo rewards list`, your function as FILE.py:NAME, or own: one in DIR/reward.py, the "
        "default without --from",
    )

    @property
    def asks_for_nothing(self) -> bool:
        """Whether only the folder is given."""
        return self == InitRequest(folder=self.folder)
