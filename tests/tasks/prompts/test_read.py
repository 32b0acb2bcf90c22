"""Which column holds the prompts, files that are refused, and prompt ids."""

import io
import json

import fsspec
import pytest
from PIL import Image

from tasks.prompts.read import read_prompts
from tests.tasks.reading import Write, refusal, texts


class TestColumnChoice:
    def test_order_of_preference(self, write: Write) -> None:
        names = ["instruction", "Prompts", "Prompt", "prompt_raw", "prompt_en", "prompt"]
        for count in range(1, 7):
            table = ",".join(["other", *names[:count]]) + "\n" + ",".join(["other", *names[:count]]) + "\n"
            (prompt,) = read_prompts(write("set.csv", table))
            assert prompt.text == names[count - 1]
            assert set(prompt.columns) == {"other", *names[: count - 1]}

    def test_a_named_column_wins(self, write: Write) -> None:
        (prompt,) = read_prompts(write("set.csv", "prompt,caption\na,b\n"), column="caption")
        assert (prompt.text, prompt.columns) == ("b", {"prompt": "a"})

    def test_no_prompt_column_lists_what_there_is(self, write: Write) -> None:
        path = write("set.csv", "caption,tag\na,b\n")
        assert "caption, tag" in str(refusal(path))
        assert refusal(path, column="captoin").hint.endswith("Nearest: caption.")


@pytest.mark.parametrize("value", ["null", '""', '" \\t"', "7", '["a"]', '{"text": "a"}'])
def test_a_prompt_that_is_no_text_names_its_line(write: Write, value: str) -> None:
    error = refusal(write("set.jsonl", f'{{"prompt": "a"}}\n\n{{"prompt": {value}}}'))
    assert error.place.endswith("set.jsonl, line 3, column prompt")
    assert error.value == json.loads(value)


def test_a_row_without_the_prompt_column_names_its_line(write: Write) -> None:
    assert refusal(write("set.jsonl", '{"prompt": "a"}\n{"text": "b"}')).place.endswith("line 2, column prompt")


class TestFiles:
    def test_a_missing_file_names_its_neighbours(self, write: Write) -> None:
        path = write("PartiPrompts.tsv", "Prompt\na\n")
        assert refusal(path.with_name("partiprompt.tsv")).hint == (
            "There is no such file. The folder contains: PartiPrompts.tsv."
        )
        assert "nor the folder" in refusal(path.parent / "none" / "x.txt").hint

    def test_a_folder(self, write: Write) -> None:
        assert "set.txt" in refusal(write("set.txt", "a").parent).hint

    @pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "csv", "tsv", "parquet"])
    def test_an_empty_file(self, write: Write, ending: str) -> None:
        assert refusal(write(f"set.{ending}", "")).value == "an empty file"

    @pytest.mark.parametrize(
        ("name", "content"),
        [("a.txt", "\n  \n\t\n"), ("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "prompt,n\n"), ("a.txt", "\ufeff")],
    )
    def test_no_prompts(self, write: Write, name: str, content: str) -> None:
        assert refusal(write(name, content)).value == "no prompts"

    @pytest.mark.parametrize("name", ["set.xlsx", "set.txt.gz", "set"])
    def test_an_unknown_ending(self, write: Write, name: str) -> None:
        assert ".parquet" in refusal(write(name, "prompt\na\n")).hint

    def test_text_that_is_not_utf8_names_its_line(self, write: Write) -> None:
        assert refusal(write("set.txt", "a\nb\ncafé\n".encode("cp1252"))).place.endswith("set.txt, line 3")
        assert refusal(write("set.csv", "prompt\na\n".encode("utf-16"))).value == "UTF-16 text"
        assert refusal(write("set.txt", b"a\nb\0c\n")).place.endswith("set.txt, line 2")

    @pytest.mark.parametrize(("kind", "name"), [("PNG", "PNG"), ("JPEG", "JPEG"), ("GIF", "GIF"), ("WEBP", "WebP")])
    def test_a_renamed_image(self, write: Write, kind: str, name: str) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(buffer, kind)
        assert f"a {name} image" in str(refusal(write("set.txt", buffer.getvalue())))

    def test_a_url(self) -> None:
        filesystem = fsspec.filesystem("memory")
        filesystem.pipe("/prompt-sets/set.tsv", b"Prompt\tn\na\t1\n")
        assert texts(read_prompts("memory://prompt-sets/set.tsv")) == ["a"]
        assert "set.tsv" in refusal("memory://prompt-sets/sett.tsv").hint

    def test_a_url_of_an_unknown_kind(self) -> None:
        assert refusal("nowhere://set.txt").value == "nowhere://set.txt"

    def test_the_home_folder(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write("set.txt", "a\n")
        monkeypatch.setenv("HOME", str(path.parent))
        assert texts(read_prompts("~/set.txt")) == ["a"]


class TestPromptId:
    def test_depends_on_the_text_and_its_occurrence_only(self, write: Write) -> None:
        plain = read_prompts(write("one.txt", "a\nb\na\n"))
        table = read_prompts(write("two.csv", "n,instruction\n1,a\n2,b\n3, a \n"))
        assert [p.prompt_id for p in plain] == [p.prompt_id for p in table]
        assert len({p.prompt_id for p in plain}) == 3
        assert plain[0].prompt_id == read_prompts(write("three.txt", "c\na\n"))[1].prompt_id

    def test_does_not_change_between_releases(self, write: Write) -> None:
        ids = [prompt.prompt_id for prompt in read_prompts(write("set.txt", "a red circle\na red circle\n"))]
        # python -c "import hashlib; print(hashlib.sha256(b'[\"a red circle\", 0]').hexdigest()[:16])"
        assert ids == ["85cb445ee3ccb0e0", "e7c8ed2950c3cb21"]
