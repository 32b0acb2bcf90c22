"""The texts that a prompt puts between quotation marks: what its image shall show.

Double quotes are unmistakable but for inches; a single quote is more often an apostrophe, and is distinguished by
the characters on either side of it. Titles between 《 》 are named rather than shown, and are no quotes here.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

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
    """Every text between quotation marks, in order, each text once, without white space at its ends.

    A quotation within a quotation belongs to the outer one; an empty or unfinished one gives nothing. A prompt that
    names the same text again speaks of the same writing, so it counts once.

    Apostrophes give nothing: within a word (It's), at its start ('tis, '90s, rock 'n' roll) or after it (the dogs'
    bowl). Where a single quote can be both, the reading that closes every quotation wins.
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
    """Where the quotation that opens at `start` ends; None where none opens, or it never ends."""
    mark = prompt[start]
    if mark not in CLOSERS:
        return None
    if mark in _SINGLE:
        return _find_single_end(prompt, start) if _opens(prompt, start) else None
    if mark in _INCHES and _ENDS_A_NUMBER.fullmatch(prompt[start - 1 : start]):
        return None
    return double_ends[mark].get(start)


def _double_ends(prompt: str, mark: str) -> dict[int, int]:
    """Where the quotation of each such mark ends, had it opened one; one pass, as a prompt may contain nothing else."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for place, character in enumerate(prompt):
        if character in CLOSERS[mark] and opened:
            ends[opened.pop()] = place
        if character == mark:
            opened.append(place)
    return ends


def _find_single_end(prompt: str, start: int) -> int | None:
    """The nearest mark that can only close; else, for an opening that can be nothing else, the nearest that may."""
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
    """A letter or digit of a script with apostrophes; Chinese, Japanese and Korean have none and set quotes close."""
    return character.isalnum() and character < "\u2e80"
