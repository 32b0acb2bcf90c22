"""Report an iteration: one line for the log, a page and a table in Prefect's UI, its metrics on disk."""

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.pipeline.run import Run
from flows.training.history import TrainingHistory
from flows.training.prefetch import ScoredRollouts
from tasks.progress import log
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.runs.metrics_table import gather_metrics, has_metrics, write_metrics
from tasks.storage.artifacts.reference import PolicyRef

LOGGED_METRICS = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))


async def report(
    run: Run,
    history: TrainingHistory,
    iteration: int,
    policy: PolicyRef,
    drawn: ScoredRollouts,
) -> None:
    """Gather the iteration's figures, show them in Prefect's UI once, and keep them."""
    assert policy.checkpoint is not None
    heldout = history.heldout.get(iteration)
    guardrails = history.guardrails.get(iteration)
    metrics = gather_metrics(drawn.rounds, drawn.advantages, policy.checkpoint, heldout, guardrails)
    record = IterationRecord(
        iteration=iteration,
        rounds=drawn.rounds,
        advantages=drawn.advantages,
        metrics=metrics,
        heldout=heldout.metrics.get("reward") if heldout else None,
    )
    history.iterations.append(record)
    log(told(record, run.config.run.iterations))
    # A run that goes on passes by its previous iterations; they have been reported.
    if not has_metrics(run.store, iteration) or iteration == run.config.run.iterations:
        await publish(run, history)
    write_metrics(run.store, iteration, metrics)


def told(record: IterationRecord, iterations: int) -> str:
    """The iteration in one line."""
    parts = [f"{title} {record.metrics[name]:.3f}" for title, name in LOGGED_METRICS if name in record.metrics]
    return f"iteration {record.iteration}/{iterations}: {', '.join(parts)}, {record.metrics['step_time']:.1f} s"


async def publish(run: Run, history: TrainingHistory) -> None:
    """Leave the last iteration's report and table in Prefect's UI."""
    name, record = run.config.run.name, history.iterations[-1]
    key = f"grpo-{name}".lower().replace(".", "-").replace("_", "-")
    title = f"{name}, iteration {record.iteration}"
    markdown = iteration_markdown(run.store, name, history.iterations)
    await acreate_markdown_artifact(markdown, key=f"{key}-report", description=title)
    await acreate_table_artifact(iteration_table(record), key=f"{key}-metrics", description=title)
