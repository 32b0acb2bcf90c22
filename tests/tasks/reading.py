"""What the tests of prompt files share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.prompts.read import Prompt, read_prompts

Write = Callable[[str, str | bytes], Path]


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.text for prompt in prompts]


def refusal(path: str | Path, **options: str | int) -> InputError:
    with pytest.raises(InputError) as caught:
        read_prompts(path, **options)  # type: ignore[arg-type]
    return caught.value
