"""What the tests of prompt files share."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.errors import InputError
from tasks.prompts.read import Prompt, read_prompts

Write = Callable[[str, str | bytes], Path]


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.text for prompt in prompts]


def read(path: str | Path, **options: Any) -> tuple[Prompt, ...]:
    return read_prompts(path, **options).prompts


def parquet_bytes(rows: Any) -> bytes:
    """The Parquet file of what polars makes a frame of."""
    buffer = io.BytesIO()
    pl.DataFrame(rows).write_parquet(buffer)
    return buffer.getvalue()


def refusal(path: str | Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_prompts(path, **options)
    return caught.value
