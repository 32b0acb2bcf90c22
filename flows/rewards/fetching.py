"""`grpo rewards fetch`: which weights the named rewards read, and their download."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from configs.loader import read_config, read_rewards_file
from configs.scoring import RewardSection
from configs.yaml_files import read_mapping
from grpo_core.errors import InputError, raise_all
from grpo_core.rewards.registry import REWARDS, build_reward
from grpo_core.rewards.weights.fetch import Download, downloads_of


def plan_fetch(names: Sequence[str], folder: Path) -> list[Download]:
    """List the weights of rewards, each once, whether they are here or not.

    Args:
        names: of rewards with their default settings, or of YAML files with `rewards:`, a configuration's or its own.
        folder: where files go that no setting names.

    Raises:
        InputError: no such reward or file, or weights that cannot be downloaded.
    """
    problems: list[InputError] = []
    found: dict[str, Download] = {}
    for section in [section for name in names for section in _sections(name)]:
        try:
            downloads = downloads_of(build_reward(section.reward, section.settings), folder)
        except InputError as error:
            problems.append(error)
            continue
        for each in downloads:
            # Two rewards may read the same weights.
            found.setdefault(str(each.weights.source), each)
    raise_all(problems)
    return list(found.values())


def fetch(downloads: Sequence[Download], console: Console) -> list[tuple[Download, str]]:
    """Download what is missing and check all of it; returns each with its path."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    fetched = []
    with Progress(*columns, console=console, transient=True) as bars:
        for each in downloads:
            # The Hub's own library shows its progress.
            shown = each.url is not None and not each.present
            task = bars.add_task(
                Path(str(each.weights.source)).name, total=each.size() if shown else None, visible=shown
            )
            fetched.append((each, each.run(lambda count, task=task: bars.advance(task, count))))  # type: ignore[misc]
    return fetched


def _sections(name: str) -> Iterator[RewardSection]:
    if not name.endswith((".yaml", ".yml")):
        if name not in REWARDS:
            build_reward(name)
        yield RewardSection(reward=name)
        return
    values = read_mapping(name, "REWARD", example="configs/rewards/mix.yaml", keys="rewards")
    if "run" not in values:
        yield from read_rewards_file(name, "REWARD").rewards
        return
    config = read_config(name)
    yield from (*config.rewards, *config.watch.guardrails)
