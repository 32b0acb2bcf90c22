"""Packages whose names are imported when they are first used: settings are read and checked without torch."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def import_on_use(package: str, file: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose names are imported under `if TYPE_CHECKING`, for type checkers.

    Args:
        package: its `__name__`.
        file: its `__file__`, where these imports are read.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load
