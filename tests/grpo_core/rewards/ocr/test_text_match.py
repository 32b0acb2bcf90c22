"""Texts that a prompt quotes, in every kind of quotation mark."""

import random
import unicodedata
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from grpo_core.rewards.ocr.lines import UNREAD, unread
from grpo_core.rewards.ocr.text_match import (
    MATCHES,
    MAX_GIVEN,
    TextMatch,
    letters_and_digits,
    match_cvtg,
    match_flow_grpo,
    match_ned,
    quoted_texts,
)


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


@given(st.text().filter(lambda text: '"' not in text and text.strip()))
def test_any_text_in_double_quotes_is_found(text: str) -> None:
    assert quoted_texts(f'a sign "{text}" here') == (text.strip(),)


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("Hello, World!", "helloworld"),
        ("Ｇｏ, Ⅳ²!", "goiv2"),
        ("Floor 13½", "floor1312"),
        ("STRASSE straße", "strassestrasse"),
        ("Cafe\u0301", "café"),
        ("开业 大吉！", "开业大吉"),
        ("!!!", ""),
    ],
)
def test_letters_and_digits(text: str, simple: str) -> None:
    assert letters_and_digits(text) == simple


@pytest.mark.parametrize(
    ("texts", "lines", "edits", "length"),
    [
        (["Hello World"], ["HELLO", "WORLD"], 0, 10),
        # One letter out of ten is a zero.
        (["HELLO WORLD"], ["HELL0 WORLD"], 1, 10),
        (["HELLO WORLD"], [], 10, 10),
        (["HELLO WORLD"], ["zzz"], 10, 10),
        # Three times over: 20 letters too many out of 30.
        (["HELLO WORLD"], ["HELLO WORLD"] * 3, 20, 30),
        (["HELLO WORLD"], ["HELLO WORLD", "SALE"], 4, 14),
        # helloworld -> worldhello: hello<->world differ in four of five places each (the l in fourth place is common).
        (["HELLO WORLD"], ["WORLD HELLO"], 8, 10),
        (["kitten"], ["sitting"], 3, 7),
        (["开业大吉"], ["开业大告"], 1, 4),
        (["Ⅻ"], ["XII"], 0, 3),
        # Without a letter or digit: as it stands.
        (["!!!"], ["!!!"], 0, 3),
        (["!!!"], ["! ?"], 2, 3),
        (["!!!"], ["NO!!!"], 2, 5),
        (["Go!", "?"], ["GO", "?"], 1, 4),
        # In another order, and with one text split around the other.
        (["Open", "Fresh Bread"], ["FRESH BREAD", "OPEN"], 0, 14),
        (["Fresh Bread", "Open"], ["FRESH", "OPEN", "BREAD"], 0, 14),
        (["Half Price", "Grand Opening"], ["GRAND HALF", "OPENING PRICE"], 0, 21),
        # No white space between two texts on one line, which cannot be given apart.
        (["Open", "Bread"], ["BREADOPEN"], 0, 9),
        # One of two is missing: four of nine letters.
        (["Open", "Bread"], ["BREAD"], 4, 9),
        # Both twice: nine letters too many of eighteen.
        (["Open", "Bread"], ["BREAD", "OPEN", "BREAD", "OPEN"], 9, 18),
        # The words of a text in the wrong order cost, next to another text too.
        (["ab cd", "xyz"], ["CD AB", "XYZ"], 4, 7),
        (["The Cat", "The Dog"], ["THE DOG", "THE CAT"], 0, 12),
        # Punctuation and symbols may be missing, and cost where there are more than in the text.
        (["Sale!"], ["SALE"], 0, 4),
        (["Sale!"], ["SALE?"], 0, 4),
        (["Sale"], ["SALE!"], 1, 5),
        (["Sale"], ["SALE", *["!!! ???"] * 6], 36, 40),
        (["Sale", "50%"], ["* SALE *", "50 %"], 2, 8),
        # What is seen and not accepted is surplus, or stands where a letter is missing.
        (["Sale"], ["SALE", unread("SALE"), unread("S A")], 6, 10),
        (["Sale"], [unread("SALE")], 4, 4),
        (["Sale"], ["SA", unread("le")], 2, 4),
        (["!!!"], ["!!!", unread("no")], 2, 5),
        (["Go", "Go"], ["GO"], 2, 4),
    ],
)
def test_ned_by_hand(texts: list[str], lines: list[str], edits: int, length: int) -> None:
    assert match_ned(texts, lines) == TextMatch(1 - edits / length, edits)


@pytest.mark.parametrize(
    ("texts", "lines", "edits", "length"),
    [
        (["Hello World"], ["hello", unread("WORLD"), "WORLD"], 0, 10),
        (["Hello World"], ["HELL0 WORLD"], 1, 10),
        (["Hello World"], [], 10, 10),
        # Surplus text costs nothing next to the complete text,
        (["Hello World"], ["HELLO WORLD"] * 3, 0, 10),
        (["Hello World"], ["zzz", "HELLO WORLD", "zzz"], 0, 10),
        # and next to a part of it at most the text's length.
        (["Hello World"], ["HELL0 WORLD", "a" * 50], 10, 10),
        # Punctuation counts.
        (["Stop!"], ["STOP"], 1, 5),
        # Of two texts four letters are missing, of nine.
        (["Open", "Bread"], ["BREAD"], 4, 9),
        (["Open", "Bread"], ["BREAD", "x", "OPEN"], 0, 9),
    ],
)
def test_flow_grpo_by_hand(texts: list[str], lines: list[str], edits: int, length: int) -> None:
    assert match_flow_grpo(texts, lines) == TextMatch(1 - edits / length, edits)


@pytest.mark.parametrize(
    ("texts", "lines", "missing", "words"),
    [
        (["Hello World"], ["WORLD", "HELLO"], 0, 2),
        (["Hello World"], ["HELL0 WORLD"], 1, 2),
        (["Hello World"], ["HELLOWORLD"], 2, 2),
        (["Hello World"], [], 2, 2),
        (["Hello World"], ["HELLO WORLD"] * 3, 0, 2),
        # A word read once is no word wanted twice.
        (["Go Go Go"], ["GO GO"], 1, 3),
        (["Go", "Stop, Go"], ["go stop"], 1, 3),
        (["Don't Panic!"], ["DONT PANIC"], 0, 2),
        (["开业大吉"], ["大吉", "开张"], 1, 4),
        (["第1名 Winner"], ["WINNER", "第1名"], 0, 4),
        (["!!! ???"], ["!!!"], 1, 2),
        (["Go"], [f"{unread('up')} GO"], 0, 1),
    ],
)
def test_cvtg_by_hand(texts: list[str], lines: list[str], missing: int, words: int) -> None:
    assert match_cvtg(texts, lines) == TextMatch(1 - missing / words, missing)


def marks(text: str) -> int:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return sum(unicodedata.category(character)[0] in "PS" for character in folded)


@given(st.text(min_size=1).filter(lambda text: letters_and_digits(text) != ""), st.lists(st.text(), max_size=4))
def test_ned_of_one_text_is_the_edit_distance_to_all_that_was_read(text: str, lines: list[str]) -> None:
    wanted, read = letters_and_digits(text), "".join(letters_and_digits(line) for line in lines)
    surplus = "\0" * max(0, marks("".join(lines)) - marks(text))
    oracle = Levenshtein.normalized_similarity(wanted, read + surplus)
    assert match_ned([text], lines).value == pytest.approx(oracle, abs=1e-12)


_TEXTS = st.lists(st.text(alphabet="ab cd!", min_size=1).filter(str.strip), min_size=1, max_size=4)


@pytest.mark.parametrize("mode", sorted(MATCHES))
@given(texts=_TEXTS, lines=st.lists(st.text(alphabet="ab cd!"), max_size=6))
def test_value_lies_between_nothing_and_the_very_texts(mode: str, texts: list[str], lines: list[str]) -> None:
    match = MATCHES[mode]
    assert match(texts, texts) == TextMatch(1.0, 0)
    assert match(texts, []).value == 0.0
    assert 0.0 <= match(texts, lines).value <= 1.0


@given(texts=_TEXTS)
def test_ned_does_not_ask_for_an_order_of_the_texts(texts: list[str]) -> None:
    assert {match_ned(texts, order).value for order in permutations(texts)} == {1.0}


@given(texts=_TEXTS, surplus=st.text(alphabet=f"abcd!?{UNREAD}", min_size=1))
def test_ned_makes_any_surplus_cost(texts: list[str], surplus: str) -> None:
    assert match_ned(texts, [*texts, surplus]).value < 1.0
    assert match_ned(texts, texts * 3).value <= 1 / 3 + 1e-12


@settings(max_examples=150)
@given(
    texts=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=2, max_size=3),
    words=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=5),
)
def test_ned_of_several_never_counts_fewer_edits_than_there_are(texts: list[str], words: list[str]) -> None:
    apart = min(
        sum(
            Levenshtein.distance(text, "".join(word for word, owner in zip(words, owners, strict=True) if owner == i))
            for i, text in enumerate(texts)
        )
        for owners in product(range(len(texts)), repeat=len(words))
    )
    in_order = min(Levenshtein.distance("".join(order), "".join(words)) for order in permutations(texts))
    assert min(apart, in_order) <= match_ned(texts, words).errors <= in_order


def test_spam_gains_nothing() -> None:
    generator = random.Random(0)
    letters = "abcdefgh"
    texts = ["".join(generator.choices(letters, k=12)) for _ in range(30)]
    within = MAX_GIVEN // len(texts)
    # Minutes, where every order of the last one was tried.
    for count in (within, within + 1, 200, 5000):
        words = ["".join(generator.choices(letters, k=5)) for _ in range(count)]
        assert match_ned(texts, words).value <= 0.5
    # Every text, and as much again.
    assert match_ned(texts, texts * 2).value == 0.5


def test_more_texts_than_orders_can_be_tried_for() -> None:
    texts = [f"{letter}{letter}{letter}" for letter in "abcdefghijkl"]
    assert match_ned(texts, texts[::-1]).value == 1.0
    assert match_ned(texts, texts[1:]) == TextMatch(1 - 3 / 36, 3)


def test_several_texts_with_much_in_common_are_found_in_any_order() -> None:
    texts = ["Mind the Gap", "Baggage Claim", "Grand Opening", "Grand Opening Today", "Platform 9", "Open 24 Hours"]
    texts += ["Level Up", "Jazz Night", "Library"]
    generator = random.Random(0)
    for _ in range(20):
        assert match_ned(texts, generator.sample(texts, len(texts))).value == 1.0
