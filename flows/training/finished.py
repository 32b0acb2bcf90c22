"""A run that has nothing left to do: its summary is read from its files, without a flow run, a server or a model.

Everything that a start would use again is verified as the start would. Whatever is missing, damaged or made with other
settings, code, prompts or libraries is left to the start, which names and replaces it.
"""

import json
import time
from typing import Any

import yaml

from configs.schema import RunConfig
from flows.pipeline.lineage import identify, read_valid_description, settle_code, stage_code
from flows.pipeline.run import Run, describe, heldout_digest
from flows.pipeline.warm_start import settle_start
from flows.preflight.model import trained_model
from flows.preflight.prompts import read_prompt_files
from flows.pruning.keep import PolicyKeeper
from flows.training.history import TrainingHistory
from flows.training.summary import TrainSummary, summarize
from grpo_core.errors import InputError
from tasks.runs.layout import BASELINES, STORED, Baseline, baseline_folder, evaluation_folder, policy_folder
from tasks.runs.lookup import CONFIG_SHA256, read_config_file
from tasks.runs.records import StoredEvaluation
from tasks.runs.stored import find_evaluation, read_iterations, read_policy
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, open_store
from tasks.storage.prefect_results import note_copied
from tasks.storage.run_lock import RunLock, locked

_ELSEWHERE = ("placement", "storage")
"""Sections that a finished run has no more use for."""


def read_finished(config: RunConfig) -> TrainSummary | None:
    """Return the summary of a run that a start would leave as it is; None if there is anything for a start to do.

    Raises:
        InputError: another process writes the run.
    """
    started = time.perf_counter()
    store = open_store(config.storage, config.run.name)
    with locked(store, setting="run.name", value=config.run.name) as lock:
        try:
            run = _unchanged_run(config, store, lock)
            history = None if run is None else read_history(run)
        except (InputError, ValueError):
            # The start reports it, if it cannot be replaced.
            return None
        if run is None or history is None:
            return None
        # A start that was killed at its end may have left some.
        PolicyKeeper(run).delete_unneeded(config.run.iterations, history.heldout_rewards)
        return summarize(run, history, time.perf_counter() - started)


def _unchanged_run(config: RunConfig, store: ArtifactStore, lock: RunLock) -> Run | None:
    """Return the run if a start would write the same run.json and config.yaml again, but for where it runs."""
    prompts, previous = read_prompt_files(config), read_valid_description(store)
    if previous is None or prompts.problems:
        return None
    config, start = settle_start(config, previous)
    model = trained_model(config)
    run = Run(config, store, lock, model, prompts.usable("data"), prompts.usable("evaluate"), start)
    accepted = settle_code(stage_code(config, model), previous, accept=False)
    identity = identify(config, model, run.training, start)
    evaluation = heldout_digest(config, run.heldout) or previous.get("evaluation")
    described, settings = describe(run, identity, accepted, evaluation)
    stored = {name: value for name, value in previous.items() if name != CONFIG_SHA256}
    same = json.loads(json.dumps(described)) == stored and _read(settings) == _read(read_config_file(store))
    return run if same else None


def _read(settings: bytes) -> dict[str, Any]:
    return {name: section for name, section in yaml.safe_load(settings).items() if name not in _ELSEWHERE}


def read_history(run: Run) -> TrainingHistory | None:
    """Read the history of a finished run; None if a part is missing, damaged, or would be written again by a start."""
    config, store, history = run.config, run.store, TrainingHistory.of(run)
    if not note_copied(store):
        return None
    evaluations: dict[int, StoredEvaluation] = {}
    for version in range(config.run.iterations + 1) if run.heldout else ():
        if version == 0 or config.is_evaluated(version):
            done = find_evaluation(store, evaluation_folder(version), config)
            if done is None:
                return None
            evaluations[version] = done
    if any(target is not None for each in run.heldout for target in each.targets):
        history.add_baselines(_find_baselines(run))
        if len(history.baselines) < len(BASELINES):
            return None
    if 0 in evaluations:
        history.add_evaluation(config, 0, evaluations[0])
    labels = {section.label for section in config.rewards}
    for stored in read_iterations(store, (1, config.run.iterations), STORED):
        if stored.number in evaluations:
            history.add_evaluation(config, stored.number, evaluations[stored.number])
        update = store.find(policy_folder(stored.number))
        if update is None:
            return None
        record, changed = history.add_iteration(store, stored.number, stored.rounds, stored.advantages, update)
        if changed or not record.stored or any(set(each.rewards) != labels for each in stored.rounds):
            return None
    history.reach(read_policy(store, config.run.iterations))
    return history


def _find_baselines(run: Run) -> dict[Baseline, ArtifactRef]:
    """Return the advantages of the images that no policy made, as far as all of their stages are valid."""
    unguarded: Any = run.config.guardrails.model_copy(update={"rewards": ()})
    config = run.config.model_copy(update={"guardrails": unguarded})
    found = {name: find_evaluation(run.store, baseline_folder(name), config) for name in BASELINES}
    return {name: done.advantages for name, done in found.items() if done is not None}
