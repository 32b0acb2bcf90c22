"""The texts that a prompt puts between quotation marks, and how well the text that was read matches them.

Double quotes are unmistakable but for inches; a single quote is more often an apostrophe, and is distinguished by
the characters on either side of it. Titles between 《 》 are named rather than shown, and are no quotes here.

Only ``ned`` is safe to optimise: the two published ways leave surplus text free, so that the wanted text written over
and over has full marks; lines that the engine did not accept are no text to them.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from types import MappingProxyType

from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

from grpo_core.rewards.ocr.lines import UNREAD

CLOSERS: Mapping[str, str] = MappingProxyType(
    {
        '"': '"',
        "“": '”"',
        "„": '“”"',
        "”": "”",
        "«": "»",
        "»": "«",
        "‹": "›",
        "›": "‹",
        "「": "」",
        "『": "』",
        "﹁": "﹂",
        "﹃": "﹄",
        "〝": "〞〟",
        "＂": "＂",
        "'": "'",
        "‘": "’",
        "‚": "‘’",
        "＇": "＇",
    }
)
"""Marks that open a quotation, each with those that can close it; English, German, French, Swedish and CJK ones."""

_SINGLE = "'‘‚＇"
_ELISION = re.compile(
    r"(?:tis|twas|twere|twill|til|till|em|cause|bout|round|neath|gainst|cept|nuff|ere|n|\d\ds)(?!\w)", re.IGNORECASE
)
"""What an apostrophe may begin: 'tis, 'em, '90s."""

_ROCK_N_ROLL = re.compile(r"(?<=\w )['‘’]n['’](?= \w)|(?<=\w)['’]n['’](?=\w)", re.IGNORECASE)
_MAY_BE_POSSESSIVE = re.compile(r"(?:[sxz]|\d|\w(?:in|ol)|\b(?:o|an|th|lil))$", re.IGNORECASE)
"""Endings after which a single quote may be an apostrophe (the dogs' bowl, goin' home) or a foot mark (6' tall)."""

_LONGEST_ENDING = 3

_INCHES = '"”'
_ENDS_A_NUMBER = re.compile(r"[\d½¼¾⅓⅔⅛⅜⅝⅞]")


def quoted_texts(prompt: str) -> tuple[str, ...]:
    """Find every text between quotation marks, in order, each once, without white space at its ends.

    A quotation within a quotation belongs to the outer one; an empty or unfinished one gives nothing. Apostrophes give
    nothing: within a word (It's), at its start ('tis, '90s, rock 'n' roll) or after it (the dogs' bowl). Where a single
    quote can be both, the reading that closes every quotation wins.
    """
    return tuple(dict.fromkeys(text for text in _scan(prompt) if text))


def _scan(prompt: str) -> Iterator[str]:
    # A letter apostrophe opens and closes nothing.
    marks = _ROCK_N_ROLL.sub("\u02bcn\u02bc", prompt)
    double_ends = {mark: _double_ends(marks, mark) for mark in set(marks) & set(CLOSERS) - set(_SINGLE)}
    place = 0
    while place < len(marks):
        end = _find_end(marks, place, double_ends)
        if end is None:
            place += 1
            continue
        yield prompt[place + 1 : end].strip()
        place = end + 1


def _find_end(prompt: str, start: int, double_ends: Mapping[str, Mapping[int, int]]) -> int | None:
    """Find where the quotation that opens at `start` ends; None where none opens, or it never ends."""
    mark = prompt[start]
    if mark not in CLOSERS:
        return None
    if mark in _SINGLE:
        return _find_single_end(prompt, start) if _opens(prompt, start) else None
    if mark in _INCHES and _ENDS_A_NUMBER.fullmatch(prompt[start - 1 : start]):
        return None
    return double_ends[mark].get(start)


def _double_ends(prompt: str, mark: str) -> dict[int, int]:
    """Find where the quotation of each such mark would end; one pass, since a prompt may contain nothing else."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for place, character in enumerate(prompt):
        if character in CLOSERS[mark] and opened:
            ends[opened.pop()] = place
        if character == mark:
            opened.append(place)
    return ends


def _find_single_end(prompt: str, start: int) -> int | None:
    """Find the nearest mark that can only close; else, for an opening that can be nothing else, one that may."""
    closers = CLOSERS[prompt[start]]
    surely_open = _ELISION.match(prompt, start + 1) is None
    possible = None
    for place in range(start + 1, len(prompt)):
        if prompt[place] in closers and _closes(prompt, place):
            if not _MAY_BE_POSSESSIVE.search(prompt, max(start + 1, place - _LONGEST_ENDING), place):
                return place
            possible = place if possible is None else possible
        elif prompt[place] in _SINGLE and _opens(prompt, place):
            break
    return possible if surely_open else None


def _opens(prompt: str, place: int) -> bool:
    following = prompt[place + 1 : place + 2]
    return not _is_letter(prompt[place - 1 : place]) and following != "" and not following.isspace()


def _closes(prompt: str, place: int) -> bool:
    return not prompt[place - 1].isspace() and not _is_letter(prompt[place + 1 : place + 2])


def _is_letter(character: str) -> bool:
    """Say whether it is a letter or digit of a script with apostrophes; Chinese, Japanese and Korean have none."""
    return character.isalnum() and character < "\u2e80"


MAX_ORDERS = 720
"""Orders of the texts that are tried: every one of up to six texts."""

MAX_GIVEN = 4000
"""Pairs of a text and a word read that are tried: more is not requested text, and takes seconds."""

_NOBODY = -1

_EAST_ASIAN = "\u2e80-\U0003ffff"
_WORD = re.compile(f"[{_EAST_ASIAN}]|[^{_EAST_ASIAN}]+")


@dataclass(frozen=True)
class TextMatch:
    """How near two texts are: a value in [0, 1], 1 for the very text, and the edits, or missing words, behind it."""

    value: float
    errors: int


def match_ned(texts: Sequence[str], lines: Sequence[str]) -> TextMatch:
    """Compute 1 - edits / length of the longer side (normalised edit distance, Levenshtein, 1966).

    Surplus text costs as much as missing text. Compared are letters and digits after NFKC and case folding. A missing
    punctuation mark or symbol costs nothing, as engines drop them, but each one beyond the number in the texts is a
    surplus character, and so is every character that the engine saw and did not accept. Where one of the texts has
    neither letter nor digit ("!!!"), everything but white space is compared.

    Of several texts each is wanted once, in whatever order and place; within a text the order counts. The edits are the
    fewest that turn what was read into the texts in some order, or, up to MAX_GIVEN pairs, with each word given to the
    text it suits. Lengths are the sums over the texts and over the lines.
    """
    spelt = all(letters_and_digits(text) for text in texts)
    wanted = [letters_and_digits(text) if spelt else _without_space(text) for text in texts]
    chunks = [_without_space(chunk) for line in lines for chunk in line.split()]
    words = [word for chunk in chunks if (word := _letters_and_unread(chunk) if spelt else chunk)]
    surplus = _count_marks(lines) - _count_marks(texts) if spelt else 0
    words += [UNREAD * surplus] if surplus > 0 else []
    read = "".join(words)
    orders = [_order_found(wanted, read), *islice(permutations(wanted), MAX_ORDERS)]
    edits = min(Levenshtein.distance("".join(order), read) for order in orders)
    if len(wanted) > 1 and len(wanted) * len(words) <= MAX_GIVEN:
        edits = min(edits, _edits_apart(wanted, words))
    return TextMatch(1.0 - edits / max(sum(map(len, wanted)), len(read)), edits)


def match_flow_grpo(texts: Sequence[str], lines: Sequence[str]) -> TextMatch:
    """Compute 1 - min(edits, length of the text) / length of the text; no edits where it is part of what was read.

    As Flow-GRPO scores its OCR task (Liu et al., 2025, arXiv:2505.05470): lower case, blanks taken out, lines joined.
    It knows one text a prompt; of several, each is compared with all that was read, and edits and lengths are summed.
    """
    read = _lower("".join(_accepted(lines)))
    wanted = [_lower(text) for text in texts]
    edits = [0 if text in read else min(Levenshtein.distance(text, read), len(text)) for text in wanted]
    return TextMatch(1.0 - sum(edits) / sum(map(len, wanted)), sum(edits))


def match_cvtg(texts: Sequence[str], lines: Sequence[str]) -> TextMatch:
    """Compute the share of the wanted words that were read, each word read counting once and in whatever place.

    The word accuracy of CVTG-2K (Du et al., 2025, "TextCrafter", arXiv:2503.23461). Words stand between white space
    and are compared by letters and digits; every Chinese, Japanese or Korean character is a word. Where no text has a
    letter or digit, words are compared as they stand.
    """
    simplify = letters_and_digits if any(letters_and_digits(text) for text in texts) else _without_space
    wanted, read = (_count_words(parts, simplify) for parts in (texts, _accepted(lines)))
    missing = (wanted - read).total()
    return TextMatch(1.0 - missing / wanted.total(), missing)


MATCHES: Mapping[str, Callable[[Sequence[str], Sequence[str]], TextMatch]] = MappingProxyType(
    {"ned": match_ned, "flow_grpo": match_flow_grpo, "cvtg": match_cvtg}
)
"""The ways to compare by the names that a configuration may use."""


def letters_and_digits(text: str) -> str:
    """Return the text's letters and digits in one compatible form and case: ``Ｇｏ, Ⅳ²!`` gives ``goiv2``."""
    return "".join(character for character in _fold(text) if character.isalnum())


def _letters_and_unread(folded: str) -> str:
    return "".join(character for character in folded if character.isalnum() or character == UNREAD)


def _count_marks(texts: Sequence[str]) -> int:
    return sum(unicodedata.category(character)[0] in "PS" for text in texts for character in _fold(text))


def _accepted(lines: Sequence[str]) -> list[str]:
    """Leave out the words that the engine did not accept."""
    return [" ".join(word for word in line.split() if UNREAD not in word) for line in lines]


def _without_space(text: str) -> str:
    return "".join(_fold(text).split())


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _lower(text: str) -> str:
    return text.lower().replace(" ", "")


def _count_words(parts: Sequence[str], simplify: Callable[[str], str]) -> Counter[str]:
    chunks = [simplify(chunk) for part in parts for chunk in part.split()]
    return Counter(word for chunk in chunks for word in _WORD.findall(chunk))


def _order_found(texts: Sequence[str], read: str) -> list[str]:
    """Order the texts as they stand in what was read, each where the most of it is found."""
    places = {}
    # The longest first, so that a text that is a part of another one does not take its place.
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True):
        found = fuzz.partial_ratio_alignment(texts[index], read)
        start, end = (found.dest_start, found.dest_end) if found is not None else (0, 0)
        places[index] = start
        read = read[:start] + UNREAD * (end - start) + read[end:]
    return [texts[index] for index in sorted(places, key=places.__getitem__)]


def _edits_apart(texts: Sequence[str], words: Sequence[str]) -> int:
    """Count the edits that turn the words given to each text into it, every word being given to one.

    From the text with the most of each word, words go to others while that saves edits: a small number, not the least.
    """
    owners = [max(range(len(texts)), key=lambda i: fuzz.partial_ratio(word, texts[i])) for word in words]

    def count_edits(text: int) -> int:
        given = "".join(word for word, owner in zip(words, owners, strict=True) if owner == text)
        return Levenshtein.distance(texts[text], given)

    edits, before = [count_edits(text) for text in range(len(texts))], None
    while before is None or sum(edits) < before:
        before = sum(edits)
        for place in range(len(words)):
            _give_away(place, owners, edits, count_edits)
    return sum(edits)


def _give_away(place: int, owners: list[int], edits: list[int], count_edits: Callable[[int], int]) -> None:
    """Give one word to the text where it saves the most edits, and its owner's and the taker's edits with it."""
    previous = owners[place]
    owners[place] = _NOBODY
    without = count_edits(previous)
    best, best_change, best_edits = previous, 0, edits[previous]
    for taker in range(len(edits)):
        if taker == previous:
            continue
        owners[place] = taker
        taken = count_edits(taker)
        change = without - edits[previous] + taken - edits[taker]
        if change < best_change:
            best, best_change, best_edits = taker, change, taken
    owners[place] = best
    if best != previous:
        edits[previous], edits[best] = without, best_edits
