"""Load a user's function by ``module:function``; errors name its file and line."""

import contextlib
import difflib
import functools
import inspect
import json
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from grpo_core.errors import InputError
from grpo_core.user_code.files import UserCode, follow_code
from grpo_core.user_code.modules import import_code, read_while_imported

REFERENCE = re.compile(r".+:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""``package.module:function`` or ``path/to/file.py:function``."""

SHOWN_CHARACTERS = 200
"""Length of the message of a user's error that is shown."""


@dataclass(frozen=True)
class UserFunction:
    """A function and its code.

    Attributes:
        place: file and line of its definition, as a person opens them.
        arguments: a JSON object of keyword arguments that go along with every call.
    """

    call: Callable[..., object]
    place: str
    code: UserCode
    arguments: str = "{}"

    @property
    def unfollowed(self) -> tuple[str, ...]:
        """What its code runs or has read while it was imported, and the digest of its code does not see."""
        return (*self.code.unfollowed, *(f"{path} (read by an import)" for path in read_while_imported(self.code)))

    def raised_at(self, error: BaseException) -> str:
        """Return file and line of the function's last statement that led to the error, or of its definition."""
        own = _lines_of(error, self.place.rpartition(":")[0])
        return own[-1] if own else self.place

    @property
    def signature(self) -> inspect.Signature | None:
        """Its parameters, those of `arguments` with a default; None where Python cannot tell."""
        return signature_of(functools.partial(self.call, **json.loads(self.arguments)))

    @property
    def required(self) -> list[str]:
        """Names of the parameters that a call must pass; empty where Python cannot tell."""
        parameters = self.signature.parameters.values() if self.signature is not None else ()
        by_name = [entry for entry in parameters if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY)]
        return [entry.name for entry in by_name if entry.default is entry.empty]

    def run(self, keywords: Mapping[str, object]) -> object:
        """Call the function with a fresh copy of `arguments`."""
        return self.call(**{**json.loads(self.arguments), **keywords})


_LOADING = threading.RLock()


def load_function(place: str, reference: str, arguments: str = "{}", *, factory: bool = False) -> UserFunction:
    """Import the function, once per process for each state of its code; InputError if it cannot be imported.

    `arguments`, a JSON object, go along with every call, or with that of a factory, which gives the function.
    """
    with _LOADING:
        code, _, state = _import(place, reference)
        # The state also tells sources apart that differ in their lines alone.
        return _build(place, reference, arguments, factory, code.digest, state)


def find_function(place: str, reference: str) -> Callable[..., object]:
    """Import what `reference` names; raises as :func:`load_function`."""
    module, _, name = reference.rpartition(":")
    with _LOADING:
        found: object = _import(place, reference)[1]
    for part in name.split("."):
        known = [key for key in dir(found) if not key.startswith("_")]
        try:
            found = getattr(found, part)
        except AttributeError as error:
            close = difflib.get_close_matches(part, known, n=3, cutoff=0.5)
            listed = f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(known[:20]) or 'nothing'}."
            raise InputError(place, reference, f"{module} has no {part}. {listed}") from error
    if not callable(found):
        raise InputError(place, reference, f"It is {type(found).__name__}, not a function. Name a function.")
    return found


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """Return the function's parameters; None where Python cannot tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def keeping_folder() -> Iterator[None]:
    """Return to the folder in which the first of the calls under way began, whatever a user's code changes to.

    The folder is the whole process's: a call that began in one that another had changed to would return to that.
    """
    with _CHANGING:
        _FOLDERS.append(_FOLDERS[0] if _FOLDERS else os.getcwd())
    try:
        yield
    finally:
        with _CHANGING:
            os.chdir(_FOLDERS.pop())


_CHANGING = threading.Lock()
_FOLDERS: list[str] = []


@functools.lru_cache(maxsize=64)
def _build(place: str, reference: str, arguments: str, factory: bool, digest: str, state: str) -> UserFunction:
    function, given = find_function(place, reference), arguments
    if factory:
        named = function
        try:
            with keeping_folder():
                made: object = named(**json.loads(arguments))
        except (Exception, SystemExit) as error:  # whatever a user's code raises is reported with its place
            where = _origin(error, _code_of(place, reference, named).co_filename)
            hint = f"Calling it raised {shown_error(error)} at {where}. Set `arguments` to what it takes."
            raise InputError(place, reference, hint) from error
        if not callable(made):
            hint = f"It gave {type(made).__name__} instead of a reward function. Set `factory: false`."
            raise InputError(place, reference, hint)
        function, given = made, "{}"
    code = _code_of(place, reference, function)
    return UserFunction(function, f"{code.co_filename}:{code.co_firstlineno}", _import(place, reference)[0], given)


def _import(place: str, reference: str) -> tuple[UserCode, ModuleType, str]:
    """Return the code of a reference, its module, and a name for the state in which this is."""
    module = reference.rpartition(":")[0]
    file = Path(module).expanduser().resolve() if module.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(place, reference, f"There is no file {file}. Give its path, from where grpo is started.")
    try:
        code = follow_code(reference)
        with keeping_folder():
            return code, *import_code(code)
    except (Exception, SystemExit) as error:  # whatever a user's code raises is reported with its place
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if file is None and missing is not None and f"{module}.".startswith(f"{missing}."):
            hint = f"There is no module {missing}. Install it, or give a file by its path, as {module}.py:NAME."
            raise InputError(place, reference, hint) from error
        where = _origin(error, str(file) if file is not None else None)
        hint = f"Importing it raised {shown_error(error)} at {where}. Fix that first."
        raise InputError(place, reference, hint) from error


def _code_of(place: str, reference: str, function: Callable[..., object]) -> CodeType:
    """Return the code that a call runs: a partial's function, the method ``__call__`` of an object or a class."""
    inner: object = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner) if callable(inner) else inner
    if not inspect.isroutine(inner):
        inner = (inner if inspect.isclass(inner) else type(inner)).__call__
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if not isinstance(code, CodeType) or not Path(code.co_filename).is_file():
        hint = "It has no Python source file, so changes of it would not be noticed. Wrap it in a function of yours."
        raise InputError(place, reference, hint)
    return code


def _origin(error: BaseException, file: str | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return (_lines_of(error, file) or _lines_of(error) or ["an unknown place:0"])[-1]


def _lines_of(error: BaseException, file: str | None = None) -> list[str]:
    """Return `file:line` of each frame that led to an error, of one file or of all."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [f"{at}:{line}" for at, line in frames if file in (None, at)]


def shown_error(error: BaseException) -> str:
    """Name an error that a user's code raised, with its message, of which a long one is cut."""
    message = str(error)
    message = message if len(message) <= SHOWN_CHARACTERS else f"{message[: SHOWN_CHARACTERS - 3]}..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
