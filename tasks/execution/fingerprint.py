"""Fingerprint the code that computes a stage's result: everything that its function reaches, and nothing else.

A fingerprint covers every function, class and constant of this project that a stage can reach by name, starting at its
function and following imports through all modules, those inside functions too. Each is taken as a syntax tree without
comments and docstrings. So an edited comment changes no key, a changed line in a loss changes the update's alone, and a
new mechanism anywhere is seen without being listed.

Names that are composed at run time (a policy or a reward found by its configured name) cannot be followed; a stage
names their modules as further roots. The versions of libraries are recorded with a run, and are no part of a key.
"""

import ast
import copy
import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path

from tasks.checkout import CHECKOUT

PACKAGES = ("grpo_core", "tasks", "configs", "data")
"""Packages of this project that a stage may import."""

Symbol = tuple[str, str]
"""A module and a name at its top level."""

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

_PARSING = threading.Lock()
"""Python 3.11 raises SystemError in one of two threads that build syntax trees at once."""


@dataclass(frozen=True)
class ModuleSource:
    """A module's top level.

    Attributes:
        definitions: statements by the name that they bind.
        imports: the module and the name in it by bound name; None for a module itself. Imports inside functions count.
        effects: statements that bind no name; they run whenever the module is imported.
    """

    definitions: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    imports: dict[str, list[tuple[str, str | None]]] = field(default_factory=lambda: defaultdict(list))
    effects: list[ast.stmt] = field(default_factory=list)


def code_fingerprint(roots: Iterable[str], checkout: Path = CHECKOUT) -> str:
    """Compute the sha256 of the code that the roots reach.

    Args:
        roots: `package.module:name` for a function or class, whose decorators are left out, or `package.module` for
            everything that a module defines.
        checkout: folder that holds the packages.

    Raises:
        ValueError: there is no such module or name.
    """
    with _PARSING:
        return _digest(tuple(roots), checkout)


def reached_symbols(roots: Iterable[str], checkout: Path = CHECKOUT) -> frozenset[Symbol]:
    """Return the module and name of all that a fingerprint covers; an empty name for a module's bare statements."""
    with _PARSING:
        return frozenset(_reached(tuple(roots), checkout))


@lru_cache(maxsize=64)
def _digest(roots: tuple[str, ...], checkout: Path) -> str:
    digest = hashlib.sha256()
    for (module, name), text in sorted(_reached(roots, checkout).items()):
        digest.update(f"{module}:{name}\n{text}\n".encode())
    return digest.hexdigest()


def _reached(roots: tuple[str, ...], checkout: Path) -> dict[Symbol, str]:
    found: dict[Symbol, str] = {}
    waiting: list[Symbol] = []
    undecorated = set()
    for root in roots:
        module, _, name = root.partition(":")
        source = _source(module, checkout)
        if source is None or (name and name not in source.definitions):
            raise ValueError(f"{root}: there is no such module or name in {checkout}")
        undecorated.add((module, name))
        waiting += [(module, each) for each in ([name] if name else source.definitions)]
    while waiting:
        symbol = waiting.pop()
        module, name = symbol
        source = _source(module, checkout)
        if symbol in found or source is None:
            continue
        if name and name not in source.definitions:
            waiting += _imported(source, name, checkout)
            continue
        found[symbol], named = _read(module, name, checkout, decorated=symbol not in undecorated)
        waiting += [(parent, "") for parent in _with_parents(module)]
        waiting += named
    return {symbol: text for symbol, text in found.items() if text}


@lru_cache(maxsize=8192)
def _read(module: str, name: str, checkout: Path, *, decorated: bool) -> tuple[str, tuple[Symbol, ...]]:
    """Return the code of a name, or of a module's bare statements, and what it names; stages share most of theirs."""
    source = _source(module, checkout)
    assert source is not None, "a module of this project"
    statements = source.definitions[name] if name else source.effects
    if not decorated:
        statements = [_without_decorators(each) for each in statements]
    named = tuple(each for statement in statements for each in _named(statement, module, source, checkout))
    return "\n".join(map(ast.unparse, statements)), named


def _named(statement: ast.stmt, module: str, source: ModuleSource, checkout: Path) -> Iterator[Symbol]:
    """Yield what a statement names: in its own module, and as `module.name` in others."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and (chain := _dotted(node)) is not None:
            yield from _through_modules(source, chain, checkout)
        names = [node.id] if isinstance(node, ast.Name) else _quoted_annotation(node)
        for name in names:
            if name in source.definitions:
                yield module, name
            elif name in source.imports:
                yield from _imported(source, name, checkout)


def _imported(source: ModuleSource, name: str, checkout: Path) -> Iterator[Symbol]:
    """Yield where an imported name leads; attributes of an imported module are found where they are used."""
    for module, attribute in source.imports.get(name, ()):
        if attribute is not None and _source(f"{module}.{attribute}", checkout) is None:
            yield module, attribute


def _through_modules(source: ModuleSource, chain: list[str], checkout: Path) -> Iterator[Symbol]:
    """Yield `module.name` where the module was imported as an object."""
    for module, attribute in source.imports.get(chain[0], ()):
        path = module if attribute is None else f"{module}.{attribute}"
        rest = chain[1:]
        while rest and _source(f"{path}.{rest[0]}", checkout) is not None:
            path, rest = f"{path}.{rest[0]}", rest[1:]
        if rest and _source(path, checkout) is not None:
            yield path, rest[0]


def _dotted(node: ast.Attribute) -> list[str] | None:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return [value.id, *reversed(names)] if isinstance(value, ast.Name) else None


def _quoted_annotation(node: ast.AST) -> list[str]:
    """Return the names in string annotations of an argument, a result or a field."""
    if isinstance(node, ast.arg | ast.AnnAssign):
        annotation = node.annotation
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        annotation = node.returns
    else:
        return []
    constants = [each.value for each in ast.walk(annotation) if isinstance(each, ast.Constant)] if annotation else []
    quoted = [value for value in constants if isinstance(value, str)]
    names: list[str] = []
    for text in quoted:
        try:
            names += [each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)]
        except SyntaxError:
            # A shape of jaxtyping, or a value of a Literal.
            continue
    return names


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@lru_cache(maxsize=1024)
def _source(module: str, checkout: Path) -> ModuleSource | None:
    """Parse a module of this project; None for any other."""
    if module.split(".")[0] not in PACKAGES:
        return None
    path = checkout.joinpath(*module.split("."))
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path.with_suffix(".py")
    if not file.is_file():
        return None
    # A body that was only a docstring becomes empty.
    tree = _DropText().visit(ast.parse(file.read_text(encoding="utf-8")))
    package = module if is_package else module.rpartition(".")[0]
    source = ModuleSource()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                source.imports[bound].append((alias.name if alias.asname else bound, None))
        elif isinstance(node, ast.ImportFrom):
            target = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                source.imports[alias.asname or alias.name].append((target, alias.name))
    for statement in tree.body:
        names = _bound_names(statement)
        for name in names:
            source.definitions[name].append(statement)
        runs = not isinstance(statement, ast.Import | ast.ImportFrom) and not _is_for_types(statement)
        if not names and runs:
            source.effects.append(statement)
    return source


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and isinstance(test := statement.test, ast.Name) and test.id == "TYPE_CHECKING"


def _without_decorators(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement
    copied = copy.copy(statement)
    copied.decorator_list = []
    return copied


class _DropText(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if _is_text(node) else node


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
