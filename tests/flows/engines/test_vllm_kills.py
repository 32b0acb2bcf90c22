"""A run whose server is killed, that is killed itself, or both, ends as if nothing had happened, and leaves nothing."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from prefect.settings import PREFECT_API_URL

from tasks.runs.layout import VLLM_LOG
from tests.flows.conftest import TINY_TEXT, Runs, Start
from tests.flows.engines.conftest import Servers, settings, started_server

ANSWERED = '"POST /v1/completions HTTP/1.1" 200'
SECONDS = 1800.0


class Run:
    """A training process that starts its server."""

    def __init__(self, runs: Runs, given: Mapping[str, object], folder: Path) -> None:
        self.runs, self._given, self._output = runs, given, folder / "output"
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "OMP_NUM_THREADS": "1"}
        sets = [part for each in self.runs.overrides({}, run__name="text", **self._given) for part in ("--set", each)]
        command = [sys.executable, "-m", "flows.command_line.main", "train", str(TINY_TEXT), *sets, "--json"]
        with self._output.open("ab") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def answers(self) -> int:
        """How many rows all of its servers have answered so far."""
        log = self.runs.path(VLLM_LOG, run="text")
        return log.read_text(errors="replace").count(ANSWERED) if log.exists() else 0

    def servers(self) -> list[psutil.Process]:
        """The processes of the server that runs now: its guard, the server, its engine and the engine's worker."""
        children = psutil.Process(self.process.pid).children()
        guards = [child for child in children if "guard_main" in " ".join(child.cmdline())]
        return [each for guard in guards for each in (guard, *guard.children(recursive=True))]

    def kill(self, what: str, chance: random.Random) -> None:
        """Kill the server, or the run, or both, and see that nothing is left of a run that was killed."""
        servers = self.servers()
        if what in ("server", "both"):
            chance.choice(servers).kill()
        if what in ("run", "both"):
            self.process.kill()
            self.process.wait()
            assert psutil.wait_procs(servers, timeout=60)[1] == []
            self.process = self._started()


def test_kills_at_random_moments_change_nothing(
    model: Path, servers: Servers, trained: tuple[Runs, Start], tmp_path: Path
) -> None:
    golden, first = trained
    # One server at a time.
    servers.close()
    chance = random.Random(int(os.environ.get("CHAOS_SEED", "0")))
    given = settings(model, started_server("--max-model-len", "128"), run__iterations=3)
    run = Run(Runs(tmp_path / "runs"), given, tmp_path)
    try:
        for what in ("server", "run", "both"):
            before, least = run.answers(), chance.randint(1, 12)
            until = time.monotonic() + SECONDS
            while run.answers() < before + least:
                assert run.process.poll() is None, run.output
                assert time.monotonic() < until, run.output
                time.sleep(0.02)
            run.kill(what, chance)
        last: list[psutil.Process] = []
        while run.process.poll() is None:
            assert time.monotonic() < until, run.output
            # At the end it goes between two looks.
            with contextlib.suppress(psutil.NoSuchProcess):
                last = run.servers() or last
            time.sleep(0.5)
        assert run.process.returncode == 0, run.output
        assert last
        assert psutil.wait_procs(last, timeout=60)[1] == []
    finally:
        run.process.kill()
    assert json.loads(run.output.splitlines()[-1])["policy_digest"] == first.summary.policy_digest
    assert run.runs.tables("text") == golden.tables("text")
