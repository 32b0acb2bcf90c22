"""What a policy generates."""

from typing import Literal

Modality = Literal["image", "text"]
"""What a row of tokens is rendered to."""
