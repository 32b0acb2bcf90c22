"""Fingerprint the code that computes a stage's result: everything that its function reaches, and nothing else.

A fingerprint covers every function, class and constant of this project that a stage can reach by name, starting at its
function and following imports through all modules, those inside functions too. Each is taken as a syntax tree without
comments and docstrings. So an edited comment changes no key, a changed line in a loss changes the update's alone, and a
new mechanism anywhere is seen without being listed.

Names that are composed at run time (a policy or a reward found by its configured name) cannot be followed; a stage
names their modules as further roots. The versions of libraries are recorded with a run, and are no part of a key.
"""

import ast
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
from tasks.garbage_collection import collection_paused

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
class Code:
    """A statement, or its decorators.

    Attributes:
        text: its syntax tree without docstrings; equal for statements that differ in format and comments alone.
        names: the names in it, those in quoted annotations too.
        chains: the dotted names in it, `a.b.c` as ("a", "b", "c").
    """

    text: str
    names: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModuleSource:
    """A module's top level.

    Attributes:
        definitions: statements by the name that they bind, each with its decorators; None without any.
        imports: the module and the name in it by bound name; None for a module itself. Imports inside functions count.
        effects: statements that bind no name; they run whenever the module is imported.
    """

    definitions: dict[str, list[tuple[Code | None, Code]]] = field(default_factory=lambda: defaultdict(list))
    imports: dict[str, list[tuple[str, str | None]]] = field(default_factory=lambda: defaultdict(list))
    effects: list[Code] = field(default_factory=list)


def code_fingerprint(roots: Iterable[str], checkout: Path = CHECKOUT) -> str:
    """Compute the sha256 of the code that the roots reach.

    Args:
        roots: `package.module:name` for a function or class, whose decorators are left out, or `package.module` for
            everything that a module defines.
        checkout: folder that holds the packages.

    Raises:
        ValueError: there is no such module or name.
    """
    with _PARSING, collection_paused():
        return _digest(tuple(roots), checkout)


def reached_symbols(roots: Iterable[str], checkout: Path = CHECKOUT) -> frozenset[Symbol]:
    """Return the module and name of all that a fingerprint covers; an empty name for a module's bare statements."""
    with _PARSING, collection_paused():
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
    parts = source.effects
    if name:
        parts = [each for pair in source.definitions[name] for each in (pair if decorated else pair[1:]) if each]
    named = dict.fromkeys(symbol for part in parts for symbol in _named(part, module, source, checkout))
    return "\n".join(part.text for part in parts), tuple(named)


def _named(code: Code, module: str, source: ModuleSource, checkout: Path) -> Iterator[Symbol]:
    """Yield what a statement names: in its own module, and as `module.name` in others."""
    for chain in code.chains:
        yield from _through_modules(source, chain, checkout)
    for name in code.names:
        if name in source.definitions:
            yield module, name
        elif name in source.imports:
            yield from _imported(source, name, checkout)


def _imported(source: ModuleSource, name: str, checkout: Path) -> Iterator[Symbol]:
    """Yield where an imported name leads; attributes of an imported module are found where they are used."""
    for module, attribute in source.imports.get(name, ()):
        if attribute is not None and _source(f"{module}.{attribute}", checkout) is None:
            yield module, attribute


def _through_modules(source: ModuleSource, chain: tuple[str, ...], checkout: Path) -> Iterator[Symbol]:
    """Yield `module.name` where the module was imported as an object."""
    for module, attribute in source.imports.get(chain[0], ()):
        path = module if attribute is None else f"{module}.{attribute}"
        rest = chain[1:]
        while rest and _source(f"{path}.{rest[0]}", checkout) is not None:
            path, rest = f"{path}.{rest[0]}", rest[1:]
        if rest and _source(path, checkout) is not None:
            yield path, rest[0]


class _Walk:
    """One pass over a syntax tree that gathers everything that a fingerprint needs of it."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.imports: list[tuple[str, tuple[str, str | None]]] = []
        self._begin()

    def _begin(self) -> None:
        self.text: list[str] = []
        self.names: dict[str, None] = {}
        self.chains: dict[tuple[str, ...], None] = {}

    def code(self, *nodes: ast.AST, without: str = "") -> Code:
        """Return the code of these nodes, without one field of theirs."""
        self._begin()
        for node in nodes:
            self._visit(node, without)
        return Code(" ".join(self.text), tuple(self.names), tuple(self.chains))

    def _visit(self, node: ast.AST, without: str = "") -> None:
        self._note(node)
        text = self.text
        # Fields that are empty are left out: later versions of Python add some.
        text.append(f"({type(node).__name__}")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or name == without:
                continue
            if isinstance(value, ast.AST):
                text.append(name)
                self._visit(value)
            elif not isinstance(value, list):
                text.append(f"{name} {value!r}")
            elif value:
                text.append(f"{name} [")
                for each in value:
                    if not isinstance(each, ast.AST):
                        text.append(repr(each))
                    elif not _is_text(each):
                        self._visit(each)
                text.append("]")
        text.append(")")

    def _note(self, node: ast.AST) -> None:
        """Keep what a node imports or names."""
        if isinstance(node, ast.Name):
            self.names[node.id] = None
        elif isinstance(node, ast.Attribute):
            if chain := _dotted(node):
                self.chains[chain] = None
        elif isinstance(node, ast.arg | ast.AnnAssign):
            self.names |= dict.fromkeys(_quoted_names(node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.names |= dict.fromkeys(_quoted_names(node.returns))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                self.imports.append((bound, (alias.name if alias.asname else bound, None)))
        elif isinstance(node, ast.ImportFrom):
            target = resolve_name("." * node.level + (node.module or ""), self.package)
            self.imports += [(alias.asname or alias.name, (target, alias.name)) for alias in node.names]


def _dotted(node: ast.Attribute) -> tuple[str, ...]:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return (value.id, *reversed(names)) if isinstance(value, ast.Name) else ()


def _quoted_names(annotation: ast.expr | None) -> list[str]:
    """Return the names in the strings of an annotation."""
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
    source, walk = ModuleSource(), _Walk(module if is_package else module.rpartition(".")[0])
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        decorators = getattr(statement, "decorator_list", [])
        code = walk.code(statement, without="decorator_list")
        names = _bound_names(statement)
        for name in names:
            source.definitions[name].append((walk.code(*decorators) if decorators else None, code))
        runs = not isinstance(statement, ast.Import | ast.ImportFrom) and not _is_for_types(statement)
        if not names and runs and not _is_text(statement):
            source.effects.append(code)
    for name, imported in walk.imports:
        source.imports[name].append(imported)
    return source


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and isinstance(test := statement.test, ast.Name) and test.id == "TYPE_CHECKING"


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
