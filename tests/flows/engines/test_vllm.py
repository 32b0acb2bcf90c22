"""Rollouts of a vLLM server, of texts and images: numbers are the policy's own, faults are refused, kills survived."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import polars as pl
import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from data.recipes.grounding import SIDE
from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.engines import vllm
from grpo_core.policies.engines.vllm_server import adapter_name
from tasks.runs.layout import VLLM_LOG
from tests.flows.conftest import REPOSITORY, TINY_TEXT, Runs, Start, flip, refused
from tests.flows.engines.conftest import RANK, Servers, save_other_adapter, settings, started_server

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
NEAR = 2e-5
"""Of log-probs in fp32, in nats."""
DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture
def url(servers: Servers) -> str:
    """A server as it should be."""
    return servers.url()


def rows(runs: Runs, iteration: int, run: str = "text") -> pl.DataFrame:
    return pl.read_parquet(runs.path(f"iteration_{iteration:06d}", "rollouts", "part-*.parquet", run=run))


def test_the_server_samples_what_the_policy_scores(trained: tuple[Runs, Start]) -> None:
    runs, _ = trained
    for iteration in (1, 2, 3):
        assert 0 < runs.metrics(iteration, "text")[DIFFERENCE] <= NEAR
        sampled = rows(runs, iteration)
        assert set(sampled["engine"]) == {"vllm"}
        adapter = None if iteration == 1 else runs.policy_digest(iteration - 1, "text")
        assert set(sampled["engine_adapter"]) == {adapter}
        for group in sampled.partition_by("group_id"):
            assert group["seed"].n_unique() == len(group)
            # By chance two short answers of a group may be the same.
            assert group["token_ids"].n_unique() > 1
    steps = [runs.steps(version, "text") for version in (1, 2, 3)]
    assert all(step["grad_norm"].min() > 0 for step in steps)


def test_the_same_run_again_is_the_same(
    server: None, model: Path, url: str, trained: tuple[Runs, Start], tmp_path: Path
) -> None:
    golden, first = trained
    runs = Runs(tmp_path / "runs")
    again = runs.start_text(**settings(model, {"url": url, "concurrency": 3}, run__iterations=3))
    for iteration in (1, 2, 3):
        assert rows(runs, iteration)["token_ids"].to_list() == rows(golden, iteration)["token_ids"].to_list()
    assert again.summary.policy_digest == first.summary.policy_digest


def test_another_temperature_is_scored_as_it_was_sampled(empty: Runs, model: Path, url: str) -> None:
    empty.start_text(**settings(model, {"url": url}, rollout__temperature=0.7))
    assert 0 < empty.metrics(2, "text")[DIFFERENCE] <= NEAR


def test_a_wrong_adapter_is_refused_by_name(
    empty: Runs, model: Path, url: str, trained: tuple[Runs, Start], tmp_path: Path
) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    given = settings(model, {"url": url, "adapter_folder": str(shared)}, run__iterations=2)
    save_other_adapter(model, other)
    # It stands where the first trained adapter is copied to.
    digest = trained[0].policy_digest(1, "text")
    shutil.copytree(other, shared / adapter_name("text", digest))
    with pytest.raises(ParityError) as caught:
        empty.start_text(**given)
    assert caught.value.report.max_difference > 0.05
    assert set(caught.value.report.worst_samples) <= set(rows(empty, 2)["sample_id"])
    assert not empty.path("policies", "000002", run="text").exists()


def require_refused(runs: Runs, given: dict[str, object], url: str, count: int = 1) -> None:
    """The server is refused by its address, for so many reasons, before anything is sampled."""
    errors = refused(lambda: runs.start_text(**given))
    assert [(error.place, error.value) for error in errors] == [("rollout.vllm.url", url)] * count
    assert not runs.path("iteration_000001", run="text").exists()


def test_a_server_for_lower_ranks_refuses_the_adapter(empty: Runs, model: Path, url: str) -> None:
    require_refused(empty, settings(model, {"url": url}, policy__lora={"rank": 2 * RANK}), url)


def test_a_folder_that_the_server_does_not_see_is_refused(empty: Runs, model: Path, url: str, tmp_path: Path) -> None:
    # The path means this folder in this process alone.
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        require_refused(empty, settings(model, {"url": url, "adapter_folder": f"/proc/self/fd/{descriptor}"}), url)
    finally:
        os.close(descriptor)


def test_another_model_behind_the_address_is_refused(empty: Runs, model: Path, url: str, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    flip(other / "model.safetensors")
    require_refused(empty, settings(other, {"url": url}), url)


def test_two_runs_on_one_server_are_refused(empty: Runs, model: Path, url: str, tmp_path: Path) -> None:
    save_other_adapter(model, tmp_path / "other")
    name = {"lora_name": adapter_name("other", "a" * 64)}
    httpx.post(f"{url}/v1/load_lora_adapter", json={**name, "lora_path": str(tmp_path / "other")}).raise_for_status()
    try:
        require_refused(empty, settings(model, {"url": url}), url)
    finally:
        httpx.post(f"{url}/v1/unload_lora_adapter", json=name).raise_for_status()


def test_one_seed_for_all_rows_is_refused(empty: Runs, model: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = vllm.request_of
    monkeypatch.setattr(vllm, "request_of", lambda model, prompt, seed, rule: own(model, prompt, 7, rule))
    with pytest.raises(InputError) as caught:
        empty.start_text(**settings(model, {"url": url}))
    assert (caught.value.place, caught.value.value) == ("rollout.vllm.url", url)


def test_a_servers_own_tokenizer_and_defaults_of_sampling_change_nothing(
    empty: Runs, model: Path, servers: Servers, trained: tuple[Runs, Start], tmp_path: Path
) -> None:
    defaults = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 2.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    other = shutil.copytree(model, tmp_path / "other") / "tokenizer.json"
    tokenizer = json.loads(other.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other.write_text(json.dumps(tokenizer))
    url = servers.url("--generation-config", str(tmp_path), "--tokenizer", str(other.parent))
    start = empty.start_text(**settings(model, {"url": url}, run__iterations=3))
    assert start.summary.policy_digest == trained[1].summary.policy_digest


def test_what_a_server_cannot_do_is_reported_together(empty: Runs, model: Path, servers: Servers) -> None:
    # Raw log-probs, a context shorter than prompts and completions, and no adapters.
    url = servers.url(adapters=False, logprobs="raw_logprobs", context=16)
    require_refused(empty, settings(model, {"url": url}), url, count=3)


GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
HALF = (SIDE // 2) ** 2


@pytest.fixture
def vision_url(servers: Servers, vision_model: Path) -> str:
    """A server that brings images to a quarter of their pixels."""
    size = {"shortest_edge": HALF, "longest_edge": HALF}
    options = ("--enable-scale-out", "--mm-processor-kwargs", json.dumps({"size": size}))
    return servers.url(*options, model=vision_model)


def given(model: Path, url: str, pixels: int) -> dict[str, object]:
    own: dict[str, object] = {
        "policy__freeze_vision": True,
        "rollout__min_pixels": pixels,
        "rollout__max_pixels": pixels,
    }
    # Half of the answers of a model that has just begun to learn: coordinates are 0 to 56.
    own |= {"rewards": [{"reward": "format", "settings": {"pattern": "[1-3].*"}}]}
    return {"file": GROUNDING, **settings(model, {"url": url}, rollout__max_completion_length=6, **own)}


def test_images_are_read_as_the_policy_reads_them(
    server: None, empty: Runs, vision_model: Path, vision_url: str, tmp_path: Path
) -> None:
    first = empty.start_text(**given(vision_model, vision_url, HALF))
    for iteration in (1, 2):
        assert 0 < empty.metrics(iteration, "text")[DIFFERENCE] <= NEAR
        sampled = rows(empty, iteration)
        assert set(sampled["engine"]) == {"vllm"}
        assert sampled["token_ids"].n_unique() > 4
        assert empty.steps(iteration, "text")["grad_norm"].min() > 0
    assert set(rows(empty, 2)["engine_adapter"]) == {empty.policy_digest(1, "text")}
    again = Runs(tmp_path / "again").start_text(**given(vision_model, vision_url, HALF))
    assert again.summary.policy_digest == first.summary.policy_digest


def test_a_server_that_brings_images_to_another_size_is_refused(
    empty: Runs, vision_model: Path, vision_url: str
) -> None:
    require_refused(empty, given(vision_model, vision_url, SIDE**2), vision_url)


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
