"""One number per text, higher is better; only texts of the same prompt are compared."""

from difflib import SequenceMatcher


def sorted_letters(prompts, completions, **columns):
    """Return the score of each text: here how near it is to the sorted letters of the prompt's last word, from 0 to 1.

    `columns` has the other columns of the prompt file, such as an answer to compare with.
    """
    scores = []
    for prompt, text in zip(prompts, completions, strict=True):
        wanted = "".join(sorted(prompt.split()[-1]))
        scores.append(SequenceMatcher(None, text.strip(), wanted, autojunk=False).ratio())
    return scores
