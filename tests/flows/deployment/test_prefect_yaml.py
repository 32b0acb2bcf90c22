"""prefect.yaml: what `prefect deploy` registers is what `grpo deploy configs/tiny.yaml` registers."""

import yaml

from configs.loader import read_config
from flows.deployment.deploy import ONE_AT_A_TIME, job_variables
from flows.training.train import train
from tests.flows.conftest import REPOSITORY, TINY


def test_it_is_the_training_of_the_shipped_configuration() -> None:
    (described,) = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert described["entrypoint"] == f"{train.fn.__module__}.{train.fn.__name__}"
    assert train.validate_parameters(described["parameters"])["config"] == read_config(TINY)
    assert described["work_pool"]["job_variables"] == job_variables("process")
    strategy = ONE_AT_A_TIME.collision_strategy.value
    assert described["concurrency_limit"] == {"limit": 1, "collision_strategy": strategy}
