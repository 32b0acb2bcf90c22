"""No file may run code, and no token may reach a file, a message or another service."""

import ast
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from starlette.testclient import TestClient

from configs.loader import read_config
from configs.scoring import RewardSection
from flows.rewards.server import create_app
from grpo_core.policies.causal_lm.loading import load_model, load_tokenizer
from grpo_core.policies.causal_lm.loading import read_config as read_model_config
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.settings import AUTOREGRESSIVE, PARTS
from grpo_core.policies.pipeline_loading import load_network
from grpo_core.rewards.remote.reward import RemoteReward
from tasks.execution.errors import ErrorRecord, RemoteStageError
from tasks.storage.parquet import read_table
from tasks.storage.schemas import METRICS
from tests.flows.conftest import REPOSITORY, Runs
from tests.flows.rewards.test_server import serving_app
from tests.flows.test_hostile_files import TOKEN, refusal
from tests.grpo_core.rewards.stub import Reply, serve

MODELS = REPOSITORY / "data" / "models"
CPU = torch.device("cpu")


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.place),)


@pytest.fixture
def exploded(tmp_path: Path) -> Iterator[Path]:
    """A folder that is there once code from a file was run; none of these tests may leave it."""
    place = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(place)))
    place.rmdir()
    yield place
    assert not place.exists()


def hostile_module(exploded: Path) -> str:
    return f"import os\nos.mkdir({str(exploded)!r})\n\n\nclass Evil:\n    pass\n"


class TestModels:
    """A model may be anybody's."""

    @pytest.fixture
    def text_model(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(MODELS / "tiny-text", tmp_path / "text-model"))

    @pytest.fixture
    def image_model(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(MODELS / "tiny-glm-image", tmp_path / "image-model"))

    @pytest.mark.parametrize("raw", [False, True])
    def test_pickled_weights_of_a_language_model(self, text_model: Path, exploded: Path, raw: bool) -> None:
        (text_model / "model.safetensors").unlink()
        bomb = Bomb(exploded)
        if raw:
            (text_model / "pytorch_model.bin").write_bytes(pickle.dumps(bomb, protocol=2))
        else:
            torch.save({"weight": bomb}, text_model / "pytorch_model.bin")
        error = refusal(lambda: load_model(str(text_model), dtype=torch.float32, device=CPU))
        assert (error.place, error.value) == ("policy.model", str(text_model))

    def test_code_next_to_a_language_model(self, text_model: Path, exploded: Path) -> None:
        (text_model / "evil.py").write_text(hostile_module(exploded))
        classes = {f"Auto{kind}": "evil.Evil" for kind in ("Config", "ModelForCausalLM", "Tokenizer")}
        config = json.loads((text_model / "config.json").read_text())
        known = {**config, "auto_map": classes}
        (text_model / "config.json").write_text(json.dumps(known))
        tokenizer = json.loads((text_model / "tokenizer_config.json").read_text())
        hostile = {**tokenizer, "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
        (text_model / "tokenizer_config.json").write_text(json.dumps(hostile))
        assert refusal(lambda: load_tokenizer(str(text_model))).place == "policy.model"
        # transformers has a class of its own for this type and leaves the other alone.
        assert type(load_model(str(text_model), dtype=torch.float32, device=CPU)).__name__ == "LlamaForCausalLM"
        (text_model / "config.json").write_text(json.dumps({**known, "model_type": "evil"}))
        assert refusal(lambda: read_model_config(str(text_model))).place == "policy.model"

    def test_code_among_the_parts_of_a_pipeline(self, image_model: Path, exploded: Path) -> None:
        for place in (image_model, image_model / "scheduler"):
            (place / "evil.py").write_text(hostile_module(exploded))
        index = json.loads((image_model / "model_index.json").read_text())
        (image_model / "model_index.json").write_text(json.dumps({**index, "scheduler": ["evil", "Evil"]}))
        error = refusal(lambda: load_pipeline(str(image_model), dtype=torch.float32, device=CPU))
        assert (error.place, error.value) == ("policy.model", str(image_model))

    def test_pickled_weights_of_a_pipeline(self, image_model: Path, exploded: Path) -> None:
        (image_model / "vision_language_encoder" / "model.safetensors").unlink()
        torch.save({"weight": Bomb(exploded)}, image_model / "vision_language_encoder" / "pytorch_model.bin")
        assert refusal(lambda: load_pipeline(str(image_model), dtype=torch.float32, device=CPU)).place == "policy.model"
        with pytest.raises(OSError, match="safetensors"):
            load_network(str(image_model), PARTS, AUTOREGRESSIVE, torch.float32)


def test_an_extension_type_of_a_table_runs_nothing(tmp_path: Path, exploded: Path) -> None:
    """pyarrow once kept Python types of columns as pickles in the file's schema."""
    path = tmp_path / "metrics.parquet"
    hostile = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(exploded), protocol=0),
    }
    fields = [field.with_metadata(hostile) for field in METRICS]
    pq.write_table(pa.table([[1], ["kl"], [0.5]], schema=pa.schema(fields, metadata=METRICS.metadata)), path)
    assert pq.read_schema(path).field("value").metadata == hostile
    assert read_table(tmp_path, METRICS)["value"].to_pylist() == [0.5]
    assert pl.read_parquet(path)["metric"].to_list() == ["kl"]


def test_an_error_record_builds_no_class_that_it_names(exploded: Path) -> None:
    record = ErrorRecord(kind="os.mkdir", arguments=(str(exploded),), message="", trace="", seconds=0.0)
    assert isinstance(record.error(), RemoteStageError)


class TestNames:
    """What becomes a folder or a file stays where it belongs."""

    OUTSIDE = ("../up", "a/b", "/etc", "..", ".", ".hidden", "", "a\n", "a\0b", "C:\\x", "a" * 101, "name with blanks")

    @pytest.mark.parametrize("name", OUTSIDE)
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("run.name", "{}"),
            ("rewards", '[{{"reward": "jpeg", "name": {}}}]'),
            ("data.datasets", '[{{"name": {}, "prompts": "data/prompts/shapes.jsonl"}}]'),
        ],
    )
    def test_of_runs_rewards_and_datasets(self, key: str, value: str, name: str) -> None:
        override = f"{key}={value.format(json.dumps(name))}"
        error = refusal(lambda: read_config(REPOSITORY / "configs" / "tiny.yaml", [override]))
        assert "name" in error.place
        assert error.value == name


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1", 200), ("localhost:8600", 200), ("[::1]:1", 200), ("evil.example", 400)]
)
def test_a_reward_server_without_a_token_answers_for_this_machine_alone(host: str, status: int) -> None:
    with TestClient(create_app([RewardSection(reward="answer")]), base_url="http://127.0.0.1") as client:
        assert client.get("/v1/describe", headers={"Host": host}).status_code == status
    with TestClient(create_app([RewardSection(reward="answer")], TOKEN), base_url="http://127.0.0.1") as client:
        assert client.get("/v1/describe", headers={"Host": host, "Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_service_that_repeats_the_token_does_not_bring_it_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "sk-hidden-secret")
    with serve() as service:
        reward = RemoteReward(url=service.url, reward="mine", token_env="SERVICE_TOKEN")
        for status, body in ((401, {"error": "unknown token sk-hidden-secret"}), (400, b"Bearer sk-hidden-secret?")):
            service.script(Reply(body, status))
            error = refusal(reward.check_service)
            assert error.value == f"status {status}"
            assert "***" in str(error)
            assert "sk-hidden-secret" not in str(error)


def test_no_file_table_parameter_or_report_contains_the_token(empty: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with serving_app(create_app([RewardSection(reward="answer")], token=TOKEN)) as url:
        empty.start_text(
            run="secret",
            run__iterations=1,
            rollout__prompts_per_iteration=2,
            rollout__group_size=4,
            update__minibatch_size=8,
            evaluate__prompts=None,
            rewards=[{"reward": "remote", "settings": {"url": url, "reward": "answer", "token_env": "REWARD_TOKEN"}}],
        )
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


SOURCES = [
    path for top in ("grpo_core", "tasks", "flows", "configs", "data") for path in (REPOSITORY / top).rglob("*.py")
]


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    trees = ((path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text())) for path in SOURCES)
    kinds = (ast.Call, ast.Import, ast.ImportFrom)
    return [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    return [(path, node, dotted(node.func)) for path, node in nodes() if isinstance(node, ast.Call)]


def dotted(node: ast.expr) -> str:
    """`a.b` of names, `.b` where it is called on something else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(node: ast.AST) -> list[str]:
    """The packages of an import."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


class TestSources:
    """No way to read a pickle, or to run code that lies beside a model, is in the sources at all."""

    UNSAFE_MODULES = ("marshal", "shelve", "dill", "joblib", "cloudpickle", "jsonpickle")
    UNSAFE_CALLS = re.compile(
        r"pickle\.(load|loads|Unpickler)|torch\.(load|save)|(np|numpy)\.load|eval|exec|"
        r"os\.(system|popen)|subprocess\.getoutput"
    )

    def test_nothing_unpickles_or_puts_a_command_line_together_from_text(self) -> None:
        unsafe = [
            f"{path}: {name}"
            for path, call, name in calls()
            if given(call, "shell") == ["True"]
            or (self.UNSAFE_CALLS.fullmatch(name) and (name, given(call, "weights_only")) != ("torch.load", ["True"]))
        ]
        unsafe += [f"{path}: {name}" for path, node in nodes() for name in imports(node) if name in self.UNSAFE_MODULES]
        assert unsafe == []

    def test_remote_code_is_never_trusted(self) -> None:
        trusted = [value for _, call, _ in calls() for value in given(call, "trust_remote_code")]
        assert len(trusted) >= 5
        assert {*trusted} == {"False"}
        automatic = [
            (path, call) for path, call, name in calls() if re.search(r"(\bAuto\w+|Pipeline)\.from_pretrained$", name)
        ]
        assert len(automatic) >= 4
        assert [path for path, call in automatic if not given(call, "trust_remote_code")] == []


def given(call: ast.Call, name: str) -> list[str]:
    """The source of a keyword argument's value."""
    return [ast.unparse(each.value) for each in call.keywords if each.arg == name]
