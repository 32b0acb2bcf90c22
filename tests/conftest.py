"""What every test runs under, and the shipped model loaded once."""

import gc
import os
from typing import TYPE_CHECKING

from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
# What the imports of a collection make stays: looking through it again and again takes a third of their time.
gc.disable()
# Shapes and dtypes that signatures and records state are checked in these modules, on every call of every test.
_SHAPED = ("advantages", "logprobs", "losses", "parity", "records", "sampling")
_SHAPED_GLM = ("autoregressive", "decoding")
_SHAPED_CAUSAL_LM = ("prompts", "sampling", "scoring")
install_import_hook(
    [
        *(f"grpo_core.{name}" for name in _SHAPED),
        *(f"grpo_core.policies.glm_image.{name}" for name in _SHAPED_GLM),
        *(f"grpo_core.policies.causal_lm.{name}" for name in _SHAPED_CAUSAL_LM),
    ],
    "beartype.beartype",
)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

# The same examples on every machine, and no deadline: a shared core has slow moments.
settings.register_profile("project", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("project")


@pytest.fixture(scope="session")
def shipped_pipeline() -> "GlmImagePipeline":
    """The tiny GLM-Image of data/models; never changed: `build_policy` copies what it trains."""
    import torch

    from grpo_core.policies.glm_image.loading import load_pipeline
    from tests.tiny_policy import MODEL

    return load_pipeline(str(MODEL), dtype=torch.float32, device=torch.device("cpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a PostgreSQL server, directly or through another fixture.

    torch is imported here because the process that hands the tests out never comes here, and so starts at once.
    """
    import torch

    torch.set_num_threads(1)
    # Every run of a flow frees its model with a full collection, which visits all that was imported otherwise.
    gc.collect()
    gc.freeze()
    gc.enable()
    for item in items:
        if "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker("postgresql")


def pytest_unconfigure() -> None:
    """Libraries report what the interpreter does not free at its end."""
    gc.unfreeze()
