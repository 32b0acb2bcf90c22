"""Settings of Prefect that must stand before it is imported. What the person has set is left alone."""

import os

_SETTINGS = {
    # The first start migrates a database, which takes longer than the default on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # One write for many task runs: unbatched, the recorder costs more than the tasks.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    # Whole seconds: the recorder truncates, and with 0 its loop spins and takes half a core.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    # Results are never pickled.
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    # Nothing is sent anywhere.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    # A failure is told once, by the command line; the full traceback is in the UI's logs.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


def apply_settings() -> None:
    """Set what the environment does not set already."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
