"""Publish finished iterations beside the stages of the next: report and table in Prefect's UI, metrics in the run.

A thread publishes one iteration after the other. The end of an iteration waits for the publication of the one before,
the end of the run for the last, and raises what failed in it. The table of metrics is written last, so a run that was
killed before publishes the iteration when it resumes.
"""

import contextvars
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext

from flows.pipeline.flow_run_page import artifact_key, folder_link
from flows.pipeline.run import Run
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.runs.metrics_table import write_metrics


@contextmanager
def publishing(run: Run) -> Iterator["Publisher"]:
    """Open the thread that publishes the iterations of a run; at the end, wait for what it has begun.

    Raises:
        Exception: whatever failed while the last iteration was published.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="publication") as thread:
        publisher = Publisher(run, thread)
        yield publisher
        publisher.finish()


class Publisher:
    """Publishes the iterations of one start of a run."""

    def __init__(self, run: Run, thread: ThreadPoolExecutor) -> None:
        self._run, self._thread = run, thread
        self._begun: Future[None] | None = None
        self._progress: UUID | None = None

    def publish(self, history: Sequence[IterationRecord], line: str) -> None:
        """Wait for the iteration before, and begin to publish the last one of the history.

        Args:
            history: records of the iterations so far.
            line: says how far the run is.

        Raises:
            Exception: whatever failed while the iteration before was published.
        """
        self.finish()
        context = contextvars.copy_context()
        self._begun = self._thread.submit(context.run, self._publish, tuple(history), line)

    def finish(self) -> None:
        """Wait for what was begun; raises as `publish`."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def _publish(self, history: Sequence[IterationRecord], line: str) -> None:
        store, iterations, record = self._run.store, self._run.config.run.iterations, history[-1]
        # A run that resumes passes its previous iterations, which have been published.
        if not record.stored or record.iteration == iterations:
            title = f"{store.run}, iteration {record.iteration}"
            self._show("report", "markdown", title, iteration_markdown(store, store.run, history))
            self._show("metrics", "table", title, json.dumps(iteration_table(record)))
            self._show_progress(100.0 * record.iteration / iterations, line)
        write_metrics(store, record.iteration, record.metrics)

    def _show_progress(self, percent: float, line: str) -> None:
        if self._progress is not None:
            get_client(sync_client=True).update_artifact(self._progress, ArtifactUpdate(data=percent, description=line))
            return
        self._progress = self._show("progress", "progress", line, percent)
        link = folder_link(self._run.store.path())
        self._show("folder", "markdown", f"{self._run.store.run}: its folder", f"[{link}]({link})")

    def _show(self, name: str, kind: str, description: str, data: str | float) -> UUID:
        """Create an artifact of the flow run in Prefect's UI, and return its id."""
        context = FlowRunContext.get()
        assert context is not None, "a flow publishes"
        request = ArtifactCreate(
            type=kind,
            key=artifact_key(f"{self._run.store.run}-{name}"),
            description=description,
            data=data,
            flow_run_id=context.flow_run.id if context.flow_run else None,
        )
        # The client that the run has opened.
        return get_client(sync_client=True).create_artifact(request).id
