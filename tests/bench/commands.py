"""What a command costs beside the work of the model, measured from outside as in a shell."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path

import polars as pl

from tasks.metrics import STEP_TIME, WALL_TIME
from tasks.process import CHECKOUT, environment
from tasks.runs.layout import ROLLOUTS, evaluation_folder, iteration_folder
from tasks.storage.artifacts.reference import MANIFEST_ENDING
from tests.bench.page import Row, alternate
from tests.servers import grpo_ui

ROUNDS, ROUNDS_OF_TRAININGS = 5, 3
CONFIG = "configs/tiny_text.yaml"
_GRPO = str(Path(sys.executable).with_name("grpo"))
IMPORTS = "import torch, transformers, prefect"
MISTAKES = {
    "a file that does not exist": ("configs/tiny_txt.yaml",),
    "a wrong key": (CONFIG, "--set", "rollout.group_sise=4"),
    "a wrong value": (CONFIG, "--set", "rollout.group_size=many"),
}
ITERATIONS = 40
SMALL_RUN = (
    f"run.iterations={ITERATIONS}",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=2",
    "update.minibatch_size=4",
    "evaluate.prompts=null",
)


def measure_start() -> Iterator[Row]:
    """How long commands take to begin, beside the imports that they cannot avoid.

    The quickest commands are timed first.
    """
    with tempfile.TemporaryDirectory() as folder:
        shell = _Shell(Path(folder))
        (seconds,) = alternate(ROUNDS, partial(shell.grpo, "--help"))
        yield Row(what="grpo --help", unit="s", ours=seconds, at_most=0.3)
        for mistake, arguments in MISTAKES.items():
            (seconds,) = alternate(ROUNDS, partial(shell.grpo, "train", *arguments, code=2))
            yield Row(what=f"grpo train with {mistake}, to its end", unit="s", ours=seconds, at_most=1.0)
        yield from _first_rollouts(shell)
        again = partial(shell.grpo, *shell.training("finished", *SMALL_RUN))
        (seconds,) = alternate(ROUNDS, again)
        what = f"a finished run of {ITERATIONS} iterations started again, to its end"
        yield Row(what=what, unit="s", ours=seconds, at_most=5.0)


def _first_rollouts(shell: "_Shell") -> Iterator[Row]:
    """Begin trainings in turn with a new PREFECT_HOME and a used one, and stop each after its first rollouts."""
    names = map(str, count())
    lines: list[float] = []
    rollouts: dict[str, list[float]] = {"new": [], "used": []}
    imports: list[float] = []
    # What is used first has to be made: this training does not count.
    shell.begin("prefect-used", next(names))
    for _ in range(ROUNDS_OF_TRAININGS):
        begun = time.perf_counter()
        shell.python(IMPORTS)
        imports.append(time.perf_counter() - begun)
        for home, kept in rollouts.items():
            name = next(names)
            line, stage = shell.begin(f"prefect-{name if home == 'new' else home}", name)
            lines.append(line)
            kept.append(stage)
    yield Row(what="grpo train to its first line", unit="s", ours=tuple(lines), at_most=1.0)
    for (home, kept), goal in zip(rollouts.items(), (2.0, 1.5), strict=True):
        what = f"grpo train to its first rollouts, {home} PREFECT_HOME"
        yield Row(what=what, unit="s", ours=tuple(kept), peer=IMPORTS, theirs=tuple(imports), at_most=goal)


@dataclass(frozen=True)
class _Shell:
    """Commands as a user starts them, with runs and Prefect's files in a folder of their own."""

    folder: Path

    def grpo(self, *arguments: str, code: int = 0) -> None:
        """Run the program to its end, which has to have this exit code."""
        self._run(_GRPO, *arguments, code=code)

    def python(self, program: str) -> None:
        """Run a program to its end in an interpreter of its own."""
        self._run(sys.executable, "-c", program, code=0)

    def _run(self, *command: str, code: int) -> None:
        process = self._start("prefect-used", *command)
        output, _ = process.communicate()
        assert process.returncode == code, output

    def training(self, name: str, *settings: str) -> list[str]:
        """The arguments of a training in a folder of its own: runs of one folder share their results."""
        every = (f"storage.root={self.folder / name}", *settings)
        return ["train", CONFIG, *(part for setting in every for part in ("--set", setting))]

    def begin(self, home: str, name: str) -> tuple[float, float]:
        """Start a training and interrupt it after its first rollouts.

        Returns:
            Seconds to its first line, and until the rollouts are stored.
        """
        begun = time.perf_counter()
        with self._start(home, _GRPO, *self.training(name)) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            line = time.perf_counter() - begun
            # A log has no line of a stage that is as short as these.
            patterns = [f"*/{each}/{ROLLOUTS}{MANIFEST_ENDING}" for each in (evaluation_folder(0), iteration_folder(1))]
            while not (stored := any(any(Path(self.folder, name).glob(each)) for each in patterns)):
                if process.poll() is not None:
                    break
                time.sleep(0.01)
            rollouts = time.perf_counter() - begun
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
        assert stored, first + rest
        return line, rollouts

    def _start(self, home: str, *command: str) -> "subprocess.Popen[str]":
        variables = environment(PREFECT_HOME=str(self.folder / home), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        return subprocess.Popen(
            command, cwd=CHECKOUT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


AT_MOST = 0.2
SPANS = ((2, 10), (45, 55), (90, 100))
"""First and last iterations of the rows; the first iteration of a run loads the model."""

REWARDS, PROMPTS, GROUP_SIZE, TOKENS = (1, 4), (2, 20, 200), 2, 4
ITERATIONS_OF_SIZES = 12


def measure_orchestration() -> Iterator[Row]:
    """What an iteration costs beside its stages: Prefect, commits, records, reports; early and late, small and large.

    The model has as little work as there can be; the server is a temporary one, then a lasting one.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        variables: dict[str, Mapping[str, str]] = {"temporary": {"PREFECT_HOME": f"{folder}/prefect"}}
        for prompts in PROMPTS:
            run = Path(folder, f"prompts-{prompts}")
            seconds = _seconds(run, variables["temporary"], ITERATIONS_OF_SIZES, prompts=prompts)
            what = f"no stage's, {prompts * GROUP_SIZE} rows in {prompts} groups, an iteration"
            yield Row(what=what, unit="s", ours=seconds[1:], at_most=AT_MOST)
        ui = servers.enter_context(grpo_ui(Path(folder, "server"), {}))
        variables["lasting"] = {"PREFECT_HOME": f"{folder}/client", "PREFECT_API_URL": ui.api_url}
        for (server, chosen), rewards in product(variables.items(), REWARDS):
            run = Path(folder, f"{server}-{rewards}")
            seconds = _seconds(run, chosen, SPANS[-1][1], rewards=rewards)
            for first, last in SPANS:
                counted = "1 reward" if rewards == 1 else f"{rewards} rewards"
                what = f"no stage's, {counted}, {server} server, iterations {first} to {last}"
                yield Row(what=what, unit="s", ours=seconds[first - 1 : last], at_most=AT_MOST)


def _seconds(
    root: Path, variables: Mapping[str, str], iterations: int, *, prompts: int = PROMPTS[0], rewards: int = 1
) -> tuple[float, ...]:
    """Train in a process and a folder of its own; for each iteration, its seconds without those of its stages."""
    rows = prompts * GROUP_SIZE
    settings = {
        "run.name": "bench",
        "run.iterations": iterations,
        "storage.root": root,
        "rollout.prompts_per_iteration": prompts,
        "rollout.prompts_per_batch": prompts,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_completion_length": TOKENS,
        "rewards": json.dumps([{"reward": "answer", "name": f"answer-{number}"} for number in range(rewards)]),
        "update.minibatch_size": rows,
        "update.micro_batch_size": rows,
        "evaluate.prompts": "null",
    }
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "flows.command_line.main", "train", CONFIG, *chosen]
    own = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **variables)
    ended = subprocess.run(command, cwd=CHECKOUT, env=own, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    table = pl.read_parquet(root / "bench" / "iteration_*" / "metrics.parquet")
    measured = table.pivot("metric", index="iteration", values="value").sort("iteration")
    return tuple((measured[WALL_TIME] - measured[STEP_TIME]).to_list())
