"""Every stored text says who sampled it, and the gate of an update names the engine of its rows."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.placement import PlacementSection
from configs.rollouts import VllmSection
from configs.scoring import RewardSection
from configs.training import ParitySection
from grpo_core.parity import ParityError
from grpo_core.policies.trained.settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tasks.execution.resources import run_resources
from tasks.rewards.score_rewards import score_reward_task
from tasks.rollouts import vllm
from tasks.runs.layout import SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.grpo_core.policies.engines.test_vllm import Vllm
from tests.grpo_core.rewards.stub import Asked, Reply, serve
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of
from tests.tiny_policies import TEXT_MODEL

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
        assert vllm._copied(tmp_path / "own", target) == target
        copyfile(source, copy)

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    assert vllm._copied(tmp_path / "own", target) == target
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        name: name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
    }
    assert list(target.parent.iterdir()) == [target]


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
