"""Trainings with rollouts of a vLLM server: the numbers are those of the policy itself, and faults are refused."""

import json
import os
import shutil
from pathlib import Path

import httpx
import polars as pl
import pytest

from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.engines import vllm
from grpo_core.policies.engines.vllm_server import adapter_name
from tests.flows.conftest import Runs, Start, flip, refused
from tests.flows.engines.conftest import RANK, Servers, save_other_adapter, settings

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
