"""What commands print at their end: the summary of a training, an evaluation, a pruning, a deployment; findings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flows.terminal.tables import key_values, plain, relative, reward_table, stderr, table_of
from tasks.reports.text import baseline_rows, change, counted, number

if TYPE_CHECKING:
    from flows.deployment.deploy import DeployedRun
    from flows.evaluation.evaluate import EvaluateSummary
    from flows.export.export import ExportSummary
    from flows.inspection.list_runs import ListedRun
    from flows.preflight.doctor import Diagnosis
    from flows.pruning.prune import PruneSummary
    from flows.training.summary import TrainSummary

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_training(summary: "TrainSummary", console: Console | None = None) -> None:
    """Print the end of a training run or a replay."""
    (console or stderr()).print(key_values(f"{summary.run}: {summary.iterations} iterations", training_rows(summary)))


def training_rows(summary: "TrainSummary") -> list[tuple[str, str]]:
    """Describe the end of a training run or a replay: rewards first and last, time by stage, where to look."""
    rows = [
        ("reward, first → last iteration", change(summary.reward_first, summary.reward_last)),
        ("held-out reward, before → after", change(summary.heldout_before, summary.heldout_after)),
        *baseline_rows(summary.heldout_baselines),
        *_seconds(summary.seconds),
        *((f"reused from run {name}", counted(count, "iteration")) for name, count in summary.reused.items()),
        ("policy digest", (summary.policy_digest or "none")[:16]),
        ("stored in", relative(summary.folder)),
    ]
    files = {
        "images before and after": summary.contact_sheet,
        "completions before and after": summary.heldout_texts,
        "reward and its guardrails": summary.watch,
    }
    rows += [(title, relative(path)) for title, path in files.items() if path]
    rows += [("stopped by the watch" if summary.stopped_early else "watch", sign) for sign in summary.hacking]
    return [*rows, *(("moved away", reason) for reason in summary.quarantined)]


def show_evaluation(summary: "EvaluateSummary", console: Console | None = None) -> None:
    """Print each reward and guardrail, the held-out reward, and where the samples are."""
    console = console or stderr()
    named = [*summary.rewards.items(), *((f"{label} (guardrail)", each) for label, each in summary.guardrails.items())]
    cells = [
        {
            "reward": label,
            "mean": number(each.mean),
            "std": number(each.std),
            "without": f"{each.without:,}",
            "failed": f"{each.failed:,}",
        }
        for label, each in named
    ]
    title = f"{summary.run}, policy {summary.policy}, {counted(summary.samples, 'sample')}"
    console.print(reward_table(title, cells, console))
    rows = [
        ("held-out reward", number(summary.heldout)),
        ("policy digest", summary.policy_digest[:16]),
        *_seconds(summary.seconds),
        ("stored in", relative(summary.folder)),
        *([("computed", "nothing: it was stored")] if summary.stored else []),
    ]
    console.print(key_values("", rows))


def show_diagnosis(diagnosis: "Diagnosis", console: Console | None = None) -> None:
    """Print each finding with its hint, and the memory estimate part by part."""
    console = console or stderr()
    for finding in diagnosis.findings:
        mark = "[green]ok     [/]" if finding.healthy else "[red]problem[/]"
        line = f"{mark} [bold]{finding.subject}[/]: {escape(finding.message)}"
        console.print(line, highlight=False, soft_wrap=True)
        if finding.hint:
            console.print(f"        {escape(finding.hint)}", highlight=False, soft_wrap=True)
    if diagnosis.memory is not None:
        rows = [(part, f"{gib:.2f}" if gib >= 0.01 else f"{gib:.2g}", by) for part, gib, by in diagnosis.memory.rows()]
        console.print(table_of("GPU memory, estimated", ("part", "GiB", "from"), rows, right=(1,)))


def show_runs(root: str, runs: "Sequence[ListedRun]", console: Console) -> None:
    """Print a table of runs, the one that made progress last at the end."""
    if not runs:
        console.print(plain(f"no runs in {root}; `grpo train CONFIG` starts one"), soft_wrap=True)
        return
    rows = [
        (
            each.run,
            each.state,
            f"{each.iterations:,} of {'?' if each.planned is None else f'{each.planned:,}'}",
            "" if each.reward is None else number(each.reward),
            "" if each.heldout is None else number(each.heldout),
            "" if each.progress is None else f"{each.progress:%Y-%m-%d %H:%M}",
        )
        for each in runs
    ]
    headings = ("run", "state", "iterations", "reward", "held-out", "last progress")
    console.print(table_of(root, headings, rows, right=(2, 3, 4)))


def show_pruned(summary: "PruneSummary", console: Console) -> None:
    """Print, run by run, what was deleted, and what was kept with the reason."""
    for run in summary.runs:
        rows = [(each.kind, f"{each.count:,}", size(each.bytes)) for each in run.deleted] or [("nothing", "0", size(0))]
        title = f"{run.run}: {'would be deleted' if summary.dry_run else 'deleted'}"
        console.print(table_of(title, ("what", "how many", "frees"), rows, right=(1, 2)))
        if run.kept:
            rows = [(one.kind, ", ".join(one.names), one.reason) for one in run.kept]
            console.print(table_of("kept", ("what", "which", "why"), rows))
        for note in run.notes:
            console.print(plain(f"{run.run}: {note}"), soft_wrap=True)
    if summary.dry_run:
        console.print("a dry run: nothing was changed", highlight=False)


def show_deployed(deployed: "DeployedRun") -> None:
    """Print each deployment with its page, and how to run it."""
    console = stderr()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"{deployed.run}: registered for the work pool {deployed.pool}")
    for each in deployed.deployments:
        say(f"  {each.name}, {'updated' if each.updated else 'new'}")
        say(f"    schedule: {each.schedule or 'none'}")
        if each.url:
            say(f"    {each.url}")
    own = deployed.pool_type == "grpo"
    say("A worker, in a checkout of this project:" if own or deployed.pool_type == "process" else "A worker:")
    say(f"  grpo worker {deployed.pool}" if own else f"  prefect worker start --pool {deployed.pool}")
    if not deployed.watched:
        say("The server refused the automation that marks runs without heartbeats as crashed (docs/prefect.md).")
    say("A run by hand:")
    say(f"  prefect deployment run '{deployed.deployments[0].name}'")
    if "://" not in deployed.root and not deployed.root.startswith(("/", "~")):
        say(f"Runs are kept in {deployed.root}/ of the worker's checkout.")


def show_export(summary: "ExportSummary", usage: str, console: Console | None = None) -> None:
    """Print what was written, where it is, and the lines of Python that use it."""
    console = console or stderr()
    rows = [
        ("written", "a whole model" if summary.kind == "model" else "an adapter, in peft's format"),
        ("policy digest", summary.policy_digest[:16]),
        ("folder", relative(summary.folder)),
        *([("hub", summary.url)] if summary.url else []),
    ]
    console.print(key_values(f"{summary.run}, policy {summary.policy}", rows))
    console.print(plain(usage), soft_wrap=True)


def size(count: int) -> str:
    """Format bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def _seconds(seconds: dict[str, float]) -> list[tuple[str, str]]:
    return [(f"seconds, {stage}", f"{spent:.1f}") for stage, spent in seconds.items()]
