"""A reward function that is served in tests, in a process of its own."""

import math
import os
import time
from pathlib import Path


def odd(completions: list[str], **_: object) -> list[float | None]:
    """Score, or do what a completion says: `wait PATH` writes this process's id, and goes on when PATH exists."""
    for text in completions:
        if text == "exit":
            os._exit(3)
        if text.startswith("wait "):
            path = Path(text.removeprefix("wait "))
            path.with_suffix(".begun").write_text(str(os.getpid()))
            while not path.exists():
                time.sleep(0.02)
    return [{"nan": math.nan, "null": None}.get(text, 0.1 + 0.2) for text in completions]
