"""Prefect's settings, which it reads when it is imported. What the environment sets already is kept."""

import os
from collections.abc import Mapping

CLIENT: Mapping[str, str] = {
    # Seven waits that double, about four minutes in total: a run survives a restart of the server.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    # What the server answers while its database is down, and a proxy while the server is down.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",
    # The minimum that Prefect allows; flows.server.heartbeat_automation relies on it.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Results are never pickled.
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # Nothing is sent anywhere.
    "DO_NOT_TRACK": "1",
    # The command line reports a failure once; the full traceback is in the UI's logs.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # The first temporary server migrates a database, which takes longer than the default on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
"""For processes that run flows, and may start a temporary server."""

SERVER: Mapping[str, str] = {
    # One write per batch of task runs: unbatched, the recorder costs more than the tasks.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    # Whole seconds: the recorder truncates, and with 0 its loop spins on half a core.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The other UI calls out from the browser, whatever the settings are.
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
}
"""For every server, also the temporary one of a single run."""

SINGLE_RUN: Mapping[str, str] = {
    # Nobody reads its events, and it has no automations: a quarter of its work for a small run.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
}
"""For a temporary server, which ends with the run."""

LASTING_SERVER: Mapping[str, str] = {
    # Deletes records after 90 days and events after 7; otherwise a database grows by 76 MB in an hour of busy flows.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    # In memory, the default, leases are lost in a restart of the server, and the runs that have them are ended.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}
"""For a server that is kept: `grpo ui`, compose.yaml."""

WORKER: Mapping[str, str] = {
    # Ten seconds by default, which every dispatched stage would wait.
    "PREFECT_WORKER_QUERY_SECONDS": "0.5",
    # Three missed ones mark a worker as offline.
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
    # By default on all addresses, without a password.
    "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
}
"""For a worker of a pool."""


def apply_settings() -> None:
    """Set what the environment does not set already; settings of other processes have no effect in this one."""
    for settings in (CLIENT, SERVER, WORKER):
        for name, value in settings.items():
            os.environ.setdefault(name, value)
