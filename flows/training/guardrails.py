"""The watch over a run: held-out guardrails beside the held-out reward, and what is done when they part."""

import json
from collections.abc import Mapping, Sequence

from configs.scoring import WatchSection
from grpo_core.rewards.hacking import HackingSign, hacking_signs
from tasks.progress import log
from tasks.runs.layout import SIGNS_FILE, WATCH_PLOT
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

Guardrails = Mapping[int, Mapping[str, ArtifactRef]]
"""Scores of the held-out samples, by policy version and label."""


def find_hacking_signs(
    section: WatchSection, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> list[HackingSign]:
    """The guardrails that have fallen while the reward rose, as of the last evaluation."""
    if not section.guardrails:
        return []
    versions, rewards, levels = held_out_series(heldout, guardrails)
    return list(hacking_signs(versions, rewards, levels, section))


def held_out_series(
    heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> tuple[list[int], list[float | None], dict[str, list[float | None]]]:
    """Versions, mean reward of each, and mean of each guardrail by label."""
    versions = sorted(version for version in heldout if guardrails.get(version))
    labels = list(guardrails[versions[0]]) if versions else []
    rewards = [heldout[version].metrics.get("reward") for version in versions]
    levels = {
        label: [guardrails[version][label].metrics.get(f"rewards/{label}/mean") for version in versions]
        for label in labels
    }
    return versions, rewards, levels


def report_hacking_signs(store: ArtifactStore, version: int, signs: Sequence[HackingSign], *, stop: bool) -> None:
    """Tell people, and keep it for those who come later; without signs, that there are none any more."""
    for sign in signs:
        log(f"watch, policy {version}: {sign}")
    told = {"version": version, "signs": [str(sign) for sign in signs], "stopped": stop}
    store.write_file(SIGNS_FILE, json.dumps(told, indent=1).encode())


def write_watch_plot(store: ArtifactStore, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails) -> str:
    """Plot the held-out reward above the guardrails, and return the path of the image."""
    # The plotting library takes a second to import, which a run without guardrails need not wait for.
    from tasks.reports.watch_plot import plot_watch

    store.write_file(WATCH_PLOT, plot_watch(*held_out_series(heldout, guardrails)))
    return store.path(WATCH_PLOT)
