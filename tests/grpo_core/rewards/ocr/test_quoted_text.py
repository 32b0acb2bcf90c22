import time

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
    ],
)
def test_every_kind_of_mark(prompt: str, texts: tuple[str, ...]) -> None:
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
    ],
)
def test_apostrophes_feet_and_inches_give_none(prompt: str) -> None:
    assert quoted_texts(prompt) == ()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
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
    ],
)
def test_quotes_beside_apostrophes(prompt: str, texts: tuple[str, ...]) -> None:
    assert quoted_texts(prompt) == texts


# One of each kind of text that stands in Flow-GRPO's prompts.
@pytest.mark.parametrize(
    "text",
    [
        "Grand Reopening 2031",
        "The World's Loudest Frog",
        "King Olaf's Regret",
        "Turn Back Before You’re Soup",
        "You're Late, I'll Wait",
        "Robot: Nearly Awake",
        "Sugar-Free Icebergs",
        "F=ma²",
        "30% Chance of Frogs",
        "Floor 8½",
        "Deck 4⅓ Now Boarding",
        "CO₂ RISING",
        "No More, Kids!",
        "Ann & Bo For Ever",
        "Nap Again?",
        "Prof. Perhaps Soup Division",
        "net password: Latte77",
        "Bounty $900 Dead",
        "OnlyOneWord123",
    ],
)
@pytest.mark.parametrize(
    "frame",
    [
        'A photo of a sign with "{}".',
        "A farmers' market, a sign \"{}\", students' desks",
        'The words: "{}" on a wizard’s hat, it’s night',
    ],
)
def test_a_text_in_double_quotes_comes_out_as_it_stands(text: str, frame: str) -> None:
    assert quoted_texts(frame.format(text)) == (text,)


@pytest.mark.parametrize("repeated", ["«", "“", '"', "'", "‘", "„“", "« » ", " 'x' x' ", " 'tis x'", "「『", "5” "])
def test_ten_thousand_marks_take_no_longer_than_their_number(repeated: str) -> None:
    prompt = repeated * (10_000 // len(repeated))
    start = time.monotonic()
    quoted_texts(prompt)
    quoted_texts(f" 'x {prompt}")
    assert time.monotonic() - start < 1.0


def test_several_come_in_order_and_once_each() -> None:
    prompt = 'A door with "Pull", a mat with \'Wipe\', a bell with “Ring”, and the word "Pull" is red'
    assert quoted_texts(prompt) == ("Pull", "Wipe", "Ring")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a bubble \"She said 'yes' to us\"", ("She said 'yes' to us",)),
        ("a bubble 'She said \"yes\" to us'", ('She said "yes" to us',)),
        ("a bubble “a “b” c”", ("a “b” c",)),
        ("看板「外『内』外」", ("外『内』外",)),
    ],
)
def test_the_outer_quotation_has_the_inner_one(prompt: str, texts: tuple[str, ...]) -> None:
    assert quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    "prompt", ["", "no text", '""', "''", "“”", '"  "', "「」", 'an "unfinished one', "'unfinished"]
)
def test_nothing_quoted_gives_none(prompt: str) -> None:
    assert quoted_texts(prompt) == ()


def test_empty_quotes_do_not_shift_the_next() -> None:
    assert quoted_texts('a "" sign, a \'\' sign, a "Shop"') == ("Shop",)


def test_white_space_at_the_ends_goes() -> None:
    assert quoted_texts('a sign " Two\nLines "') == ("Two\nLines",)


@given(st.text(alphabet="abc'’ .,sn\"“”‘「」", max_size=30))
def test_texts_stand_in_the_prompt_without_white_space_at_the_ends(prompt: str) -> None:
    for text in quoted_texts(prompt):
        assert text
        assert text == text.strip()
        assert text in prompt


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters='"'), min_size=1).filter(str.strip))
def test_whatever_stands_in_double_quotes_is_found(text: str) -> None:
    assert quoted_texts(f'a sign "{text}" here') == (text.strip(),)
