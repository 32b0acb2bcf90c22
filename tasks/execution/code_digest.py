"""The code that a result depends on: its digest, and the versions of the libraries that do the numbers."""

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from tasks.checkout import CHECKOUT

_SOURCES = ("grpo_core", "tasks", "configs")
# They say what was done, or where, and do nothing of it; a run is not to begin anew for another colour of its page.
_WITHOUT_EFFECT = (
    "tasks/reports/",
    "tasks/placing/",
    "tasks/pruning/",
    "configs/placement_sections.py",
    "configs/checks.py",
    "configs/dataset_checks.py",
    "configs/reward_checks.py",
    "configs/rewards_file.py",
    "configs/loader.py",
)
_LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "lpips",
    "numpy",
    "onnxruntime",
    "open-clip-torch",
    "opencv-python-headless",
    "peft",
    "pillow",
    "pyarrow",
    "pytorch-msssim",
    "rapidfuzz",
    "rapidocr",
    "regex",
    "safetensors",
    "scipy",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """sha256 of the algorithm's and the tasks' sources and of the versions of the libraries that do the numbers.

    Prefect's own TASK_SOURCE sees the decorated function alone: a change in what it calls would be a stale hit.
    """
    digest = hashlib.sha256()
    for name in determining_sources():
        digest.update(name.encode() + b"\0" + (CHECKOUT / name).read_bytes() + b"\0")
    for library, number in library_versions().items():
        digest.update(f"{library} {number}\n".encode())
    return digest.hexdigest()


def determining_sources() -> list[str]:
    """The files that a result depends on, relative to the checkout."""
    names = (
        path.relative_to(CHECKOUT).as_posix() for package in _SOURCES for path in (CHECKOUT / package).rglob("*.py")
    )
    return sorted(name for name in names if not name.startswith(_WITHOUT_EFFECT))


def library_versions() -> dict[str, str]:
    """The libraries that do the numbers, with the versions installed here."""
    return {library: _version(library) for library in _LIBRARIES}


def _version(library: str) -> str:
    """Of an optional library that is not installed, `none`."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
