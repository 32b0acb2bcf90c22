"""Where a kill fell, in words: the stage, and the step within it."""

from dataclasses import dataclass

from tests.chaos.trail import Sight

_STAGES = (
    ("flows/pipeline/stages.py:collect_rollouts", "collect rollouts"),
    ("flows/pipeline/stages.py:score_rewards", "score rewards"),
    ("flows/pipeline/stages.py:compute_advantages", "compute advantages"),
    ("flows/pipeline/stages.py:update_policy", "update policy"),
    ("flows/training/iteration_report.py:", "report and metrics"),
    ("flows/pipeline/run.py:open_run", "opening"),
    ("flows/preflight/inputs.py:", "opening"),
    ("flows/training/summary.py:", "summary"),
    ("flows/terminal/progress.py:", "summary"),
    ("flows/training/prefetch.py:", "between stages"),
    ("flows/training/train.py:", "between stages"),
    ("flows/command_line/main.py:", "before and after the flow"),
)
# The first that is in a stack counts: what is done for another step stands before it.
_STEPS = (
    (":_move_away", "move away"),
    (":write_manifest", "commit: manifest"),
    (":move_folder", "commit: move into place"),
    (":clear_place", "commit: clear the place"),
    (":settle_folder", "commit: digests and fsync"),
    ("store.py:commit", "commit: digests and fsync"),
    ("prefect_results.py:write_path", "record"),
    ("prefect_results.py:read_path", "look-up"),
    (":restore_artifact", "look-up"),
    (":clear_abandoned", "clear what was left"),
    ("run_lock.py:", "lock"),
    (":_write_description", "config.yaml and run.json"),
    (":_move_other_lineage", "compare with the folder"),
    ("metrics_table.py:write_metrics", "metrics.parquet"),
    ("iteration_report.py:publish", "report in Prefect"),
    (":staging", "write the files"),
    ("tables/parquet.py:", "write the files"),
    (":save_weights", "write the files"),
    (":_save_state", "write the files"),
    (":local_files", "verify what is read"),
    ("tasks/rollouts/collect.py:", "the work itself"),
    ("tasks/rewards/score.py:", "the work itself"),
    ("tasks/rewards/rows.py:", "the work itself"),
    ("tasks/advantages/compute.py:", "the work itself"),
    ("tasks/advantages/copy.py:", "the work itself"),
    ("tasks/update/policy.py:_", "the work itself"),
    ("tasks/update/launcher.py:", "the work itself"),
    ("tasks/execution/", "execution"),
)
_OTHERWISE = {
    "opening": "inputs",
    "summary": "sheet and table",
    "report and metrics": "figures",
    "between stages": "the flow",
    "before and after the flow": "Prefect's start and end",
}


@dataclass(frozen=True, order=True)
class Place:
    """Where a kill fell.

    Attributes:
        stage: of the run, of a training iteration or of an evaluation.
        step: of the stage.
    """

    stage: str
    step: str


def place_of(sight: Sight) -> Place:
    """The place of what was seen last; the stage by the main thread, the step by whichever thread was furthest."""
    main = sight.stacks[0] if sight.stacks else ()
    stage = next((name for part, name in _STAGES if any(part in function for function in main)), None)
    if stage is None:
        return Place("before and after the flow", "the process's start and end")
    # What other threads do belongs to a stage alone.
    stacks = [main] if stage in _OTHERWISE else list(sight.stacks)
    step = _step(stacks, _OTHERWISE.get(stage, "Prefect, around it"))
    in_evaluation = any("flows/training/evaluation.py:evaluate" in function for function in main)
    evaluated = stage not in _OTHERWISE and in_evaluation
    return Place(f"evaluation: {stage}" if evaluated else stage, step)


def _step(stacks: list[tuple[str, ...]], otherwise: str) -> str:
    for place, step in _STEPS:
        if any(place in function for stack in stacks for function in stack):
            return step
    return otherwise
