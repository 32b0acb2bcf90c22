"""docs/denoising.md lists every class of pipeline as the code sees it."""

import json

import pytest

from grpo_core.policies.diffusers.pipeline_class import TRIED
from tests.grpo_core.policies.diffusers.pipeline_classes import CLASSES, PAGE, TABLE, outcome, section

EXPECTED = json.loads(TABLE.read_text())
# One of each list, and one for each reason that is not read off the arguments.
QUICK = ("FluxPipeline", "PRXPipeline", "PixArtSigmaPipeline", "OmniGenPipeline", "StableDiffusionXLPipeline")


def test_the_page_shows_the_table() -> None:
    assert section(EXPECTED) in PAGE.read_text()
    assert {name for name, found in EXPECTED.items() if found == "tried"} == set(TRIED)


@pytest.mark.parametrize("name", QUICK)
def test_a_class_is_what_the_table_says(name: str) -> None:
    assert outcome(name) == EXPECTED[name]


@pytest.mark.slow
def test_every_class_is_what_the_table_says() -> None:
    """`python -m tests.grpo_core.policies.diffusers.pipeline_classes` writes it."""
    found = {name: outcome(name) for name in CLASSES}
    assert {name: each for name, each in found.items() if each is not None} == EXPECTED
