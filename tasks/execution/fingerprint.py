"""Fingerprint the code that computes a stage's result: the modules that its function's module reaches, and no others.

A fingerprint covers every module of this project that a stage's module imports, those inside functions too, and what
these import. Each is taken as a syntax tree without comments and docstrings. So an edited comment changes no key, a
changed line in a loss changes the update's alone, and a new mechanism anywhere is seen without being listed.

What says where and when a stage runs, and carries its files, is left out with all that it imports: ORCHESTRATION.

Names that are composed at run time (a policy or a reward found by its configured name) cannot be followed; a stage
names their modules as further roots. The versions of libraries are recorded with a run, and are no part of a key.
"""

import ast
import contextlib
import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_core.user_code.files import PROJECT_PACKAGES
from grpo_core.user_code.syntax import PARSING, Import, SyntaxWalk, parse
from tasks.process import CHECKOUT, collection_paused

ORCHESTRATION = (
    "tasks.execution",
    "tasks.process",
    "tasks.progress",
    "tasks.storage.artifacts",
    "tasks.storage.files",
    "tasks.storage.lease",
    "tasks.storage.links",
    "tasks.storage.prefect_results",
    "tasks.storage.roots",
    "tasks.storage.run_lock",
)
"""Packages and modules that change no value of a result: a stage's time, place, retries, log and files."""

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
"""Libraries that compute."""

_PACKAGE = "__init__.py"


@dataclass(frozen=True)
class ModuleSource:
    """A module as fingerprints see it."""

    text: str  # its syntax tree without comments and docstrings
    # What it imports and uses; what it imports for its decorators or for types alone is not followed.
    used: tuple[Import, ...]
    exported: Mapping[str, tuple[Import, ...]]  # everything that it imports, by bound name


def code_fingerprint(roots: Iterable[str], checkout: Path = CHECKOUT) -> str:
    """Compute the sha256 of the code that the roots reach below a checkout; ValueError for an unknown one.

    A root is `package.module`, or `package.module:name` for a function or class there; the decorators of the module's
    functions are then left out.
    """
    return _digest(tuple(roots), checkout)


def reached_modules(roots: Iterable[str], checkout: Path = CHECKOUT) -> frozenset[str]:
    """Return the modules that a fingerprint covers, packages among them."""
    return frozenset(_reached(tuple(roots), checkout))


@lru_cache(maxsize=64)
def _digest(roots: tuple[str, ...], checkout: Path) -> str:
    digest = hashlib.sha256()
    for module, text in sorted(_reached(roots, checkout).items()):
        digest.update(f"{module}\n{text}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _reached(roots: tuple[str, ...], checkout: Path) -> Mapping[str, str]:
    with PARSING, collection_paused():
        return _follow(roots, checkout)


def _follow(roots: tuple[str, ...], checkout: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = []
    for root in roots:
        module, _, name = root.partition(":")
        source = _source(module, checkout, name)
        if source is None:
            raise ValueError(f"{root}: there is no such module or name in {checkout}")
        found[module] = source.text
        waiting += [(module, source)]
    while waiting:
        module, source = waiting.pop()
        reached = [each for imported in source.used for each in _resolved(imported, checkout)]
        reached += [".".join(module.split(".")[:count]) for count in range(1, module.count(".") + 1)]
        for each in reached:
            if each not in found and not is_orchestration(each) and (source := _source(each, checkout)) is not None:
                found[each] = source.text
                waiting.append((each, source))
    return found


def is_orchestration(module: str) -> bool:
    """Return whether a module changes no value of a result."""
    return any(f"{module}.".startswith(f"{name}.") for name in ORCHESTRATION)


@lru_cache(maxsize=8192)
def _resolved(imported: Import, checkout: Path) -> tuple[str, ...]:
    """Return the modules that an import leads to; of a package all that it exports, unless it is one name."""
    module, name = imported
    if name is not None and _file(f"{module}.{name}", checkout) is not None:
        module, name = f"{module}.{name}", None
    source, file = _source(module, checkout), _file(module, checkout)
    if source is None or file is None:
        return ()
    names = {*source.exported} if name is None else {name} & {*source.exported}
    passed_on = [each for found in names if file.name == _PACKAGE for each in source.exported[found]]
    return module, *(reached for each in passed_on for reached in _resolved(each, checkout))


@lru_cache(maxsize=8192)
def _file(module: str, checkout: Path) -> Path | None:
    """Return the file of a module of this project; None for any other."""
    if module.split(".")[0] not in PROJECT_PACKAGES:
        return None
    path = checkout.joinpath(*module.split("."))
    file = path / _PACKAGE if path.is_dir() else path.with_suffix(".py")
    return file if file.is_file() else None


@lru_cache(maxsize=2048)
def _source(module: str, checkout: Path, name: str = "") -> ModuleSource | None:
    """Parse a module of this project; None for any other, and for one that does not define the name."""
    file = _file(module, checkout)
    if file is None:
        return None
    tree = parse(file.read_text(encoding="utf-8"))
    if name:
        if name not in {getattr(each, "name", None) for each in tree.body}:
            return None
        # The decorators of stages reach everything that runs a stage.
        for each in tree.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                each.decorator_list = []
    is_package = file.name == _PACKAGE
    # A package's own imports only pass names on.
    walk = SyntaxWalk(module if is_package else module.rpartition(".")[0], passes_on=is_package)
    walk.visit(tree)
    used = dict.fromkeys(imported for name, imported, runs in walk.imports if runs and name in walk.names)
    exported: dict[str, tuple[Import, ...]] = {}
    for name, imported, _ in walk.imports:
        exported[name] = (*exported.get(name, ()), imported)
    return ModuleSource(" ".join(walk.text), tuple(used), exported)


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that compute; `none` for one that is not installed."""
    versions = dict.fromkeys(_LIBRARIES, "none")
    for library in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


def running_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), **library_versions()}


def changed_versions(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return `library old -> new` for every version that differs."""
    names = sorted({*previous, *current})
    pairs = [(name, previous.get(name, "none"), current.get(name, "none")) for name in names]
    return [f"{name} {was} -> {now}" for name, was, now in pairs if was != now]
