"""What the code of a user's function is: its file, and all that it imports from its own folder tree.

Absolute imports are resolved as Python does for a script, the file's own folder first; relative ones, those inside
functions and those of packages are followed too. What lies elsewhere and belongs to no installed distribution is
followed likewise; of a distribution the name and version count. Nothing is imported for it.
"""

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.errors import InputError
from grpo_core.user_code.python_path import (
    PACKAGE_FILE,
    distributions_of,
    find_module,
    find_specification,
    folders_of,
    is_installed,
    origin_of,
)
from grpo_core.user_code.syntax import Import, SyntaxWalk, parse

PROJECT_PACKAGES = ("grpo_core", "tasks", "configs", "data")
"""Packages of this project that a stage, or a user's code, may import."""

_CHECKOUT = Path(__file__).resolve().parents[2]
_UNFOLLOWED = ("import_module", "__import__", "exec", "exec_module", "run_path", "run_module", "load_module")
"""Calls that run code by a name or path that is known only when they run."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the code.

    Attributes:
        module: its dotted name, below the folder of the code or on Python's path.
        content: as it was when it was read, which is what runs.
        digest: sha256 of its syntax tree without comments and docstrings; of the bytes where it is not Python's source.
        own: whether it is of the folder tree of the function's file.
    """

    module: str
    path: Path
    content: bytes
    digest: str
    own: bool


@dataclass(frozen=True)
class UserCode:
    """The code of a user's function.

    Attributes:
        folder: of the function's file; None where it is in an importable module.
        module: that has the function.
        files: that were followed, the function's own first; none where there is no such module.
        distributions: version of each installed distribution that the files import, by name.
        project: modules of this project that they import.
        unfollowed: what counts in no key, as `file:line (why)`.
    """

    folder: Path | None
    module: str
    files: tuple[SourceFile, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    project: tuple[str, ...] = ()
    unfollowed: tuple[str, ...] = ()

    @property
    def parts(self) -> Mapping[str, str]:
        """What the digest is made of: sha256 of each file by its name, and version of each distribution."""
        named = {self._name(each): each.digest for each in self.files}
        return {**named, **{f"package {name}": found for name, found in self.distributions.items()}}

    @property
    def digest(self) -> str:
        """sha256 of all parts, equal in every folder."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    @property
    def files_digest(self) -> str:
        """sha256 of the content of all files, comments included."""
        contents = {self._name(each): hashlib.sha256(each.content).hexdigest() for each in self.files}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    def _name(self, file: SourceFile) -> str:
        if file.own and self.folder is not None:
            return file.path.relative_to(self.folder).as_posix()
        return file.module


def follow_code(reference: str) -> UserCode:
    """Find the code of ``package.module:function`` or ``path/to/file.py:function``; OSError without the file.

    A file is read at each call; an importable module once in a process, since it stays what its first import read.
    """
    module = reference.rpartition(":")[0]
    if not module.endswith(".py"):
        return _follow_module(module)
    file = Path(module).expanduser().resolve()
    # Only names of modules have dots.
    name = file.stem.replace(".", "_")
    following = _Following(file.parent)
    following.add_file(name, file, own=True)
    return following.code(name)


@contextmanager
def code_kept(place: str, references: Iterable[str]) -> Iterator[None]:
    """Raise InputError if the code of functions has changed when the block ends: nobody knows which code was used."""
    before = {reference: follow_code(reference).parts for reference in references}
    yield
    for reference, parts in before.items():
        if changed := changed_parts(parts, follow_code(reference).parts):
            hint = f"It changed while it was used: {', '.join(changed)}. Nothing was kept; start again."
            raise InputError(place, reference, hint)


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that differ, of two `UserCode.parts` or other digests by name."""
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


@functools.cache
def _follow_module(module: str) -> UserCode:
    following = _Following(None, module.partition(".")[0])
    following.add_module(module, own=True)
    return following.code(module)


class _Following:
    """Follows imports from the first file on, of a folder's tree or of a package on Python's path."""

    def __init__(self, folder: Path | None, package: str = "") -> None:
        self._folder, self._package = folder, package
        self._files: dict[tuple[bool, str], SourceFile] = {}
        self._found: dict[tuple[str, bool], bool] = {}
        self._own: dict[str, list[Path] | None] = {}
        self._distributions: dict[str, str] = {}
        self._project: set[str] = set()
        self._unfollowed: dict[str, None] = {}

    def code(self, module: str) -> UserCode:
        files, distributions = tuple(self._files.values()), dict(sorted(self._distributions.items()))
        project, unfollowed = tuple(sorted(self._project)), tuple(self._unfollowed)
        return UserCode(self._folder, module, files, distributions, project, unfollowed)

    def add_file(self, module: str, path: Path, *, own: bool) -> None:
        """Add a file and all that it imports; raises OSError where it cannot be read."""
        if (own, module) in self._files:
            return
        content = path.read_bytes() if own and self._folder is not None else _first_content(path)
        found = _parsed(content, _package_of(module, path), path.suffix == ".py")
        self._files[own, module] = SourceFile(module, path, content, found.digest, own)
        missing = [name for name, _ in found.imports if not self.add_module(name, own=own)]
        for imported, name in found.imports:
            listed = self._listed(imported, own) if name == "*" else [name] if name else []
            for each in listed:
                self.add_module(f"{imported}.{each}".lstrip("."), own=own)
        for line, call, name in found.computed:
            if call == "sys.path" and not missing:
                continue
            followed = name and self.add_module(name, own=own)
            # The statement's own function gives what was followed; another finds it on Python's path.
            if not name or (followed and call != "__import__" and (True, name) in self._files):
                self._unfollowed[f"{path.name}:{line} ({call})"] = None

    def add_module(self, module: str, *, own: bool) -> bool:
        """Add the files of a module and its packages, the user's own first; return whether there is such a module."""
        if module and (module, own) not in self._found:
            self._found[module, own] = self._add_module(module, own)
        return not module or self._found[module, own]

    def _add_module(self, module: str, own: bool) -> bool:
        first, *_ = names = module.split(".")
        if own and first not in self._own:
            self._own[first] = self._own_folders(first)
        folders = self._own[first] if own else None
        is_own = folders is not None
        if folders is None:
            folders, is_known = self._elsewhere(module)
            if not folders:
                return is_known
        for count, name in enumerate(names, 1):
            found = find_module(name, folders)
            if found is None:
                return False
            path, folders = found
            if path is not None:
                self.add_file(".".join(names[:count]), path, own=is_own)
        return True

    def _listed(self, module: str, own: bool) -> Sequence[str]:
        file = self._files.get((True, module)) if own else None
        file = file or self._files.get((False, module))
        return _parsed(file.content, module, True).listed if file and file.path.name == PACKAGE_FILE else ()

    def _own_folders(self, name: str) -> list[Path] | None:
        """Return where a top-level name of the user's own tree is looked for; None if it is no such name."""
        if self._folder is None:
            spec = find_specification(name) if name == self._package else None
            origin = origin_of(spec)
            is_own = origin is not None and not is_installed(origin) and name not in sys.stdlib_module_names
            return folders_of(spec) if spec and is_own and not _is_of_project(name, origin) else None
        found = None if name in sys.builtin_module_names else find_module(name, [self._folder])
        if found is None or _is_of_project(name, found[0]):
            return None
        # A folder without __init__.py is a package only if there is no other of its name.
        return [self._folder] if found[0] is not None or origin_of(find_specification(name)) is None else None

    def _elsewhere(self, module: str) -> tuple[list[Path], bool]:
        """Note what a name not the user's own stands for; return where to follow it, and whether there is such."""
        name = module.partition(".")[0]
        if name in sys.stdlib_module_names:
            if name == self._package:
                self._distributions["python"] = ".".join(map(str, sys.version_info[:3]))
            return [], True
        spec = find_specification(name)
        if spec is None:
            return [], False
        origin = origin_of(spec)
        if _is_of_project(name, origin):
            self._project.add(_nearest_module(module))
        elif found := distributions_of(name, searched=origin is None or is_installed(origin)):
            self._distributions.update(found)
            if origin is not None and not is_installed(origin):
                self._unfollowed[f"{name} (installed from its sources, and only its version counts)"] = None
        else:
            return folders_of(spec), True
        return [], True


@dataclass(frozen=True)
class _Parsed:
    """What a file says: its imports and ``__all__``, and calls, with their lines, of computed or fixed names."""

    digest: str
    imports: tuple[Import, ...] = ()
    computed: tuple[tuple[int, str, str], ...] = ()
    listed: tuple[str, ...] = ()


@functools.lru_cache(maxsize=2048)
def _parsed(content: bytes, package: str, is_source: bool) -> _Parsed:
    try:
        tree = parse(content) if is_source else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        # Importing it says what is wrong with it.
        return _Parsed(hashlib.sha256(content).hexdigest())
    walk = SyntaxWalk(package)
    walk.visit(tree)
    imports = tuple(dict.fromkeys(imported for _, imported, runs in walk.imports if runs))
    computed = [*_computed(tree), *((line, "relative import", "") for line in walk.beyond)]
    digest = hashlib.sha256(" ".join(walk.text).encode()).hexdigest()
    return _Parsed(digest, imports, tuple(computed), tuple(_all_of(tree)))


def _computed(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            yield node.lineno, "sys.path", ""
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if called not in _UNFOLLOWED or (called == "exec" and not isinstance(node.func, ast.Name)):
                continue
            fixed = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            is_name = isinstance(fixed, str) and called in ("import_module", "__import__") and fixed[:1] != "."
            yield node.lineno, called, str(fixed) if is_name else ""


def _all_of(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        if any(getattr(target, "id", None) == "__all__" for target in targets):
            yield from (str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))


@functools.cache
def _first_content(path: Path) -> bytes:
    return path.read_bytes()


def _package_of(module: str, path: Path) -> str:
    return module if path.name == PACKAGE_FILE else module.rpartition(".")[0]


def _is_of_project(name: str, path: Path | None) -> bool:
    return name in PROJECT_PACKAGES and path is not None and path.is_relative_to(_CHECKOUT)


def _nearest_module(module: str) -> str:
    """Return the innermost module of this project in a dotted name, which may go on with an attribute."""
    names = module.split(".")
    for count in range(len(names), 1, -1):
        if find_module(names[count - 1], [_CHECKOUT.joinpath(*names[: count - 1])]) is not None:
            return ".".join(names[:count])
    return names[0]
