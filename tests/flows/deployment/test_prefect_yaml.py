"""prefect.yaml: the deployments of the shipped tiny run, as `prefect deploy --all` registers them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.settings import PREFECT_API_URL

from configs.loader import read_config, read_rewards_file
from configs.validation import validated
from flows.deployment.deploy import job_variables
from flows.pipeline.requests import RescoreRequest
from tests.flows.conftest import REPOSITORY, TINY
from tests.flows.deployment.deployed import on_the_server

FILE = REPOSITORY / "prefect.yaml"


def described() -> dict[str, dict[str, Any]]:
    return {each["entrypoint"]: each for each in yaml.safe_load(FILE.read_text())["deployments"]}


def flow_at(entrypoint: str) -> Flow[..., Any]:
    module, _, name = entrypoint.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Flow)
    return found


def test_its_training_is_the_shipped_configuration() -> None:
    read = flow_at("flows.training.train.train").validate_parameters(
        described()["flows.training.train.train"]["parameters"]
    )
    assert read["config"] == read_config(TINY)


def test_its_other_flows_ask_for_what_there_is() -> None:
    requested = described()["flows.evaluation.evaluate.evaluate"]["parameters"]
    request = flow_at("flows.evaluation.evaluate.evaluate").validate_parameters(requested)["request"]
    assert (request.run, request.policy) == ("tiny", None)
    form = validated(RescoreRequest, described()["flows.rescoring.rescore.rescore"]["parameters"]["request"])
    assert read_rewards_file(form.rewards, "rewards").rewards


def test_its_runs_are_started_as_those_of_grpo_deploy() -> None:
    assert [each["work_pool"]["job_variables"] for each in described().values()] == [job_variables("process")] * 3


@pytest.mark.slow
def test_prefect_registers_it_without_questions(server: None, tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("prefect"))
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(tmp_path)}
    commands = (
        ["work-pool", "create", "training", "--type", "process", "--overwrite"],
        ["--no-prompt", "deploy", "--all"],
    )
    for command in commands:
        ended = subprocess.run(
            [program, *command],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    found = on_the_server("tiny")
    assert sorted(found) == ["grpo evaluate/tiny-evaluate", "grpo rescore/tiny-rescore-likeness", "grpo train/tiny"]
    training = found["grpo train/tiny"]
    assert training.concurrency_options is not None
    assert training.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert training.enforce_parameter_schema
    (schedule,) = training.schedules
    assert not schedule.active
    assert not training.pull_steps
