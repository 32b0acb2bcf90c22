"""Evaluate a policy while it trains, and watch for reward hacking: a guardrail that falls while the reward rises."""

import json
from collections.abc import Mapping, Sequence

from configs.schema import RunConfig
from configs.scoring import WatchSection
from flows.evaluation.evaluate import evaluate_policy
from flows.pipeline.run import Run
from flows.training.history import TrainingHistory
from grpo_core.rewards.hacking import HackingSign, hacking_signs
from tasks.progress import log
from tasks.runs.layout import SIGNS_FILE, WATCH_PLOT
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

Guardrails = Mapping[int, Mapping[str, ArtifactRef]]
"""Scores of the held-out samples, by policy version and label."""


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is evaluated."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Evaluate a policy on the held-out prompts, if there are any, and report guardrails that have fallen."""
    plan = run.evaluation_plan(policy.version)
    if plan is None:
        return
    done, section = evaluate_policy(run, policy, plan), run.config.watch
    history.heldout[policy.version], history.guardrails[policy.version] = done.advantages, done.guardrails
    if section.guardrails:
        history.signs = find_hacking_signs(section, history.heldout, history.guardrails)
        stop = history.stopped_by(run.config, policy.version)
        report_hacking_signs(run.store, policy.version, history.signs, stop=stop)


def find_hacking_signs(
    section: WatchSection, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> list[HackingSign]:
    """Find the guardrails that have fallen while the reward rose, as of the last evaluation."""
    return list(hacking_signs(*held_out_series(heldout, guardrails), section))


def held_out_series(
    heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> tuple[list[int], list[float | None], dict[str, list[float | None]]]:
    """Return the evaluated versions, the mean reward of each, and the mean of each guardrail by label."""
    versions = sorted(version for version in heldout if guardrails.get(version))
    labels = list(guardrails[versions[0]]) if versions else []
    rewards = [heldout[version].metrics.get("reward") for version in versions]
    levels = {
        label: [guardrails[version][label].metrics.get(f"rewards/{label}/mean") for version in versions]
        for label in labels
    }
    return versions, rewards, levels


def report_hacking_signs(store: ArtifactStore, version: int, signs: Sequence[HackingSign], *, stop: bool) -> None:
    """Log the signs and store them for reports; without signs, store that there are none.

    Args:
        store: the run.
        version: the evaluated policy.
        signs: guardrails that have fallen.
        stop: whether they end the run.
    """
    for sign in signs:
        log(f"watch, policy {version}: {sign}")
    content = {"version": version, "signs": [str(sign) for sign in signs], "stopped": stop}
    store.write_file(SIGNS_FILE, json.dumps(content, indent=1).encode())


def write_watch_plot(store: ArtifactStore, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails) -> str:
    """Plot the held-out reward above the guardrails and return the path of the image."""
    # The plotting library takes a second to import, which a run without guardrails does not need.
    from tasks.reports.reward_plots import plot_watch

    store.write_file(WATCH_PLOT, plot_watch(*held_out_series(heldout, guardrails)))
    return store.path(WATCH_PLOT)
