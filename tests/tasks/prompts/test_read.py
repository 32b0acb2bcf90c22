"""Prompts of files, folders and `datasets` repositories: columns, messages, names, and what is refused."""

import codecs
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import huggingface_hub
import polars as pl
import pytest

from grpo_core.errors import InputError
from tasks.prompts import hub_datasets
from tasks.prompts.hub_datasets import DatasetChoice, names_dataset
from tasks.prompts.read import read_prompts
from tests.grpo_core.rewards.stub import Asked, Reply, reach, serve
from tests.tasks.stage_calls import Write, parquet_bytes, read, refusal, texts

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


def test_paths_and_names_of_the_hub_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    plain = DatasetChoice()
    assert names_dataset("owner/name", plain)
    assert not names_dataset("data/missing", plain)
    for file in ("owner/name.jsonl", "hf://datasets/owner/name/data/train.parquet", "a/b/c", "name", "s3://owner/name"):
        assert not names_dataset(file, plain)
    assert names_dataset("data/missing", DatasetChoice(split="train"))


def test_a_bucket_without_credentials_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    error = refusal("s3://bucket/prompts.txt")
    assert (error.place, error.value) == ("data.prompts", "s3://bucket/prompts.txt")


def test_the_commit_of_a_name_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the Hub is asked: its files cannot be read here."""

    def respond(requested: Asked) -> Reply:
        if requested.path in ("/api/datasets/owner/name", "/api/datasets/owner/name/revision/v1"):
            return Reply({"id": "owner/name", "sha": "c" * 40})
        return Reply(b"", 404, {"X-Error-Code": "RevisionNotFound"})

    with serve() as stub:
        stub.respond = respond
        reach(stub, monkeypatch)
        assert hub_datasets._located("owner/name", DatasetChoice()) == ("owner/name", None, "c" * 40)
        assert hub_datasets._located("hf://datasets/owner/name@v1", DatasetChoice()) == ("owner/name", "v1", "c" * 40)
        with pytest.raises(InputError) as caught:
            hub_datasets._located("owner/name", DatasetChoice(revision="none"))
        assert (caught.value.place, caught.value.value) == ("data.prompts", "owner/name")
        huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        # A byte order mark, CRLF, blank lines and no final newline.
        (
            "a.txt",
            b'\xef\xbb\xbfa red circle\r\n\r\n   \r\n  a "blue" square \r\nlast',
            ["a red circle", '  a "blue" square ', "last"],
        ),
        # Only line ends separate prompts.
        ("a.TXT", "one\u2028still one\x0cand\x85on\ntwo\rthree", ["one\u2028still one\x0cand\x85on", "two", "three"]),
        ("a.csv", b'prompt\r\n"a\r\nb\rc"\r\n', ["a\r\nb\rc"]),
        ("a.csv", '"Prompt"\t"n"\n"BUZZ"\t"1"\n', ["BUZZ"]),
        # Strings, in one array or by line.
        ("a.json", '["a", " b "]', ["a", " b "]),
        ("a.jsonl", '"a"\n\n"b"\n', ["a", "b"]),
        # UTF-16 in either byte order, and compressed text.
        ("a.txt", codecs.BOM_UTF16_LE + "ü\r\n\U0001f642".encode("utf-16-le"), ["ü", "\U0001f642"]),
        ("a.csv", codecs.BOM_UTF16_BE + "Caption,n\nü,1\n".encode("utf-16-be"), ["ü"]),
        ("a.json", '["ü"]'.encode("utf-16"), ["ü"]),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0), ["a"]),
        # New symbols, which Python does not know yet, and letters joined by a format character.
        ("a.txt", "\U0001fae9\nनी\u200dह\n", ["\U0001fae9", "नी\u200dह"]),
    ],
)
def test_prompts_of_a_file(write: Write, name: str, content: str | bytes, prompts: list[str]) -> None:
    assert texts(read(write(name, content))) == prompts


def test_limit_takes_the_first(write: Write) -> None:
    path = write("set.txt", "a\nb\nc\n")
    assert read(path, limit=2) == read(path)[:2]
    assert len(read(path, limit=9)) == 3
    assert refusal(path, limit=0).place == "data.limit"


class TestJson:
    def test_columns_keep_their_json_values_and_an_array_names_the_item(self, write: Write) -> None:
        row = {"tag": "two", "include": [{"class": "cow", "count": 2}], "prompt": "two cows", "w": 0.5, "x": None}
        prompts = read(write("set.jsonl", json.dumps(row) + '\n\n{"prompt": "\\u00fc"}'))
        assert texts(prompts) == ["two cows", "ü"]
        assert prompts[0].columns == {key: value for key, value in row.items() if key != "prompt"}
        assert prompts[1].columns == {}
        assert refusal(write("set.json", '[{"prompt": "a"}, "b"]')).place.endswith("set.json, item 2")
        assert refusal(write("set.json", '["a", ["b"]]')).place.endswith("set.json, item 2")
        assert refusal(write("set.json", '["a", " "]')).place.endswith("set.json, item 2, column prompt")

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            ('{"prompt": "a"}\n\n{"prompt": }', 3),
            ('{"prompt": "a"}\n["b"]', 2),
            ('{"prompt": "a"}\n"b"', 2),
            ('"a"\n{"prompt": "b"}', 2),
            ('{"prompt": "a", "x": NaN}', 1),
            ('{"prompt": "a", "x": 1e999}', 1),
            ('{"prompt": "a \\ud83d"}', 1),
            ('{"prompt": "a"} {"prompt": "b"}', 1),
            ('[{"prompt": "a"},\n {"prompt": "b"},,\n]', 2),
            ('{"prompt": "a"}\n' + '{"x":' * 100_000, 2),
        ],
    )
    def test_invalid_json_names_the_line(self, write: Write, content: str, line: int) -> None:
        error = refusal(path := write("set.jsonl", content))
        assert error.place == f"data.prompts: {path}, line {line}"
        assert len(str(error)) < 500


class TestColumnChoice:
    @pytest.mark.parametrize(
        ("header", "chosen"),
        [
            ("other,instruction,Prompts,PROMPT_RAW,Prompt_en,prompt", "prompt"),
            ("other,instruction,Prompts,PROMPT_RAW,Prompt_en", "Prompt_en"),
            ("other,instruction,Prompts,PROMPT_RAW", "PROMPT_RAW"),
            ("other,instruction,Prompts", "Prompts"),
            ("text,other,Instruction", "Instruction"),
            ("text,other,PROMPT", "PROMPT"),
            ("caption,prompt", "prompt"),
            ("TEXT,url", "TEXT"),
            ("Caption,image", "Caption"),
        ],
    )
    def test_order_of_preference(self, write: Write, header: str, chosen: str) -> None:
        file = read_prompts(write("set.csv", f"{header}\n{header}\n"))
        assert (file.column, file.prompts[0].text) == (chosen, chosen)
        assert set(file.prompts[0].columns) == {*header.split(",")} - {chosen}

    @pytest.mark.parametrize("header", ["text,Caption", "prompt,n,Prompt", "TEXT,text"])
    def test_several_that_may_be_the_prompt_are_refused(self, write: Write, header: str) -> None:
        path = write("set.csv", f"{header}\n{header}\n")
        assert refusal(path).value == f"columns {header.replace(',n,', ',').replace(',', ', ')}"
        for name in header.split(","):
            assert texts(read(path, column=name)) == [name]

    def test_no_prompt_column_lists_what_there_is(self, write: Write) -> None:
        path = write("set.csv", "subject,tag\na,b\n")
        assert refusal(path).value == "columns subject, tag"
        error = refusal(path, column="subjetc")
        assert (error.value, "subject" in error.hint) == ("no column subjetc", True)


class TestColumnsAlong:
    CONTENT: ClassVar = {
        "set.csv": "prompt,tag,n,url\na,x,1,u\n",
        "set.tsv": "prompt\ttag\tn\turl\na\tx\t1\tu\n",
        "set.jsonl": '{"prompt": "a", "tag": "x", "n": 1, "url": "u"}',
        "set.json": '[{"prompt": "a", "tag": "x", "n": 1, "url": "u"}]',
        "set.parquet": parquet_bytes({"prompt": ["a"], "tag": ["x"], "n": [1], "url": ["u"]}),
    }

    @pytest.mark.parametrize("name", CONTENT)
    def test_only_those_that_are_named(self, write: Write, name: str) -> None:
        path = write(name, self.CONTENT[name])
        assert read(path)[0].columns == {"tag": "x", "n": 1, "url": "u"}
        assert read(path, columns=["n", "tag"])[0].columns == {"tag": "x", "n": 1}
        assert read(path, columns=["n", "prompt"], also=["url", "absent"])[0].columns == {"n": 1, "url": "u"}
        assert read(path, columns=[])[0].columns == {}
        assert read(path, columns=[])[0].prompt_id == read(path)[0].prompt_id
        error = refusal(path, columns=["tga"])
        assert (error.place, error.value, "tag" in error.hint) == ("data.columns", "tga", True)


@pytest.mark.parametrize("value", ["null", '""', '" \\t"', "7", '["a"]', '{"text": "a"}', None])
def test_a_prompt_that_is_no_text_or_missing_names_its_line(write: Write, value: str | None) -> None:
    row = '{"text": "b"}' if value is None else f'{{"prompt": {value}}}'
    error = refusal(write("set.jsonl", f'{{"prompt": "a"}}\n\n{row}'))
    assert error.place.endswith("set.jsonl, line 3, column prompt")
    assert error.value == json.loads(row).get("prompt")


class TestFiles:
    def test_a_missing_file_names_its_neighbours(self, write: Write) -> None:
        path = write("PartiPrompts.tsv", "Prompt\na\n")
        for missing, named in (("partiprompt.tsv", "PartiPrompts.tsv"), ("none/x.txt", "none")):
            error = refusal(path.parent / missing)
            assert (error.place, error.value) == ("data.prompts", str(path.parent / missing))
            assert named in error.hint

    def test_a_url_and_the_home_folder(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        filesystem = fsspec.filesystem("memory")
        filesystem.pipe("/prompt-sets/set.tsv", b"Prompt\tn\na\t1\n")
        assert texts(read("memory://prompt-sets/set.tsv")) == ["a"]
        assert "set.tsv" in refusal("memory://prompt-sets/sett.tsv").hint
        assert texts(read("memory://prompt-sets")) == ["a"]
        assert refusal("nowhere://set.txt").value == "nowhere://set.txt"
        path = write("set.txt", "a\n")
        monkeypatch.setenv("HOME", str(path.parent))
        assert texts(read("~/set.txt")) == ["a"]


class TestFolders:
    def test_each_text_file_is_one_prompt(self, tmp_path: Path) -> None:
        for name, text in [("10.txt", "ten"), ("2.txt", "\n two\n\n"), ("1.TXT", "one\r\n"), (".3.txt", "hidden")]:
            (tmp_path / name).write_text(text)
        (tmp_path / "1.png").write_bytes(b"no prompt")
        (tmp_path / "more").mkdir()
        file = read_prompts(f"{tmp_path}/")
        assert [(each.text, each.columns["file_name"]) for each in file.prompts] == [
            ("one", "1.TXT"),
            (" two", "2.txt"),
            ("ten", "10.txt"),
        ]
        assert (file.folder, file.prompts[0].prompt_id) == (str(tmp_path), read(tmp_path / "1.TXT")[0].prompt_id)

    def test_shards_are_one_file(self, tmp_path: Path) -> None:
        rows = [{"prompt": text, "n": n} for n, text in enumerate("abca")]
        (tmp_path / "whole.jsonl").write_text("\n".join(map(json.dumps, rows)))
        kinds = {"jsonl": lambda part: "\n".join(map(json.dumps, part)).encode(), "parquet": pl.DataFrame}
        for ending in kinds:
            folder = tmp_path / ending
            folder.mkdir()
            for number, part in enumerate([rows[:3], rows[3:]]):
                path = folder / f"part-{number:04d}.{ending}"
                path.write_bytes(parquet_bytes(part) if ending == "parquet" else kinds["jsonl"](part))
            assert read(folder) == read(tmp_path / "whole.jsonl")

    def test_a_column_has_one_type_in_all_shards(self, tmp_path: Path) -> None:
        (tmp_path / "1.csv").write_text("prompt,code\na,1\n")
        (tmp_path / "2.csv").write_text("prompt,code\nb,x\n")
        assert [prompt.columns["code"] for prompt in read(tmp_path)] == ["1", "x"]

    @pytest.mark.parametrize(
        ("names", "found"),
        [(["a.txt", "b.jsonl", "c.txt"], " with .jsonl (b.jsonl), .txt (a.txt)"), (["a.png", "b.md"], ""), ([], "")],
    )
    def test_what_does_not_say_which_files(self, tmp_path: Path, names: list[str], found: str) -> None:
        for name in names:
            (tmp_path / name).write_text("a\n")
        error = refusal(tmp_path)
        assert (error.place, error.value) == ("data.prompts", f"{tmp_path}{found}")

    @pytest.mark.parametrize(
        ("name", "content", "value"),
        [
            ("2.txt", "a\nb\n", "2 lines"),
            ("2.txt", " \n", "0 lines"),
            ("2.txt", "\u200b", "\u200b"),
            ("2.jsonl", '{"caption": "b"}', "no column prompt"),
        ],
    )
    def test_one_file_that_is_unlike_the_others(self, tmp_path: Path, name: str, content: str, value: str) -> None:
        (tmp_path / "1").with_suffix(Path(name).suffix).write_text('"a"' if name.endswith("jsonl") else "a")
        (tmp_path / name).write_text(content)
        error = refusal(tmp_path)
        assert (name in error.place, error.value) == (True, value)


class TestPromptId:
    def test_depends_on_the_text_and_its_occurrence_only(self, write: Write) -> None:
        plain = read(write("one.txt", "a\nb\na\n"))
        table = read(write("two.csv", "n,instruction\n1,a\n2,b\n3,a\n"))
        assert [p.prompt_id for p in plain] == [p.prompt_id for p in table]
        assert len({p.prompt_id for p in plain}) == 3
        assert plain[0].prompt_id == read(write("three.txt", "c\na\n"))[1].prompt_id
        ids = [prompt.prompt_id for prompt in read(write("set.txt", "a red circle\na red circle\n"))]
        # python -c "import hashlib; print(hashlib.sha256(b'[\"a red circle\", 0]').hexdigest()[:16])"
        assert ids == ["85cb445ee3ccb0e0", "e7c8ed2950c3cb21"]
