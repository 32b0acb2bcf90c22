"""Layouts of prompts that people publish: what the model reads, what rewards get, what people see, or one refusal.

The oracle is TRL's own data utilities, over the rows as `datasets` gives them.
"""

import csv
import datetime
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

from grpo_core.policies.causal_lm.prompts import encode_prompt, prompt_ids
from grpo_core.policies.causal_lm.settings import CausalLMSettings, Context
from grpo_core.rewards.functions.reward import FunctionReward
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.messages import shown_prompt, shown_question
from tasks.prompts.source_images import SourceColumns
from tests.grpo_core.policies.causal_lm.model_types import make_tokenizer
from tests.grpo_core.rewards.functions.conftest import spied
from tests.tasks.stage_calls import png, read, refusal

Row = Mapping[str, Any]


def turns(*pairs: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more} for role, content in pairs]


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


ASKED = ("user", "2+2?")
BRIEF = ("system", "be brief")
TEXTS: dict[str, Row] = {
    "a text": {"prompt": "2+2?", "answer": "4"},
    "white space at its ends": {"prompt": "\n  def f(x):\n    return "},
    "a number as text": {"prompt": "42", "solution": "007"},
    "JSON that is no conversation": {"prompt": '[1, 2, {"role": 3}] sorted?'},
    "other letters": {"prompt": "Größe ≤ 5 🙂\n\n?"},
}
MESSAGES: dict[str, Row] = {
    "a user's message": {"prompt": turns(ASKED), "answer": "4"},
    "a system message": {"prompt": turns(BRIEF, ASKED)},
    "an empty system message": {"prompt": turns(("system", ""), ASKED)},
    "white space in messages": {"prompt": turns(("system", " a\n"), ("user", "\n  b  "))},
    "several turns": {"prompt": turns(ASKED, ("assistant", "4"), ("user", "and 3+3?"))},
    "the assistant's beginning": {"prompt": turns(ASKED, ("assistant", "Let me see. <think>"))},
    "the beginning ends in white space": {"prompt": turns(ASKED, ("assistant", "So\n"))},
    "null keys": {"prompt": turns(ASKED, name=None, tool_calls=None, reasoning_content=None)},
    "a name": {"prompt": turns(BRIEF, ASKED, name="Ann")},
    "a key of one message": {"prompt": [*turns(BRIEF), *turns(ASKED, name="Ann")]},
    "earlier reasoning": {"prompt": [*turns(ASKED), *turns(("assistant", "4"), thinking="2 and 2"), *turns(ASKED)]},
    "a tool's answer": {"prompt": [*turns(ASKED), *turns(("tool", "4"), tool_call_id="a")]},
    "another role": {"prompt": turns(("developer", "be brief"), ASKED)},
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": turns(ASKED),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    },
    "a column of tools": {"prompt": turns(ASKED), "tools": [{"type": "function", "function": {"name": "add"}}]},
    "no arguments of the template": {"prompt": turns(ASKED), "chat_template_kwargs": None},
    "numbers as text": {"prompt": turns(("user", "42")), "answer": "42"},
    "quotes and line ends": {"prompt": turns(("user", 'a "b",\n[{"role": 1}]\t🙂'))},
}
BLOCKS: dict[str, Row] = {
    "a block": {"prompt": turns(("user", [block("2+2?")]))},
    "several blocks": {
        "prompt": turns(("system", [block("be "), block("brief")]), ("user", [block("2"), block("+2?")]))
    },
    "null keys of blocks": {"prompt": turns(("user", [block("2+2?", image=None, image_url=None)]))},
    "the assistant's beginning in a block": {"prompt": turns(("user", [block("2?")]), ("assistant", [block("So ")]))},
}

TURN = "{%- for m in messages -%}<{{ m.role }}{{ ' ' + m.name if m.name is defined else '' }}>"
THOUGHT = "{{ '[' + m.reasoning_content + ']' if m.reasoning_content is defined else '' }}"
GENERATION = "<|end|>{%- endfor -%}{{ '<|assistant|>' if add_generation_prompt else '' }}"
TEMPLATES = {
    "tiny-text": make_tokenizer().chat_template,
    "keys": TURN + THOUGHT + "{{ m.content }}" + GENERATION,
    "trimmed, begins to think": TURN + "{{ m.content | trim }}" + GENERATION.replace("|>'", "|><think>\n'"),
}
KNOWS_BLOCKS = TURN + (
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for b in m.content -%}"
    "{{ '<image>' if b.type == 'image' or 'image' in b else b.text }}{%- endfor -%}{%- endif -%}" + GENERATION
)


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def as_trl(prompt: Any, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    if not is_conversational({"prompt": prompt}):
        ids: list[list[int]] = tokenizer(text=[prompt])["input_ids"]
        return ids[0]
    printed = apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
    found: list[int] = tokenizer(printed, add_special_tokens=False)["input_ids"]
    return found


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps(list(rows), ensure_ascii=False)


def as_lines(rows: Sequence[Row]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def _cell(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def as_table(rows: Sequence[Row]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL)
    writer.writerow(rows[0])
    writer.writerows([[_cell(each) for each in row.values()] for row in rows])
    return buffer.getvalue()


WRITERS: dict[str, Callable[[Sequence[Row]], str]] = {"set.json": as_json, "set.jsonl": as_lines, "set.csv": as_table}
FORMATS = ("set.json", "set.csv", "set.parquet")


def written(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    path = folder / name
    if name in WRITERS:
        path.write_text(WRITERS[name](rows), newline="")
    else:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def as_datasets(name: str, row: Row) -> Row:
    """The row as `datasets` has it: Arrow gives all structs of a column the same keys."""
    found: Row = dict(Dataset.from_list([dict(row)])[0]) if name == "set.parquet" else row
    return found


PLAIN = CausalLMSettings(chat_template=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", TEXTS)
def test_texts_are_read_as_in_trl(tmp_path: Path, case: str, name: str) -> None:
    row, tokenizer = TEXTS[case], make_tokenizer()
    (prompt,) = read(written(tmp_path, name, [row]))
    assert prompt_ids(tokenizer, PLAIN, prompt.text) == as_trl(row["prompt"], tokenizer)
    assert shown_prompt(prompt.text) == shown_question(prompt.text) == row["prompt"]
    assert prompt.columns == {key: value for key, value in row.items() if key != "prompt"}
    assert given_to_rewards(tmp_path, prompt.text) == (row["prompt"], "4")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_read_as_in_trl(tmp_path: Path, case: str, name: str) -> None:
    row = as_datasets(name, MESSAGES[case])
    (prompt,) = read(written(tmp_path, name, [MESSAGES[case]]))
    for template in (*TEMPLATES.values(), KNOWS_BLOCKS):
        tokenizer = tokenizer_of(template)
        ids = as_trl(row["prompt"], tokenizer)
        assert prompt_ids(tokenizer, CausalLMSettings(), prompt.text) == ids
        # What engines are asked for.
        assert encode_prompt(tokenizer, CausalLMSettings(), prompt.text, context=Context()).ids == ids
    assert given_to_rewards(tmp_path, prompt.text) == (row["prompt"], turns(("assistant", "4")))
    assert shown_prompt(prompt.text) == "\n".join(f"{each['role']}: {each['content']}" for each in row["prompt"])
    assert shown_question(prompt.text) == [each["content"] for each in row["prompt"] if each["role"] == "user"][-1]


@pytest.mark.parametrize("name", ["set.json", "set.parquet", "set.csv"])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_are_their_texts(tmp_path: Path, case: str, name: str) -> None:
    row = as_datasets(name, BLOCKS[case])
    (prompt,) = read(written(tmp_path, name, [BLOCKS[case]]))
    joined = [{**each, "content": "".join(b["text"] for b in each["content"])} for each in row["prompt"]]
    filled = [
        {**each, "content": [{key: value for key, value in b.items() if value is not None} for b in each["content"]]}
        for each in row["prompt"]
    ]
    blocks = tokenizer_of(KNOWS_BLOCKS)
    assert prompt_ids(blocks, CausalLMSettings(), prompt.text) == as_trl(filled, blocks) == as_trl(joined, blocks)
    # A template of texts refuses a list, or prints it as Python does; one may leave it out.
    silent = TURN + "{{ m.content if m.content is string else '' }}" + GENERATION
    for template in (*TEMPLATES.values(), silent):
        tokenizer = tokenizer_of(template)
        assert prompt_ids(tokenizer, CausalLMSettings(), prompt.text) == as_trl(joined, tokenizer)
    assert given_to_rewards(tmp_path, prompt.text) == (row["prompt"], turns(("assistant", "4")))
    assert shown_prompt(prompt.text) == "\n".join(f"{each['role']}: {each['content']}" for each in joined)


def test_a_template_that_reads_blocks_keeps_what_it_makes_of_them(tmp_path: Path) -> None:
    """Not every template joins blocks without anything between them."""
    (prompt,) = read(written(tmp_path, "set.json", [BLOCKS["several blocks"]]))
    tokenizer = tokenizer_of("{% for m in messages %}{% for b in m.content %}({{ b.text }}){% endfor %}{% endfor %}")
    assert prompt_ids(tokenizer, CausalLMSettings(), prompt.text) == tokenizer.encode("(be )(brief)(2)(+2?)")


SPY = """
calls = []
def score(prompts, completions, **columns):
    calls.append((prompts, completions))
    return [0.0] * len(prompts)
"""


def given_to_rewards(folder: Path, prompt: str) -> tuple[Any, Any]:
    """What a function gets for a prompt and its completion `4`."""
    path = folder / "spy.py"
    path.write_text(SPY)
    FunctionReward(function=f"{path}:score").score(ScoringBatch(["s"], [prompt], completions=["4"]))
    (((prompt,), (completion,)),) = spied(str(path))
    return prompt, completion


REFUSED: dict[str, tuple[Sequence[Row], str]] = {
    "no content": ([{"prompt": turns(("user", None))}], "message 1, content"),
    "a missing content": ([{"prompt": [{"role": "user"}]}], "message 1, content"),
    "a call of a tool": (
        [{"prompt": [*turns(ASKED), {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]}],
        "message 2, tool_calls",
    ),
    "a number as content": ([{"prompt": turns(("user", 42))}], "message 1, content"),
    "an object as content": ([{"prompt": turns(("user", {"text": "a"}))}], "message 1, content"),
    "an image": ([{"prompt": turns(("user", [block("a"), {"type": "image"}]))}], "message 1, content, block 2"),
    "a video": ([{"prompt": turns(BRIEF, ("user", [{"type": "video"}]))}], "message 2, content, block 1"),
    "a text as block": ([{"prompt": turns(("user", ["a"]))}], "message 1, content, block 1"),
    "no text in a block": ([{"prompt": turns(("user", [{"type": "text", "text": None}]))}], "content, block 1, text"),
    "no message": ([{"prompt": [*turns(ASKED), "a"]}], "message 2"),
    "no role": ([{"prompt": [*turns(ASKED), {"content": "a"}]}], "message 2, role"),
    "nobody is answered": ([{"prompt": turns(BRIEF)}], "message 1, role"),
    "ShareGPT": ([{"prompt": [{"from": "human", "value": "2+2?"}]}], "line 1, column prompt"),
    "an empty list": ([{"prompt": []}], "line 1, column prompt"),
    "a list of texts": ([{"prompt": ["a", "b"]}], "line 1, column prompt"),
    "one message": ([{"prompt": {"role": "user", "content": "a"}}], "line 1, column prompt"),
    "messages as text": ([{"prompt": json.dumps(turns(ASKED))}], "line 1, column prompt"),
    "texts and messages": ([{"prompt": "2+2?"}, {"prompt": turns(ASKED)}], "line 2, column prompt"),
    "messages and texts": ([{"prompt": turns(ASKED)}, {"prompt": "2+2?"}], "line 2, column prompt"),
    "arguments of the template": (
        [{"prompt": turns(ASKED), "chat_template_kwargs": {"enable_thinking": False}}],
        "line 1, column chat_template_kwargs",
    ),
    "conversations without prompt": ([{"conversations": turns(ASKED)}], "set.jsonl"),
    "a conversation with its answer": ([{"messages": turns(ASKED, ("assistant", "4"))}], "set.jsonl"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_prompt_is_refused_with_row_and_key(tmp_path: Path, case: str) -> None:
    rows, place = REFUSED[case]
    error = refusal(written(tmp_path, "set.jsonl", rows))
    assert error.place.endswith(place)
    assert f"line {len(rows)}" in error.place or "set.jsonl" in place


def test_a_conversation_of_another_column_is_taken_where_it_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "set.jsonl", [{"messages": turns(ASKED, ("assistant", "4"))}])
    (prompt,) = read(path, column="messages")
    tokenizer = tokenizer_of(TEMPLATES["tiny-text"])
    assert tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), prompt.text)).endswith("<|assistant|>4")


def test_null_arguments_of_the_template_are_none(tmp_path: Path) -> None:
    row = {"prompt": turns(ASKED), "chat_template_kwargs": {"enable_thinking": None}}
    (prompt,) = read(written(tmp_path, "set.parquet", [row]))
    assert json.loads(prompt.text) == row["prompt"]


def test_messages_that_python_printed_into_a_table_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text(f'prompt\n"{turns(ASKED)}"\n')
    assert refusal(tmp_path / "set.csv").place.endswith("line 2, column prompt")


def test_answers_of_tables_stay_text(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "answer": "4", "Solution": "007", "ground_truth": "1.0", "level": "3", "share": "0.5"}
    (prompt,) = read(written(tmp_path, "set.csv", [row]))
    assert prompt.columns == {"answer": "4", "Solution": "007", "ground_truth": "1.0", "level": 3, "share": 0.5}


def test_a_table_with_semicolons_says_so(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text("prompt;answer\n2+2, or 3?;4\n")
    error = refusal(tmp_path / "set.csv")
    assert "semicolons" in error.hint
    assert error.value == "prompt;answer"


CAPTIONS: dict[str, tuple[Any, str | None]] = {
    "a text": ("a cat ", "a cat "),
    "a user's message": (turns(("user", "a cat")), "a cat"),
    "an empty system message": (turns(("system", " "), ("user", "a cat")), "a cat"),
    "blocks": (turns(("user", [block("a "), block("cat")])), "a cat"),
    "a system message": (turns(BRIEF, ("user", "a cat")), None),
    "several turns": (turns(("user", "a cat"), ("user", "red")), None),
    "the assistant's words": (turns(("user", "a cat"), ("assistant", "Sure")), None),
    "nothing to draw": (turns(("user", "\u200b")), None),
    "an image that nobody reads": (turns(("user", [block("a"), {"type": "image", "image": "a.png"}])), None),
}


@pytest.mark.parametrize("case", CAPTIONS)
def test_an_image_generator_reads_the_users_text(tmp_path: Path, case: str) -> None:
    given, caption = CAPTIONS[case]
    path = written(tmp_path, "set.jsonl", [{"prompt": given}])
    if caption is None:
        assert "line 1, column prompt" in refusal(path, captions=True).place
        return
    (prompt,) = read(path, captions=True)
    assert prompt.text == caption
    (plain,) = read(written(tmp_path, "set.parquet", [{"prompt": caption}]), captions=True)
    assert prompt.prompt_id == plain.prompt_id


def test_the_date_of_a_template_is_what_transformers_prints_on_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Day":
            return cls(2025, 1, 1)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)
    codes = [
        "%-d/%-m %H:%M",
        "%A, %d %B %Y",
        "%j%% of %y",
        "%I %p %S.%f",
        "%U %w %a %b %e",
        "%x %X %c",
        "%%d %G-W%V-%u",
    ]
    printed = "".join(f"{{{{ strftime_now('{each}') }}}};" for each in codes)
    tokenizer = tokenizer_of("{%- set f = '%d' + ' %b' -%}" + printed + "{{ strftime_now(f) }}")
    assert prompt_ids(tokenizer, CausalLMSettings(), "a") == as_trl(turns(("user", "a")), tokenizer)


SEEN: dict[str, tuple[list[dict[str, Any]], int]] = {
    "a text": (turns(("user", "where?")), 1),
    "two images": (turns(BRIEF, ("user", "where?")), 2),
    "blocks": (turns(("user", [block("a "), {"type": "image"}, block("?")])), 1),
    "the first of the user": (turns(ASKED, ("assistant", "4"), ("user", "sure?")), 1),
}


@pytest.mark.parametrize("case", SEEN)
def test_rewards_get_images_where_trl_puts_them(tmp_path: Path, case: str) -> None:
    messages, count = SEEN[case]
    for number in range(count):
        (tmp_path / f"{number}.png").write_bytes(png(100 + number))
    row = {"prompt": messages, "images": [f"{number}.png" for number in range(count)]}
    (prompt,) = read(written(tmp_path, "set.jsonl", [row]), images=SourceColumns())
    images = [SourceImage.of(each.load()).open() for each in prompt.sources]
    path = tmp_path / "spy.py"
    path.write_text(SPY)
    batch = ScoringBatch(["s"], [prompt.text], completions=["4"], source_images=[images])
    FunctionReward(function=f"{path}:score").score(batch)
    (((given,), _),) = spied(str(path))
    wanted = prepare_multimodal_messages(messages, images)
    shades = [[_shade(each) for each in message["content"]] for message in given]
    assert shades == [[_shade(each) for each in message["content"]] for message in wanted]
    assert [each["role"] for each in given] == [each["role"] for each in wanted]


def _shade(part: Mapping[str, Any]) -> object:
    return part["image"].getpixel((0, 0)) if part["type"] == "image" else part
