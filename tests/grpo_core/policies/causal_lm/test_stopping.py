"""Ends of completions, against a plain search in the decoded text."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.policies.causal_lm.sampling import StopTexts, end_tokens
from tests.grpo_core.policies.causal_lm.made_models import make_tokenizer

TOKENIZER = make_tokenizer()
STOPS = StopTexts(TOKENIZER, ("ab", "\n\n", "é!", " of the"))
SPECIAL = TOKENIZER.convert_tokens_to_ids("<|user|>")


@given(st.text(alphabet="ab\né! ofthe", max_size=24), st.sets(st.integers(0, 30)))
def test_a_row_stops_at_the_first_token_after_which_its_text_holds_a_stop(text: str, marks: set[int]) -> None:
    ids = TOKENIZER(text)["input_ids"]
    for place in sorted(marks):
        ids.insert(min(place, len(ids)), SPECIAL)
    holds = [any(stop in STOPS.decode(ids[: end + 1]) for stop in STOPS.texts) for end in range(len(ids))]
    first = holds.index(True) if True in holds else len(ids)
    assert not any(STOPS.completed(ids[: end + 1]) for end in range(first))
    assert first == len(ids) or STOPS.completed(ids[: first + 1])


@pytest.mark.parametrize(
    ("text", "kept"),
    [("xaby", "x"), ("x\n\nab", "x"), ("abab", ""), ("aé b", "aé b"), ("sort of the ab", "sort")],
)
def test_a_text_is_cut_before_its_first_stop(text: str, kept: str) -> None:
    assert STOPS.cut(text) == kept


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 3], 3, (3, 7, 268)), (None, 5, (5, 268)), (9, None, (9, 268)), (None, None, (268,))],
)
def test_every_end_token_counts(
    generation: list[int] | int | None, config: int | None, expected: tuple[int, ...]
) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=config)
    )
    assert end_tokens(model, TOKENIZER) == expected
