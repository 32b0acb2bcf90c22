"""What every test runs under, and the shipped model loaded once."""

import atexit
import gc
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
from jaxtyping import install_import_hook

REPOSITORY = Path(__file__).resolve().parents[1]
# No test sees the runs, caches and settings of the checkout or of the person who starts it, nor does what it starts.
_PRIVATE = tempfile.TemporaryDirectory(prefix="grpo-tests-", ignore_cleanup_errors=True)
_SETTINGS = ("PREFECT_", "GRPO_", "HF_", "WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_", "TORCH_HOME", "MPLCONFIGDIR")
_FOLDERS = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "XDG_CONFIG_HOME": "home/.config",
    "XDG_DATA_HOME": "home/.local/share",
    "XDG_STATE_HOME": "home/.local/state",
    "HF_HOME": "home/.cache/huggingface",
    "PREFECT_HOME": "home/.prefect",
}


def _isolate() -> None:
    """Give this process a home folder, and names of environment variables, that no person has set."""
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        del os.environ[name]
    for name, folder in _FOLDERS.items():
        Path(_PRIVATE.name, folder).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(Path(_PRIVATE.name, folder))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    # No test compiles, and bitsandbytes imports torch's compilers in each process to wrap functions that none calls.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # No test speaks TLS, and each of thousands of clients would read all certificates of the bundle.
    end = "-----END CERTIFICATE-----\n"
    one = Path(_PRIVATE.name, "certificate.pem")
    one.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    os.environ["SSL_CERT_FILE"] = str(one)
    # Which characters UTF-8 has takes hypothesis four seconds to find out, once.
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(REPOSITORY / ".hypothesis")
    # Programs that tests start run in another folder, and import these sources.
    os.environ["PYTHONPATH"] = str(REPOSITORY)


_isolate()
# What the imports of a collection make stays: looking through it again and again takes a third of their time.
gc.disable()
# Shapes and dtypes that signatures and records state are checked in these modules, on every call of every test.
_SHAPED = ("advantages", "logprobs", "losses", "parity", "rewards.mix", "rewards.similarity", "sampling")
_SHAPED_ROLLOUTS = ("actions", "ragged", "records")
_SHAPED_POLICIES = (
    "encoded_prompts",
    "kv_cache",
    "causal_lm.decode_steps",
    "causal_lm.sampling_scoring",
    "causal_lm.written",
)
_SHAPED_GLM = ("decode_step", "decoding", "prompts")
install_import_hook(
    [
        *(f"grpo_core.{name}" for name in _SHAPED),
        *(f"grpo_core.rollouts.{name}" for name in _SHAPED_ROLLOUTS),
        *(f"grpo_core.policies.{name}" for name in _SHAPED_POLICIES),
        *(f"grpo_core.policies.glm_image.{name}" for name in _SHAPED_GLM),
    ],
    "beartype.beartype",
)

from hypothesis import settings  # noqa: E402

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

    from tests.servers import PostgresServer

# The same examples on every machine, and no deadline: a shared core has slow moments.
settings.register_profile("project", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def at_the_top() -> Iterator[None]:
    """Work in a folder with the shipped files at the paths that configurations give them, and without runs.

    Nothing waits for the disk: what a killed process has written is there, and no test switches the machine off.
    """
    folder = Path(_PRIVATE.name, "checkout")
    folder.mkdir()
    for name in ("configs", "data", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    previous = Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        # Which also refuses a descriptor that is closed.
        patch.setattr(os, "fsync", os.fstat)
        yield
    os.chdir(previous)


@pytest.fixture(scope="session")
def shipped_pipeline() -> "GlmImagePipeline":
    """The tiny GLM-Image of data/models; never changed: `build_policy` copies what it trains."""
    import torch

    from grpo_core.policies.glm_image.loading import load_pipeline
    from tests.tiny_policies import MODEL

    return load_pipeline(str(MODEL), dtype=torch.float32, device=torch.device("cpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a PostgreSQL server, directly or through another fixture.

    torch is imported here because the process that hands the tests out never comes here, and so starts at once.
    """
    import torch
    from transformers import PreTrainedConfig

    torch.set_num_threads(1)
    # transformers writes each configuration out in full, for a log that nobody reads and for errors that it drops.
    PreTrainedConfig.__repr__ = object.__repr__
    # Every run of a flow frees its model with a full collection, which visits all that was imported otherwise.
    gc.freeze()
    gc.enable()
    # Later than pytest's own collections. Libraries report what the interpreter does not free at its end.
    atexit.register(gc.unfreeze)
    for item in items:
        if "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker("postgresql")


def pytest_unconfigure() -> None:
    _PRIVATE.cleanup()


@contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small disk needs root; run the tests as root ({error})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 1 MiB."""
    with _small_disk(tmp_path / "tiny-disk", "1m") as folder:
        yield folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 MiB."""
    with _small_disk(tmp_path / "small-disk", "64m") as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    """A PostgreSQL server with no database but its own."""
    from tests.servers import postgres_server

    with postgres_server() as server:
        yield server
