"""Prefect ignores names that it does not know: each that we set is looked up in its own settings."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from prefect.logging.configuration import load_logging_config
from prefect.settings import Settings, get_current_settings
from prefect.settings.legacy import _get_settings_fields

from flows import prefect_settings

GROUPS: Mapping[str, Mapping[str, str]] = {
    name: getattr(prefect_settings, name)
    for name in ("CLIENT", "SERVER", "TEMPORARY_SERVER", "LASTING_SERVER", "WORKER")
}
# What is no setting of Prefect's Settings, and how each works is tested by itself.
OTHERS = {"DO_NOT_TRACK", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"}


def settings() -> Iterator[tuple[str, str]]:
    for group in GROUPS.values():
        yield from group.items()


@pytest.mark.parametrize("name", sorted({name for name, _ in settings()} - OTHERS))
def test_prefect_knows_the_name(name: str) -> None:
    assert name in _get_settings_fields(Settings)


def test_one_name_has_one_value() -> None:
    values: dict[str, set[str]] = {}
    for name, value in settings():
        values.setdefault(name, set()).add(value)
    assert {name for name, found in values.items() if len(found) > 1} == set()


def test_the_values_arrive_and_what_the_person_has_set_stays() -> None:
    program = """
import flows
from prefect.settings import get_current_settings
settings = get_current_settings()
recorder, persister = settings.server.services.task_run_recorder, settings.server.services.event_persister
print(settings.client.max_retries, settings.flows.heartbeat_frequency, settings.results.default_serializer)
print(recorder.batch_size, recorder.read_batch_size, recorder.flush_interval, persister.batch_size)
print(settings.server.analytics_enabled, settings.server.ui.v2_enabled, settings.server.ui.show_promotional_content)
print(settings.worker.query_seconds, settings.worker.heartbeat_seconds, settings.worker.webserver.host)
"""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = inherited | {"PREFECT_CLIENT_MAX_RETRIES": "3"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "3 30 json",
        "100 100 1.0 200",
        "False False False",
        "0.5 5.0 127.0.0.1",
    ]


def test_the_console_is_silent_by_prefects_logging_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
    monkeypatch.setenv(name, prefect_settings.CLIENT[name])
    path = get_current_settings().logging.config_path
    from prefect.logging.configuration import DEFAULT_LOGGING_SETTINGS_PATH

    config = load_logging_config(path if path and path.exists() else DEFAULT_LOGGING_SETTINGS_PATH)
    assert config["handlers"]["console"]["level"] == "CRITICAL"


def test_nothing_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect._internal.analytics.enabled import is_telemetry_enabled

    # Its other reason to be silent, which machines of CI have.
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("DO_NOT_TRACK", prefect_settings.CLIENT["DO_NOT_TRACK"])
    assert not is_telemetry_enabled()
    assert prefect_settings.SERVER["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
