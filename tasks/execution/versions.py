"""The versions of the libraries that compute. They are recorded with a run, and are no part of a key."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

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


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that compute; `none` for one that is not installed."""
    return {library: _version(library) for library in _LIBRARIES}


def changed_versions(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return `library old -> new` for every version that differs."""
    names = sorted({*previous, *current})
    pairs = [(name, previous.get(name, "none"), current.get(name, "none")) for name in names]
    return [f"{name} {was} -> {now}" for name, was, now in pairs if was != now]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
