"""Texts that a prompt quotes, in every kind of quotation mark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.rewards.ocr.quoted_text import quoted_texts


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that reads "Open Late" at night', ("Open Late",)),
        ("a sign that reads 'Open Late' at night", ("Open Late",)),
        ("a sign that reads “Open Late” at night", ("Open Late",)),
        ("a sign that reads ‘Open Late’ at night", ("Open Late",)),
        ('a sign that reads “Open Late" at night', ("Open Late",)),
        ("ein Schild „Heute Ruhetag“", ("Heute Ruhetag",)),
        ("ein Schild ‚Heute Ruhetag‘", ("Heute Ruhetag",)),
        ("ein Schild »Heute Ruhetag«", ("Heute Ruhetag",)),
        ("une enseigne « Ouvert » et « Fermé »", ("Ouvert", "Fermé")),
        ("en skylt ”Hej”", ("Hej",)),
        ("写着“开业大吉”的横幅", ("开业大吉",)),
        ("写着‘开业’的横幅", ("开业",)),
        ("写着'开业'的横幅", ("开业",)),
        ('写着"开业"的横幅', ("开业",)),
        ("看板「営業中」と『本日休業』", ("営業中", "本日休業")),
        ("縦書き﹁営業中﹂", ("営業中",)),
        ("＂ＯＰＥＮ＂ ＇ＬＡＴＥ＇", ("ＯＰＥＮ", "ＬＡＴＥ")),
        ("书店里的《三体》", ()),
        # Apostrophes, feet and inches.
        ("a dog's bowl with 'Rex' on it", ("Rex",)),
        ("a baker's sign: 'Joe's Bread'.", ("Joe's Bread",)),
        ("‘It’s Open’, the baker’s sign says", ("It’s Open",)),
        ("a sign 'Dogs' on the door", ("Dogs",)),
        ("'Dogs' and 'Cats' over the doors", ("Dogs", "Cats")),
        ("a sign 'The Dogs' Bowl' in red", ("The Dogs' Bowl",)),
        ("a banner 'Goin' Home' in red", ("Goin' Home",)),
        ("a ring with 'Til Death Do Us Part' inside", ("Til Death Do Us Part",)),
        ("a bar called 'Rock 'n' Roll' in neon", ("Rock 'n' Roll",)),
        ("'Tis winter and a sign 'Sledges'", ("Sledges",)),
        ("a '50s diner with 'Eat Here' in neon", ("Eat Here",)),
        ("a board '24 Hours' and one '20 Miles'", ("24 Hours", "20 Miles")),
        ("the 'Route 66' shield", ("Route 66",)),
        ("under a bridge 'Max 6' High'", ("Max 6' High",)),
        ("a bar called “Rock ’n’ Roll” in neon", ("Rock ’n’ Roll",)),
        ("(‘Bar’), the letter 'N'.", ("Bar", "N")),
        ("don't 'Stop'!", ("Stop",)),
        ('a 12" pizza box with "Hot"', ("Hot",)),
        ("a 5” screen showing “HELLO”", ("HELLO",)),
        ("a 5½” screen showing ”HELLO” and a 3” one", ("HELLO",)),
        ("a box “12” wide", ("12",)),
        ('a crate marked "Size 12" in red', ("Size 12",)),
        # The outer quotation contains the inner one.
        ("a bubble \"She said 'yes' to us\"", ("She said 'yes' to us",)),
        ("a bubble 'She said \"yes\" to us'", ('She said "yes" to us',)),
        ("a bubble “a “b” c”", ("a “b” c",)),
        ("看板「外『内』外」", ("外『内』外",)),
        ('a "" sign, a \'\' sign, a "Shop"', ("Shop",)),
        ('a sign " Two\nLines "', ("Two\nLines",)),
        ('A door with "Pull", a mat with \'Wipe\', and the word "Pull" is red', ("Pull", "Wipe")),
    ],
)
def test_quoted_texts_in_order_and_once_each(prompt: str, texts: tuple[str, ...]) -> None:
    assert quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    "prompt",
    [
        "It's a dog's bowl",
        "It’s a dog’s bowl",
        "the dogs' bowl",
        "the girls' and the boys' rooms",
        "students' desks beside the farmers' market",
        "'tis the season",
        "’Twas the night",
        "‘tis the season",
        "'tis by the dogs' bowl",
        "rock 'n' roll",
        "ROCK 'N' ROLL",
        "rock ’n’ roll",
        "fish'n'chips",
        "the '90s and the '80s",
        "the class of '24",
        "goin' home with ol' Joe's dog",
        "6' tall and 5'11\" wide",
        'a 12" ruler and a 15" screen',
        "James' car",
        "O'Brien",
        *("", "no text", '""', "''", "“”", '"  "', "「」", 'an "unfinished one', "'unfinished"),
    ],
)
def test_apostrophes_and_empty_quotes_give_none(prompt: str) -> None:
    assert quoted_texts(prompt) == ()


@pytest.mark.parametrize("text", ["Before You’re Soup", "You're Late, I'll Wait", "30% of Frogs: 8½", "F=ma²"])
@pytest.mark.parametrize(
    "frame",
    [
        'A photo of a sign with "{}".',
        "A farmers' market, a sign \"{}\", students' desks",
        'The words: "{}" on a wizard’s hat, it’s night',
    ],
)
def test_a_text_in_double_quotes_comes_out_unchanged(text: str, frame: str) -> None:
    assert quoted_texts(frame.format(text)) == (text,)


def check_stripped_parts(prompt: str) -> None:
    for text in quoted_texts(prompt):
        assert text
        assert text == text.strip()
        assert text in prompt


@given(st.text(alphabet="abc'’ .,sn\"“”‘「」", max_size=30))
def test_texts_are_parts_of_the_prompt_without_white_space_at_the_ends(prompt: str) -> None:
    check_stripped_parts(prompt)


@pytest.mark.parametrize("repeated", ["«", "“", '"', "'", "‘", "„“", "« » ", " 'x' x' ", " 'tis x'", "「『", "5” "])
def test_ten_thousand_marks(repeated: str) -> None:
    # Minutes, where the time grows faster than the number of marks.
    prompt = repeated * (10_000 // len(repeated))
    check_stripped_parts(prompt)
    check_stripped_parts(f" 'x {prompt}")


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters='"'), min_size=1).filter(str.strip))
def test_any_text_in_double_quotes_is_found(text: str) -> None:
    assert quoted_texts(f'a sign "{text}" here') == (text.strip(),)
