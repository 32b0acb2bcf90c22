"""Import a user's file and its neighbours, exactly as they were read for the key.

Every folder has modules of its own, so two files that ``import helper`` get the helper next to each. A file that
changed since is imported again, with all that belongs to it; code that imports when called gets what the key says.
"""

import builtins
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from grpo_core.user_code.files import SourceFile, UserCode

_PREFIX = "user_code_"
_IMPORTING = threading.local()


class _Modules:
    """The modules of a folder's tree in one state, under names that nothing else imports."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.name = f"{_PREFIX}{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}_{number}"
        self.files: dict[str, SourceFile] = {}
        self.codes: dict[str, UserCode] = {}
        self.read_while_imported: dict[str, None] = {}

    def agrees_with(self, code: UserCode) -> bool:
        """Whether the code's files are in the state of these modules."""
        known = self.codes.get(code.module, code)
        return known.files == code.files and all(self.files.get(each.module, each) == each for each in _own(code))

    def add(self, code: UserCode) -> None:
        self.codes[code.module] = code
        self.files.update({each.module: each for each in _own(code)})

    def has(self, name: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for module in self.files)

    def do_import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as ``builtins.__import__`` does, the folder's own modules first."""
        first = name.partition(".")[0]
        if level or not self.has(first):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        own = f"{self.name}.{name}"
        if fromlist:
            return builtins.__import__(own, globals, locals, fromlist)
        importlib.import_module(own)
        return sys.modules[f"{self.name}.{first}"]


def _own(code: UserCode) -> Iterator[SourceFile]:
    return (each for each in code.files if each.own)


_CURRENT: dict[Path, _Modules] = {}
_ALL: dict[str, _Modules] = {}


class _Loader(SourceFileLoader):
    """Runs the content that was followed, with an import of its own."""

    def __init__(self, name: str, file: SourceFile, modules: _Modules) -> None:
        super().__init__(name, str(file.path))
        self._content, self._modules = file.content, modules

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._content, self.path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._modules.do_import}
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, module = fullname.partition(".")
        modules = _ALL.get(root)
        if modules is None:
            return None
        file = modules.files.get(module)
        if file is None:
            return _plain_package(fullname, modules, module)
        if file.path.suffix != ".py":
            extension = ExtensionFileLoader(fullname, str(file.path))
            return importlib.util.spec_from_file_location(fullname, file.path, loader=extension)
        folders = [str(file.path.parent)] if file.path.name == "__init__.py" else None
        loader = _Loader(fullname, file, modules)
        return importlib.util.spec_from_file_location(
            fullname, file.path, loader=loader, submodule_search_locations=folders
        )


def _plain_package(fullname: str, modules: _Modules, module: str) -> ModuleSpec | None:
    """Return the root, or a folder without __init__.py, as a package; None if neither."""
    if module and not modules.has(module):
        return None
    spec = ModuleSpec(fullname, None, is_package=True)
    spec.submodule_search_locations = [str(modules.folder.joinpath(*filter(None, module.split("."))))]
    return spec


_FINDER = _Finder()


def import_code(code: UserCode) -> tuple[ModuleType, str]:
    """Import the module of a user's function, from one thread at once; raises whatever the code raises.

    Returns:
        The module, and the name of the state that its folder's modules have; equal as long as none of them changed.
    """
    if code.folder is None:
        return importlib.import_module(code.module), code.digest
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        sys.addaudithook(_note_reads)
    modules = _CURRENT.get(code.folder)
    if modules is None or not modules.agrees_with(code):
        if modules is not None:
            _forget(modules)
        modules = _CURRENT[code.folder] = _Modules(code.folder, len(_ALL))
        _ALL[modules.name] = modules
    modules.add(code)
    folder = str(code.folder)
    if code.unfollowed and folder not in sys.path:
        # What it imports by a computed name is found as by a script; last, so that it hides nothing.
        sys.path.append(folder)
    with _noting_reads(modules):
        return importlib.import_module(f"{modules.name}.{code.module}"), modules.name


def read_while_imported(code: UserCode) -> tuple[str, ...]:
    """Return the files that the modules of the code's folder have read while they were imported."""
    modules = _CURRENT.get(code.folder) if code.folder is not None else None
    return tuple(modules.read_while_imported) if modules is not None else ()


def _forget(modules: _Modules) -> None:
    """Let go of modules whose files have changed; what still runs keeps them."""
    for name in [each for each in sys.modules if each == modules.name or each.startswith(f"{modules.name}.")]:
        del sys.modules[name]


@contextmanager
def _noting_reads(modules: _Modules) -> Iterator[None]:
    before = getattr(_IMPORTING, "modules", None)
    _IMPORTING.modules = modules
    try:
        yield
    finally:
        _IMPORTING.modules = before


def _note_reads(event: str, arguments: tuple[object, ...]) -> None:
    """Note a file that a user's module opens to read, while it is imported; a hook cannot be removed."""
    if event != "open" or (modules := getattr(_IMPORTING, "modules", None)) is None:
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes) or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
        return
    own = {str(file.path) for file in modules.files.values()}
    frame = sys._getframe(1)
    # What an installed package reads while it is imported is not the user's.
    while frame is not None and not (file := frame.f_code.co_filename).startswith("<frozen importlib"):
        if file in own:
            read = os.path.abspath(os.fsdecode(path))
            modules.read_while_imported.update({read: None} if read not in own else {})
            return
        frame = frame.f_back  # type: ignore[assignment]
