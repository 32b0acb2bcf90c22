"""Repositories of `datasets` in local folders: splits, subsets, streams, messages, and what is refused."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import polars as pl
import pytest

from grpo_core.errors import InputError
from tasks.prompts import hub
from tasks.prompts.hub import DatasetChoice, names_dataset
from tests.tasks.reading import read, refusal, texts

CARD = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/train.parquet}, {split: test, path: easy/test.parquet}]
- config_name: hard
  data_files: [{split: train, path: hard/train.parquet}]
---
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A repository as on the Hub: a card with two subsets in Parquet, one with images; beside it one of JSON."""
    folder = tmp_path_factory.mktemp("datasets") / "repository"
    image = {"bytes": b"\x89PNG", "path": "a.png"}
    rows = {
        "question": [f"question {row}" for row in range(5)],
        "rules": ["be brief", None, "", "be kind", "be brief"],
        "prompt": [[{"role": "user", "content": f"hello {row}"}] for row in range(5)],
        "answer": list(range(5)),
        "image": [image] * 5,
    }
    for name, number in (("train", 5), ("test", 2)):
        path = folder / "easy" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pl.DataFrame(rows).head(number).write_parquet(path)
    (folder / "hard").mkdir()
    rows = {"prompt": [f"hard {row}" for row in range(3)], "level": [0.0, 0.5, 1.0]}
    pl.DataFrame(rows).write_parquet(folder / "hard" / "train.parquet")
    (folder.parent / "lines").mkdir()
    pl.DataFrame(rows).write_ndjson(folder.parent / "lines" / "train.jsonl")
    (folder / "README.md").write_text(CARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder.parent / "cache"))
        yield str(folder)


def test_a_split_of_a_subset(repository: str) -> None:
    prompts = read(repository, choice=DatasetChoice("test", "easy"), column="question")
    assert texts(prompts) == ["question 0", "question 1"]
    assert prompts[1].columns == {"rules": None, "prompt": [{"role": "user", "content": "hello 1"}], "answer": 1}
    sliced = read(repository, choice=DatasetChoice("train[3:]", "easy"), column="question", columns=["answer"])
    assert [(prompt.text, prompt.columns) for prompt in sliced] == [
        ("question 3", {"answer": 3}),
        ("question 4", {"answer": 4}),
    ]


def test_a_stream_ends_at_its_limit_and_is_the_same_prompts(repository: str) -> None:
    # The columns of JSON are known from its rows only.
    lines = str(Path(repository).parent / "lines")
    for source, subset, column in ((repository, "easy", "question"), (lines, None, "prompt")):
        streamed = read(source, choice=DatasetChoice(None, subset, streaming=True), limit=2, column=column)
        assert len(streamed) == 2
        assert streamed == read(source, choice=DatasetChoice("train", subset), limit=2, column=column)
    error = refusal(repository, choice=DatasetChoice(None, "easy", streaming=True))
    assert (error.place, error.value) == ("data.streaming", True)


def test_columns_become_messages(repository: str, tmp_path: Path) -> None:
    choice = DatasetChoice("train", "easy")
    prompts = read(repository, choice=choice, column={"system": "rules", "user": "question"}, columns=["answer"])
    system = {"role": "system", "content": "be brief"}
    users = [{"role": "user", "content": f"question {row}"} for row in range(2)]
    # Without rules there is no system message.
    assert [json.loads(prompt.text) for prompt in prompts[:2]] == [[system, users[0]], [users[1]]]
    assert prompts[0].columns == {"answer": 0}
    (tmp_path / "set.csv").write_text("rules,question\nbe brief,question 0\n")
    (same,) = read(tmp_path / "set.csv", column={"system": "rules", "user": "question"})
    assert (same.text, same.prompt_id) == (prompts[0].text, prompts[0].prompt_id)
    assert "question" in refusal(repository, choice=choice, column={"user": "questoin"}).hint
    (tmp_path / "empty.jsonl").write_text('{"rules": "a", "question": null}\n')
    assert refusal(tmp_path / "empty.jsonl", column={"system": "rules", "user": "question"}).place.endswith("question")


def test_a_column_of_messages_is_a_conversation(repository: str) -> None:
    prompts = read(repository, choice=DatasetChoice("train", "easy"))
    assert json.loads(prompts[4].text) == [{"role": "user", "content": "hello 4"}]


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        (DatasetChoice("dev", "easy"), "data.prompts"),
        (DatasetChoice("train"), "data.prompts"),
        (DatasetChoice("train", "medium"), "data.prompts"),
        (DatasetChoice(revision="main"), "data.revision"),
    ],
)
def test_a_choice_that_the_repository_does_not_have(repository: str, choice: DatasetChoice, place: str) -> None:
    assert refusal(repository, choice=choice, column="question").place == place


def test_names_of_the_hub_offline_are_one_message() -> None:
    for name in ("hf://datasets/owner/name", "hf://owner/name", "owner/name@v1"):
        error = refusal(name)
        assert (error.place, error.value) == ("data.prompts", name)
        assert "HF_HUB_OFFLINE" in error.hint
    error = refusal("owner/name@v1", choice=DatasetChoice(revision="v2"))
    assert (error.place, error.value) == ("data.revision", "v2")


def test_paths_are_told_from_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    plain = DatasetChoice()
    assert names_dataset("owner/name", plain)
    assert not names_dataset("data/missing", plain)
    for file in ("owner/name.jsonl", "hf://datasets/owner/name/data/train.parquet", "a/b/c", "name", "s3://owner/name"):
        assert not names_dataset(file, plain)
    assert names_dataset("data/missing", DatasetChoice(split="train"))


def test_the_commit_of_a_name_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the Hub is asked: its files cannot be read here."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in ("/api/datasets/owner/name", "/api/datasets/owner/name/revision/v1")
            body = json.dumps({"id": "owner/name", "sha": "c" * 40}).encode() if known else b""
            self.send_response(200 if known else 404)
            self.send_header("X-Error-Code", "RevisionNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    huggingface_hub.close_session()
    try:
        assert hub._located("owner/name", DatasetChoice()) == ("owner/name", None, "c" * 40)
        assert hub._located("hf://datasets/owner/name@v1", DatasetChoice()) == ("owner/name", "v1", "c" * 40)
        with pytest.raises(InputError) as caught:
            hub._located("owner/name", DatasetChoice(revision="none"))
        assert (caught.value.place, caught.value.value) == ("data.prompts", "owner/name")
    finally:
        huggingface_hub.close_session()
        server.shutdown()
        server.server_close()
