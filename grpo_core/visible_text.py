"""Whether a text shows anything: zero-width characters and the like fill a prompt or an answer with nothing."""

import regex

_VISIBLE = regex.compile(
    r"[^\p{White_Space}\p{Default_Ignorable_Code_Point}\p{Cc}\p{Cf}\p{Mn}\N{BRAILLE PATTERN BLANK}]"
)


def has_visible_text(text: str) -> bool:
    """Return whether a text has any character but white space, control, format and filler ones, and marks on others."""
    return _VISIBLE.search(text) is not None
