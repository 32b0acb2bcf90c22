"""One number per text, higher is better; only texts of the same prompt are compared."""

import re


def near_the_box(completions, box=None, **columns):
    """Return the score of each text: here how near its first four numbers are to the prompt's box, from 0 to 1.

    `box` is a column of the prompt file, left, top, right and bottom in pixels; where there is none, four numbers are
    enough. `columns` has the other columns, and `source_images` the images of each prompt (PIL, RGB).
    """
    scores = []
    for text, wanted in zip(completions, box or [[]] * len(completions), strict=True):
        numbers = [int(number) for number in re.findall(r"[0-9]+", text)[:4]]
        away = sum(abs(a - b) for a, b in zip(numbers, wanted, strict=False))
        scores.append(max(0.0, 1 - away / 100) if len(numbers) == 4 else 0.0)
    return scores
