"""What a run's policy was trained from: the policy that it started from, and of a replay its rollouts and rewards."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import ReplaySection, RewardsFile, RunConfig
from configs.scoring import RewardSection
from configs.validation import RUN_NAME_PATTERN, validated
from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError
from tasks.runs.layout import REWARDS_FILE, rescoring_folder
from tasks.runs.lookup import CONFIG_FILE, read_config_file, read_description
from tasks.runs.run_view import rescoring_of
from tasks.runs.stored_policies import START
from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class Origin:
    """What a run's policy was trained from."""

    replay: ReplaySection | None  # the source of a replay; None for a training
    started_from: str | None  # RUN@N of the policy of another run that training started from; None: the model as given
    first_version: int  # number of the version that training started from, in this run
    # The rewards that trained the policy; None where they are those of a rescoring that is not there.
    rewards: Sequence[RewardSection] | None

    @property
    def rescoring(self) -> str | None:
        """Name of the source's rescoring whose rewards trained the policy; None where its run's own rewards did."""
        return rescoring_of(self.replay.model_dump()) if self.replay is not None else None


def origin_of(store: ArtifactStore, config: RunConfig) -> Origin:
    """Read what a run's policy was trained from, of its `stored_config`; InputError for damaged files."""
    values = parse_yaml(read_config_file(store).decode(errors="replace"), f"{store.run}/{CONFIG_FILE}")
    found = values.get("replay") if isinstance(values, Mapping) else None
    if found is None:
        start = read_description(store).get(START)
        return Origin(None, str(start["from"]) if start is not None else None, 0, config.rewards)
    replay = validated(ReplaySection, found)
    started_from, name = (
        f"{replay.source}@{replay.policy}" if replay.policy else None,
        rescoring_of(replay.model_dump()),
    )
    rewards = config.rewards if name is None else _rewards_of_rescoring(store, replay.source, name)
    return Origin(replay, started_from, replay.policy, rewards)


def _rewards_of_rescoring(store: ArtifactStore, source: str, name: str) -> Sequence[RewardSection] | None:
    """Return the rewards of a rescoring of another run of the root; None where they cannot be read."""
    # A run of somebody else could name any folder.
    if not re.fullmatch(RUN_NAME_PATTERN, source):
        return None
    place = f"{source}/{rescoring_folder(name, REWARDS_FILE)}"
    content = store.read_shared(place)
    try:
        values: Any = parse_yaml(content.decode(errors="replace"), place) if content is not None else None
        return validated(RewardsFile, values).rewards if isinstance(values, Mapping) else None
    except InputError:
        return None
