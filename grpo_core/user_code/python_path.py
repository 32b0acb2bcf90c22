"""Where Python finds a module: in folders, on its path, in an installed distribution. Nothing is imported."""

import functools
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

PACKAGE_FILE = "__init__.py"
_INSTALLED = ("site-packages", "dist-packages")


def find_module(name: str, folders: Sequence[Path]) -> tuple[Path | None, list[Path]] | None:
    """Return a module's file (None for a package without one) and its submodules' folders; None if there is none."""
    for folder in folders:
        if (package := folder / name / PACKAGE_FILE).is_file():
            return package, [folder / name]
        for suffix in (*EXTENSION_SUFFIXES, ".py"):
            if (file := folder / f"{name}{suffix}").is_file():
                return file, []
    plain = [folder / name for folder in folders if (folder / name).is_dir()]
    return (None, plain) if plain else None


def find_specification(name: str) -> ModuleSpec | None:
    """Return what Python would import for a top-level name; None if there is no such module."""
    try:
        return find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def origin_of(spec: ModuleSpec | None) -> Path | None:
    """Return the file of a module; None for one without, and for a package that is a plain folder."""
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def folders_of(spec: ModuleSpec) -> list[Path]:
    """Return the folders on Python's path that have a top-level module."""
    if spec.submodule_search_locations is not None:
        return [Path(each).parent for each in spec.submodule_search_locations]
    origin = origin_of(spec)
    return [] if origin is None else [origin.parent]


def is_installed(path: Path) -> bool:
    """Return whether a file was put there by an installation."""
    return any(folder in path.parts for folder in _INSTALLED)


def distributions_of(name: str, *, searched: bool) -> dict[str, str]:
    """Return the distributions of a top-level name with their versions; `searched`: also those of other names."""
    try:
        return {name: version(name)}
    except PackageNotFoundError:
        found = _all_distributions().get(name, ()) if searched else ()
        return {each: version(each) for each in found}


@functools.cache
def _all_distributions() -> Mapping[str, Sequence[str]]:
    return packages_distributions()
