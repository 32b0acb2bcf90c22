"""The server of a run, gone with it whatever was killed; and stored texts that say which engine sampled them."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from configs.placement import PlacementSection
from configs.rollouts import VllmSection
from configs.scoring import RewardSection
from configs.training import ParitySection
from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.engines.vllm_server import Server
from grpo_core.policies.trained.settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from grpo_core.services import Service
from tasks.execution import server_process
from tasks.execution.errors import LostStageError
from tasks.execution.resources import run_resources
from tasks.rewards.score_rewards import score_reward_task
from tasks.rollouts import vllm, vllm_server
from tasks.rollouts.vllm_server import PLACE, VllmServer
from tasks.runs.layout import SCORES_FILE, VLLM_LOG
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import heard_of
from tests.grpo_core.policies.engines.test_vllm import Vllm
from tests.grpo_core.rewards.stub import Asked, Reply, serve
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of
from tests.tiny_policies import TEXT_MODEL

# As vLLM's: it starts a process of its own, which ignores that its parent has died and that it should end.
ENGINE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
PROGRAM = f"""
import http.server, json, os, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], stdout=subprocess.PIPE)
engine.stdout.readline()

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if well or self.path != "/health" else 503)
        self.end_headers()
        told = dict(pids=[os.getpid(), engine.pid], path=os.environ.get("PYTHONPATH"), arguments=sys.argv[1:])
        self.wfile.write(json.dumps(told).encode())

    def do_POST(self):
        global well
        well = False
        self.do_GET()

well = True
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
COMMAND = (sys.executable, "-c", PROGRAM)
SECONDS = 60.0
RUN = """
import sys
from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.store import ArtifactStore

print(VllmServer().ensure_running(sys.argv[2:], ArtifactStore(sys.argv[1], "run"), 60.0), flush=True)
sys.stdin.read()
"""


def told(url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/", timeout=SECONDS) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def processes(url: str) -> list[psutil.Process]:
    """The server, its engine, and the guard over both."""
    pids = told(url)["pids"]
    server, engine = map(psutil.Process, pids)
    return [server, engine, psutil.Process(server.ppid())]


def are_gone(found: list[psutil.Process]) -> bool:
    return psutil.wait_procs(found, timeout=30)[1] == []


def await_end(child: psutil.Process) -> None:
    """Return when a child of this process has ended; its exit code stays for who started it."""
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def kill_guard(url: str) -> list[psutil.Process]:
    """Kill the guard; the server, its engine, and what is left of the guard."""
    found = processes(url)
    found[2].kill()
    await_end(found[2])
    return found


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server_process, vllm_server):
        monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def server() -> Iterator[VllmServer]:
    server = VllmServer()
    yield server
    server.close()


def test_a_run_has_one_server_which_ends_with_it(server: VllmServer, store: ArtifactStore, tmp_path: Path) -> None:
    assert os.environ["PYTHONPATH"]
    url = server.ensure_running(COMMAND, store, SECONDS)
    first = processes(url)
    assert server.ensure_running(list(COMMAND), store, SECONDS) == url
    assert processes(url) == first
    # The checkout's packages are not the server's.
    assert told(url)["path"] is None
    other = server.ensure_running((*COMMAND, "--model", "b", "--port={port}", "--port", "{port}"), store, SECONDS)
    assert are_gone(first)
    port = other.rpartition(":")[2]
    # Without an address vLLM listens on every interface.
    host = ["--host", "127.0.0.1"]
    assert told(other)["arguments"] == ["--model", "b", f"--port={port}", "--port", port, *host]
    second = processes(other)
    server.close()
    assert are_gone(second)
    assert '"GET /health HTTP/1.1" 200' in (tmp_path / "runs" / "run" / VLLM_LOG).read_text()


def test_a_dead_server_is_started_again(
    server: VllmServer, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_SECONDS_TO_LIVE", 0.0)
    url = server.ensure_running(COMMAND, store, SECONDS)
    for killed in ([1, 0], [2]):
        before = processes(url)
        for index in killed:
            # The guard may have ended it already.
            with contextlib.suppress(psutil.NoSuchProcess):
                before[index].kill()
        await_end(before[2])
        again, heard = heard_of(lambda: server.ensure_running(COMMAND, store, SECONDS))
        assert again == url
        assert are_gone(before)
        assert ["SIGKILL" in line for line in heard.lines] == [True]


def test_one_that_dies_again_at_once_is_lost(server: VllmServer, store: ArtifactStore) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    kill_guard(url)
    assert server.ensure_running(COMMAND, store, SECONDS) == url
    found = kill_guard(url)
    with pytest.raises(LostStageError, match="SIGKILL"):
        server.ensure_running(COMMAND, store, SECONDS)
    assert are_gone(found)
    assert processes(server.ensure_running(COMMAND, store, SECONDS))


def test_a_server_that_is_not_well_is_started_again(server: VllmServer, store: ArtifactStore) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    first = processes(url)
    urllib.request.urlopen(f"{url}/", data=b"", timeout=SECONDS).close()
    assert server.ensure_running(COMMAND, store, SECONDS) == url
    assert are_gone(first)


def test_one_that_is_started_again_waits_for_its_port(server: VllmServer, store: ArtifactStore) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    assert are_gone(kill_guard(url)[:1])
    # As by a server that was killed and has not ended yet.
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))) as still_there:
        threading.Timer(0.2, still_there.close).start()
        assert server.ensure_running(COMMAND, store, SECONDS) == url


def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "runs"), *COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        found = processes(run.stdout.readline().strip())
        run.kill()
    assert are_gone(found)


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        ("raise SystemExit('no such model')", SECONDS),
        ("import os; os.kill(os.getpid(), 9)", SECONDS),
        ("import time; time.sleep(600)", 0.5),
    ],
)
def test_one_that_does_not_start_says_why(server: VllmServer, store: ArtifactStore, code: str, seconds: float) -> None:
    command = (sys.executable, "-c", code)
    with pytest.raises((InputError, LostStageError)) as caught:
        server.ensure_running(command, store, seconds)
    if "model" in code:
        assert isinstance(caught.value, InputError)
        assert caught.value.place == PLACE
        assert "no such model" in caught.value.hint
        # The next attempt is a new one.
        assert server.ensure_running(COMMAND, store, SECONDS)
    else:
        assert isinstance(caught.value, LostStageError)


def test_a_bucket_gets_the_log_of_a_server_that_does_not_start(server: VllmServer) -> None:
    store = ArtifactStore("memory://served", "run")
    with pytest.raises(InputError):
        server.ensure_running((sys.executable, "-c", "raise SystemExit('no such model')"), store, SECONDS)
    assert store.read_file(VLLM_LOG) == b"no such model\n"


def test_what_cannot_start_is_told(server: VllmServer, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_SECONDS_TO_END", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (("/nowhere/vllm", "serve"), (*COMMAND, "--port", port), (*COMMAND, "--port", "x")):
            with pytest.raises(InputError) as caught:
                server.ensure_running(command, store, SECONDS)
            assert caught.value.place == PLACE
            assert str(caught.value.value).startswith(" ".join(command))


def test_the_last_lines_of_a_log_are_what_failed() -> None:
    frame = '(EngineCore pid=7) ERROR 11-27 13:05:11 [core.py:402]   File "/vllm/core.py", line 12, in run\n'
    log = f"(Worker pid=3) INFO 11-27 13:05:11 [a.py:1] Loading\nTraceback (most recent call last):\n{frame}    run()\n"
    log += "ValueError: too small\n(APIServer pid=2) ValueError: too small\n\n"
    assert vllm_server.condensed(log.splitlines()) == ["Loading", "ValueError: too small"]


SHIFT = 1e-5
"""Of each stored log-prob against the policy's: above rounding, and below what the gate allows an engine."""


def test_rows_and_the_gate_name_the_engine(store: ArtifactStore, tmp_path: Path) -> None:
    def rows_of(rollouts: ArtifactRef) -> pl.DataFrame:
        return pl.read_parquet(sorted(store.local_files(rollouts).glob("*.parquet")))

    with run_resources(), serve() as stub:
        own = rows_of(TEXTS.collect())
        by_seed = {row["seed"]: row for row in own.to_dicts()}

        def answer(body: dict[str, Any], number: int) -> Reply:
            row = by_seed[body["seed"]]
            choice = {
                "token_ids": row["token_ids"],
                "prompt_token_ids": body["prompt"],
                "finish_reason": "stop" if row["finished"] else "length",
                "logprobs": {
                    "token_logprobs": [value - SHIFT for value in row["rollout_logprobs"]],
                    "top_logprobs": None,
                },
            }
            return Reply({"model": body["model"], "choices": [choice]})

        served = Vllm(stub)
        served.fail = answer
        rollout = TEXTS.rollout.model_copy(update={"engine": "vllm", "vllm": VllmSection(url=stub.url)})
        by_server = replace(TEXTS, rollout=rollout)
        rollouts = by_server.collect()
        columns = ("engine", "engine_version", "engine_dtype", "engine_adapter")
        assert own.select(columns).unique().rows() == [("policy", None, "float32", None)]
        assert rows_of(rollouts).select(columns).unique().rows() == [("vllm", "0.32.0", "float32", None)]
        assert rows_of(rollouts)["token_ids"].to_list() == own["token_ids"].to_list()
        update = UPDATE.model_copy(update={"parity": ParitySection(mean_difference=SHIFT / 10)})
        with pytest.raises(ParityError) as refused:
            alone(job_of(by_server, rollouts, advantages_of(rollouts), update=update), tmp_path / "refused")
        assert refused.value.report.sampled_by == "vllm 0.32.0 in float32"
        assert refused.value.tolerance.share_beyond == 1e-3
        assert alone(job_of(by_server, rollouts, advantages_of(rollouts)), tmp_path / "made").rows == 7


def test_what_the_template_begins_is_stored_and_belongs_to_the_form(store: ArtifactStore, tmp_path: Path) -> None:
    template = TEXT_MODEL / "chat_template.jinja"
    thinks = shutil.copytree(TEXT_MODEL, tmp_path / "model") / template.name
    thinks.write_text(template.read_text().replace("<|assistant|>'", "<|assistant|><think>\\n'"))
    begun = replace(TEXTS, policy=TEXTS.policy.model_copy(update={"model": str(thinks.parent)}))
    form = RewardSection(reward="format", settings={"pattern": "<think>\n.*"})
    placement = PlacementSection(devices="cpu")
    with run_resources():
        for modality, value in ((TEXTS, 0.0), (begun, 1.0)):
            rollouts = modality.collect()
            rows = pl.read_parquet(sorted(store.local_files(rollouts).glob("*.parquet")))
            # A table without a beginning is what it always was.
            assert ("completion_start" in rows.columns) is bool(value)
            assert not rows["completion"].str.contains("<think>").any()
            scores = score_reward_task.fn(rollouts, form, rollouts.folder, "", placement)
            assert set(pl.read_parquet(store.local_files(scores) / SCORES_FILE)["value"]) == {value}


def test_stages_that_overlap_sample_with_their_own_settings(store: ArtifactStore) -> None:
    policy = PolicyRef(version=0, digest=TEXTS.spec().digest)
    with run_resources(), serve() as stub:
        served = Vllm(stub)
        training = TEXTS.rollout.model_copy(update={"engine": "vllm", "vllm": VllmSection(url=stub.url, concurrency=4)})
        evaluation = training.model_copy(update={"temperature": 0.5, "vllm": VllmSection(url=stub.url, concurrency=2)})

        def asked_by(sampler: Any) -> tuple[int, set[float]]:
            served.asked.clear()
            sampler.sample_tokens(TEXTS.prompts, 2, range(4))
            return sampler.engine.concurrency, {body["temperature"] for body in served.asked}

        # Rollouts of the next iteration, while a policy is evaluated.
        with vllm.sampling(policy, TEXTS.spec(), training, None, lambda rows: None) as (ahead, _):
            with vllm.sampling(policy, TEXTS.spec(), evaluation, None, lambda rows: None) as (heldout, _):
                assert asked_by(ahead) == (4, {1.0})
                assert asked_by(heldout) == (2, {0.5})
            assert asked_by(ahead) == (4, {1.0})


def test_stages_that_copy_one_adapter_at_once_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        (tmp_path / "own" / name).write_text(name)
    target, copyfile = tmp_path / "shared" / "adapter", shutil.copyfile

    def interrupted(source: Path, copy: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copyfile)
        # Another stage begins and ends meanwhile.
        assert vllm._copied(tmp_path / "own", target)
        copyfile(source, copy)

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    assert not vllm._copied(tmp_path / "own", target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        name: name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
    }
    assert list(target.parent.iterdir()) == [target]


def test_copies_of_adapters_go_with_what_servers_have_loaded(tmp_path: Path) -> None:
    own, shared, servers = tmp_path / "own", tmp_path / "shared", vllm.VllmServers()
    own.mkdir()
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        (own / name).write_text(name)
    server = Server(Service("http://127.0.0.1:1", 1.0, None, PLACE), "model", "model", 64, "1")
    servers._servers["here"] = server
    (shared / "of another process").mkdir(parents=True)

    def left() -> set[str]:
        return {path.name for path in shared.iterdir()} - {"of another process"}

    with servers.copied(own, shared / "first") as first:
        with servers.copied(own, shared / "first"):
            assert (first / ADAPTER_FILE).read_text() == ADAPTER_FILE
        assert left() == {"first"}
        server.loaded.append("first")
    with servers.copied(own, shared / "second"), servers.copied(own, shared / "of another process"):
        server.loaded.append("second")
    assert left() == {"first", "second"}
    server.loaded.remove("first")
    with servers.copied(own, shared / "third"):
        assert left() == {"first", "second", "third"}
    assert left() == {"second"}
    server.loaded.insert(0, "earlier")
    # The server has ended.
    servers.close()
    assert [path.name for path in shared.iterdir()] == ["of another process"]


def test_a_server_that_answers_nobody_holds_no_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    released, asked = threading.Event(), list[str]()
    with serve() as stub:
        known = Vllm(stub)

        def respond(requested: Asked) -> Reply:
            asked.append(requested.path)
            if requested.path == "/v1/unload_lora_adapter":
                released.wait(60)
            return known.respond(requested)

        stub.respond = respond
        servers = vllm.VllmServers()
        (server,) = servers.of(VllmSection(url=stub.url))
        server.loaded += ["one", "other"]
        monkeypatch.setattr(vllm, "SECONDS_TO_UNLOAD", 0.1)
        servers.close()
        # The second is not asked for any more.
        assert asked.count("/v1/unload_lora_adapter") == 1
        released.set()
