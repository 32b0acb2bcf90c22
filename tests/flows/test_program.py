"""The program itself: what it answers before anything heavy is imported, and how options are checked."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import typer
from prefect.logging.configuration import load_logging_config
from prefect.settings import Settings, get_current_settings
from prefect.settings.legacy import _get_settings_fields
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.command_line.options import handle_errors
from flows.server import prefect_settings
from grpo_core.errors import InputError
from tasks.storage.roots import StorageError
from tests.flows.conftest import REPOSITORY, Runs

Command = tuple[list[str], int, str]
"""Arguments, exit code, and a word of what is printed."""

PROGRAM = """
import contextlib, io, json, sys
from flows import train, evaluate, replay, rescore
from flows.command_line.main import main

answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, said = ["grpo", *arguments], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    heavy = {"torch", "prefect", "transformers", "polars", "jinja2", "rich.progress"} & sys.modules.keys()
    answers.append([code or 0, said.getvalue(), sorted(heavy)])
print(json.dumps(answers))
"""
REQUESTS = [
    ["evaluate", "absent"],
    ["replay", "absent"],
    ["prune", "absent", "--policies-last", "1"],
    ["rescore", "absent", "--rewards", "x", "--name", "y"],
    ["inspect", "absent"],
    ["ui", "--host", "::"],
]
MISSING_FUNCTION = "[{reward: function, settings: {function: 'mine.py:redness'}}]"
COMMANDS: list[Command] = [
    *((arguments, 2, arguments[-1] if arguments[1] == "--host" else "absent") for arguments in REQUESTS),
    *(([arguments[0], "--help"], 0, "Usage") for arguments in REQUESTS),
    (["--version"], 0, "grpo 0."),
    (["trian"], 2, "train"),
    (["train", "configs/tiny.yaml", "--rnu", "a"], 2, "--run"),
    (["train", "configs/tyni.yaml"], 2, "configs/tiny.yaml"),
    (["train", "configs/tiny.yaml", "--set", "update.learing_rate=1"], 2, "update.learning_rate"),
    (["train", "configs/tiny.yaml", "--set", "data.prompts=data/prompts/shapes_trian.jsonl"], 2, "shapes_train.jsonl"),
    (["train", "configs/tiny_text.yaml", "--set", "policy.model=data/models/tiny-txt"], 2, "policy.model"),
    (["train", "configs/tiny.yaml", "--run", "run😀"], 2, "run.name: got 'run😀'"),
    # What only the files themselves tell.
    (["train", "configs/tiny.yaml", "--set", "data.target_column=trget"], 2, "data.target_column"),
    (["train", "configs/tiny.yaml", "--set", "evaluate.prompts=configs/tiny.yaml"], 2, "evaluate.prompts"),
    (["train", "configs/tiny_text.yaml", "--set", f"rewards={MISSING_FUNCTION}"], 2, "mine.py"),
    (["train", "configs/tiny_text.yaml", "--set", "data.columns=[word]"], 2, "rewards.0.answer"),
    (["train", "configs/tiny.yaml", "--set", "storage.root=/proc/runs"], 2, "storage.root"),
    (["train", "configs/tiny.yaml", "--set", "storage.root=configs/tiny.yaml"], 2, "storage.root"),
    (["train", "configs/tiny.yaml", "--set", "storage.root=configs/tiny.yaml/runs"], 2, "storage.root"),
    (["train", "configs/tiny.yaml", "--set", "data.prompts=http://me:secret@host/p.txt"], 2, "http://***@host/p.txt"),
    (["evaluate", "absent", "--prompts", "http://me:secret@host/p.txt"], 2, "--prompts: got 'http://***@host/p.txt'"),
    (["list", "s3://key:secret@bucket/runs"], 2, "ROOT: got 's3://***@bucket/runs'"),
    (["--show-completion", "bash"], 0, "COMPLETE"),
]


def answer(commands: Sequence[Command], folder: Path) -> None:
    """Give these commands to one program in a folder: each answers with its exit code, and without heavy imports."""
    for name in ("configs", "data"):
        (folder / name).symlink_to(REPOSITORY / name)
    command = [sys.executable, "-c", PROGRAM, json.dumps([arguments for arguments, _, _ in commands])]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    answers = json.loads(ended.stdout)
    for (arguments, code, said), (answered, output, heavy) in zip(commands, answers, strict=True):
        assert (answered, heavy) == (code, []), (arguments, output)
        assert said in output, (arguments, output)


def test_answers_at_once(tmp_path: Path) -> None:
    answer(COMMANDS, tmp_path)


def test_a_typo_and_the_list_of_runs_are_answered_at_once_where_the_run_is_finished(
    finished: Runs, tmp_path: Path
) -> None:
    train = ["train", "runs/run/config.yaml", "--set", "storage.root=runs", "--set"]
    typos = [
        ([*train, "update.lerning_rate=1"], "update.learning_rate"),
        ([*train, "data.prompts=data/prompts/shapes_trian.jsonl"], "shapes_train.jsonl"),
        ([*train, "policy.model=data/models/tiny"], "policy.model"),
        (["inspect", "rnu"], "The nearest of the 1 in runs: run"),
        (["evaluate", "run", "--set", "rollout.temprature=1"], "rollout.temperature"),
        (["evaluate", "run", "--set", "update.learning_rate=1"], "--set"),
        (["replay", "run", "--set", "data.prompts=other.txt"], "--set"),
        (["rescore", "run", "--rewards", "configs/rewards/mx.yaml", "--name", "y"], "configs/rewards/mix.yaml"),
        (["rescore", "run", "--rewards", "mine.yaml", "--name", "y"], "mine.py"),
        (
            ["evaluate", "run", "--prompts", "configs/tiny.yaml", "--set", "evaluate.targets=data/targets"],
            "evaluate.prompts",
        ),
        (["evaluate", "run"], "--prompts"),
        (["replay", "run", "--set", f"rewards={MISSING_FUNCTION}"], "mine.py"),
    ]
    (tmp_path / "mine.yaml").write_text(f"rewards: {MISSING_FUNCTION}")
    answer([*((arguments, 2, said) for arguments, said in typos), (["list", "runs"], 0, "finished")], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "place", "value"),
    [
        (["evaluate", "run@-1"], "RUN", "run@-1"),
        (["evaluate", "run", "--prompts", ""], "--prompts", ""),
        (["replay", "run", "--max-staleness", "-1"], "--max-staleness", -1),
        (["replay", "run", "--run", "../up"], "--run", "../up"),
        (["rescore", "run", "--rewards", "x.yaml", "--name", "../up"], "--name", "../up"),
        (["prune", "absent", "--policies-last", "0"], "--policies-last", 0),
        (["prune", "absent", "--policies-last", "1"], "RUN", "absent"),
    ],
)
def test_commands_name_the_option_and_end_with_2(
    tmp_path: Path, arguments: list[str], place: str, value: object
) -> None:
    ended = CliRunner().invoke(application, [*arguments, "--root", str(tmp_path), "--json"])
    assert ended.exit_code == 2
    (error,) = json.loads(ended.stdout)["errors"]
    assert (error["place"], error["value"]) == (place, value)
    assert error["hint"]
    assert ended.stderr.startswith(f"error: {place}: got {value!r}.")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("a", 1, "Give 2."), 2, "error: a: got 1"),
        (
            StorageError("storage.root", "/full", "the disk is full"),
            1,
            "failed: StorageError: storage.root: got '/full'",
        ),
        (KeyboardInterrupt(), 1, "stopped"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, handle_errors():
        raise error
    assert ended.value.exit_code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("error", [InputError("RUN", "x", "By \x1b]0;x\x07."), RuntimeError("\x1b]0;x\x07")])
def test_a_terminal_obeys_nothing_that_an_error_quotes(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), handle_errors():
        raise error
    assert "⟨U+001B⟩]0;x⟨U+0007⟩" in capsys.readouterr().err


GROUPS: Mapping[str, Mapping[str, str]] = {
    name: getattr(prefect_settings, name) for name in ("CLIENT", "SERVER", "LASTING_SERVER", "WORKER")
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


def test_sigint_reaches_a_program_that_a_script_starts_in_the_background(tmp_path: Path) -> None:
    program = "import flows.command_line.main as program; program.main = {}; program.run()"
    waiting = "lambda: (print('ready', flush=True), __import__('time').sleep(120))"
    command = f'"{sys.executable}" -c "{program.format(waiting)}" & echo $!; wait $!; echo ended $?'
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        assert shell.stdout.readline() == "ready\n"
        os.kill(pid, signal.SIGINT)
        # 128 and the number of SIGINT.
        assert shell.stdout.readline() == "ended 130\n"
