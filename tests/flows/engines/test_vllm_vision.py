"""A server samples prompts with images: it reads the ids and the pixels that the policy scores."""

import json
from pathlib import Path

import pytest

from data.recipes.grounding import SIDE
from tests.flows.conftest import REPOSITORY, Runs
from tests.flows.engines.conftest import Servers, settings
from tests.flows.engines.test_vllm import DIFFERENCE, NEAR, require_refused, rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
HALF = (SIDE // 2) ** 2


@pytest.fixture
def url(servers: Servers, vision_model: Path) -> str:
    """A server that brings images to a quarter of their pixels."""
    size = {"shortest_edge": HALF, "longest_edge": HALF}
    options = ("--enable-scale-out", "--mm-processor-kwargs", json.dumps({"size": size}))
    return servers.url(*options, model=vision_model)


def given(model: Path, url: str, pixels: int) -> dict[str, object]:
    own: dict[str, object] = {
        "policy__freeze_vision": True,
        "rollout__min_pixels": pixels,
        "rollout__max_pixels": pixels,
    }
    # Half of the answers of a model that has just begun to learn: coordinates are 0 to 56.
    own |= {"rewards": [{"reward": "format", "settings": {"pattern": "[1-3].*"}}]}
    return {"file": GROUNDING, **settings(model, {"url": url}, rollout__max_completion_length=6, **own)}


def test_images_are_read_as_the_policy_reads_them(
    server: None, empty: Runs, vision_model: Path, url: str, tmp_path: Path
) -> None:
    first = empty.start_text(**given(vision_model, url, HALF))
    for iteration in (1, 2):
        assert 0 < empty.metrics(iteration, "text")[DIFFERENCE] <= NEAR
        sampled = rows(empty, iteration)
        assert set(sampled["engine"]) == {"vllm"}
        assert sampled["token_ids"].n_unique() > 4
        assert empty.steps(iteration, "text")["grad_norm"].min() > 0
    assert set(rows(empty, 2)["engine_adapter"]) == {empty.policy_digest(1, "text")}
    again = Runs(tmp_path / "again").start_text(**given(vision_model, url, HALF))
    assert again.summary.policy_digest == first.summary.policy_digest


def test_a_server_that_brings_images_to_another_size_is_refused(empty: Runs, vision_model: Path, url: str) -> None:
    require_refused(empty, given(vision_model, url, SIDE**2), url)
