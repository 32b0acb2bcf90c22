"""Settings of Prefect that must stand before it is imported. What the person has set is left alone."""

import os
from collections.abc import Mapping

CLIENT: Mapping[str, str] = {
    # Seven waits that double, about four minutes in all: a server that is started again does not end a run.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    # What the server says while its database is away, and a proxy while the server is.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",
    # The least that Prefect takes; the automation of flows.server.heartbeat_automation counts on it.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Results are never pickled.
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # Nothing is sent anywhere.
    "DO_NOT_TRACK": "1",
    # A failure is told once, by the command line; the full traceback is in the UI's logs.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}
"""For whoever runs flows."""

SERVER: Mapping[str, str] = {
    # One write for many task runs: unbatched, the recorder costs more than the tasks.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    # Whole seconds: the recorder truncates, and with 0 its loop spins and takes half a core.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The other UI calls out from the browser, whatever is set.
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
}
"""For a server, be it the temporary one of a single run."""

TEMPORARY_SERVER: Mapping[str, str] = {
    # The first start migrates a database, which takes longer than the default on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
"""For whoever starts a server of a single run."""

LASTING_SERVER: Mapping[str, str] = {
    # Records of 90 days ago and events of 7 go; a database otherwise grows by 76 MB in an hour of busy flows.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    # In memory, the default, a server that is started again knows of no leases, and ends the run that holds one.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}
"""For a server that is kept: `grpo ui`, compose.yaml."""

WORKER: Mapping[str, str] = {
    # Ten seconds by default, which a dispatched stage would wait for.
    "PREFECT_WORKER_QUERY_SECONDS": "0.5",
    # A worker that has died is seen after three of them.
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
    # All addresses by default, and without a password.
    "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
}
"""For a worker of a pool."""


def apply_settings() -> None:
    """Set what the environment does not set already; nothing here hurts a process that is not concerned."""
    for settings in (CLIENT, SERVER, TEMPORARY_SERVER, WORKER):
        for name, value in settings.items():
            os.environ.setdefault(name, value)
