"""A service's token stays in the environment: nothing that is written contains it."""

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from flows.rewards.server import create_app
from grpo_core.errors import InputError
from grpo_core.rewards.text.answer import AnswerReward
from tests.flows.conftest import Runs
from tests.flows.rewards.test_server import serving_app

TOKEN = "sk-3141592653589793-not-for-files"


def remote(url: str, **settings: object) -> list[dict[str, object]]:
    return [{"reward": "remote", "settings": {"url": url, "reward": "answer", **settings}}]


def small(**changes: object) -> dict[str, object]:
    sizes = {"rollout__prompts_per_iteration": 2, "rollout__group_size": 4, "update__minibatch_size": 8}
    return {"run__iterations": 1, **sizes, "update__micro_batch_size": 8, "evaluate__prompts": None, **changes}


def test_no_file_table_parameter_or_report_contains_the_token(empty: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with serving_app(create_app({"answer": AnswerReward()}, token=TOKEN)) as url:
        empty.start_text(run="secret", **small(rewards=remote(url, token_env="REWARD_TOKEN")))
    files = [path for path in empty.root.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in str(empty.tables("secret"))  # the bytes of tables are compressed
    assert "REWARD_TOKEN" in empty.path("config.yaml", run="secret").read_text()
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["secret"])))
        written = [run.model_dump_json(), *(each.model_dump_json() for each in client.read_artifacts())]
        assert "REWARD_TOKEN" in written[0]
        assert [each for each in written if TOKEN in each] == []


@pytest.mark.parametrize(
    ("url", "settings"),
    [(f"http://me:{TOKEN}@127.0.0.1:9", {}), ("http://127.0.0.1:9", {"token_env": TOKEN})],
)
def test_a_token_in_the_configuration_is_refused_and_not_repeated(
    empty: Runs, url: str, settings: dict[str, object]
) -> None:
    with pytest.raises(InputError) as caught:
        empty.start_text(run="secret", **small(rewards=remote(url, **settings)))
    assert "token_env" in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert not Path(empty.path(run="secret")).exists()
