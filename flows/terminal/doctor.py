"""The result of `grpo doctor` as a table."""

from rich.markup import escape
from rich.table import Table

from flows.preflight.doctor import Diagnosis
from flows.terminal import progress


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Each finding with its hint, and the memory estimate part by part."""
    for finding in diagnosis.findings:
        mark = "[green]ok  [/]" if finding.healthy else "[red]hint[/]"
        line = f"{mark} [bold]{finding.subject}[/]: {escape(finding.said)}"
        progress.console.print(line, highlight=False, soft_wrap=True)
        if finding.hint:
            progress.console.print(f"     {escape(finding.hint)}", highlight=False, soft_wrap=True)
    if diagnosis.memory is not None:
        table = Table(title="GPU memory, estimated", title_justify="left")
        table.add_column("part")
        table.add_column("GiB", justify="right")
        table.add_column("from")
        for part, gib, formula in diagnosis.memory.rows():
            table.add_row(part, f"{gib:.2f}" if gib >= 0.01 else f"{gib:.2g}", formula)
        progress.console.print(table)
