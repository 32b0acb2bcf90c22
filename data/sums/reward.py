"""1 if the last number of the answer is the sum, otherwise 0."""

import re
from typing import Any


def right_sum(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """Score answers as TRL's GRPOTrainer asks for it, which takes this function too."""
    texts = [messages[-1]["content"] for messages in completions]
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]
