"""The code of a user's function: what it imports counts, what counts is what runs, and folders stay apart."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from grpo_core.losses.settings import custom_loss_digest, load_custom_loss
from grpo_core.rewards.functions.reward import FunctionReward
from grpo_core.rewards.reward import provenance_of
from grpo_core.user_code.files import follow_code
from grpo_core.user_code.functions import UserFunction, keeping_folder, load_function
from tests.grpo_core.rewards.functions.conftest import texts


@dataclass(frozen=True)
class Layout:
    """Files of a reward whose score is 1 before and 2 after the text of one of them is replaced."""

    edited: str
    files: Mapping[str, str]
    old: str = "VALUE = 1"
    new: str = "VALUE = 2"


def mine(imports: str, value: str = "VALUE") -> str:
    return f"{imports}\ndef score(completions, **kwargs):\n    return [float({value})] * len(completions)\n"


LAZY = "def score(completions, **kwargs):\n    {}\n    return [float(VALUE)] * len(completions)\n"
HELPER = {"helper.py": "VALUE = 1\n"}
PACKAGE = {"pkg/__init__.py": "", "pkg/sub.py": "VALUE = 1\n"}


def of_helper(source: str, **others: str) -> Layout:
    """A reward with a neighbour helper.py, which is edited."""
    return Layout("helper.py", {"mine.py": source, **HELPER, **{f"{name}.py": text for name, text in others.items()}})


def of_package(source: str, init: str = "", edited: str = "sub", **others: str) -> Layout:
    """A reward with a package pkg, of which one file is edited."""
    files = {f"pkg/{name.replace('_of_', '/')}.py": text for name, text in others.items()}
    return Layout(f"pkg/{edited}.py", {"mine.py": source, **PACKAGE, "pkg/__init__.py": init, **files})


def of_one(name: str) -> Layout:
    """A reward with a neighbour of this name."""
    return Layout(f"{name}.py", {"mine.py": mine(f"from {name} import VALUE"), f"{name}.py": "VALUE = 1"})


IN_EXCEPT = "try:\n    from absent import VALUE\nexcept ImportError:\n    from helper import VALUE"
LAYOUTS = {
    "its own file": Layout("mine.py", {"mine.py": mine("VALUE = 1")}),
    "a neighbour": of_helper(mine("import helper", "helper.VALUE")),
    "a name of a neighbour": of_helper(mine("from helper import VALUE")),
    "everything of a neighbour": of_helper(mine("from helper import *")),
    "in a function": of_helper(LAZY.format("from helper import VALUE")),
    "by __import__": of_helper(mine("VALUE = __import__('helper').VALUE")),
    "what a neighbour imports": of_helper(mine("from user import VALUE"), user="from helper import VALUE"),
    "in a function of a neighbour": of_helper(
        mine("from user import value", "value()"), user="def value():\n    import helper\n    return helper.VALUE\n"
    ),
    "a circle": of_helper(mine("import user", "user.helper.VALUE"), user="import mine, helper"),
    "where another is missing": of_helper(mine(IN_EXCEPT)),
    "a module of a package": of_package(mine("import pkg.sub", "pkg.sub.VALUE")),
    "a module under a name": of_package(mine("import pkg.sub as s", "s.VALUE")),
    "a module from a package": of_package(mine("from pkg import sub", "sub.VALUE")),
    "all that a package lists": of_package(mine("from pkg import *", "sub.VALUE"), "__all__ = ['sub']"),
    "all that a package lists, with its type": of_package(
        mine("from pkg import *", "sub.VALUE"), "__all__: list[str] = ['sub']"
    ),
    "all that a package adds to its list": of_package(
        mine("from pkg import *", "sub.VALUE"), "__all__ = []\n__all__ += ['sub']"
    ),
    "a package itself": of_package(mine("import pkg.sub", "pkg.VALUE"), "VALUE = 1", "__init__"),
    "what a package passes on": of_package(mine("from pkg import VALUE"), "from .sub import VALUE"),
    "relative, of the package": of_package(mine("from pkg.user import sub", "sub.VALUE"), user="from . import sub"),
    "relative, of the package above": of_package(
        mine("from pkg.low.user import VALUE"), low_of_user="from ..sub import VALUE", low_of___init__=""
    ),
    "a folder without __init__": Layout(
        "pkg/sub.py", {"mine.py": mine("from pkg.sub import VALUE"), "pkg/sub.py": "VALUE = 1"}
    ),
    "a name of the standard library": of_one("colorsys"),
    "a name of an installed package": of_one("tqdm"),
}


def write(folder: Path, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder}/mine.py:score"


def score(reference: str) -> float | None:
    return FunctionReward(function=reference).score(texts(1))[0].value


def as_scripts(folders: list[Path]) -> list[float]:
    """What Python itself gives, with each folder first on its path."""
    program = (
        "import json, os, sys\n"
        "for folder in sys.argv[1:]:\n"
        "    read, write = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        sys.path.insert(0, folder)\n"
        "        import mine\n"
        "        os.write(write, json.dumps(mine.score([0])[0]).encode())\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    print(os.read(read, 99).decode())\n"
    )
    command = [sys.executable, "-B", "-c", program, *map(str, folders)]
    return [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]


def test_what_a_file_imports_counts_and_runs(tmp_path: Path) -> None:
    """Every layout gives Python's own value before and after the edit, in one process, and another version after it."""
    folders = {name: tmp_path / str(index) for index, name in enumerate(LAYOUTS)}
    for state, expected in (("old", 1.0), ("new", 2.0)):
        found = {}
        for name, layout in LAYOUTS.items():
            text = layout.files[layout.edited]
            assert layout.old in text, name
            edited = text if state == "old" else text.replace(layout.old, layout.new)
            reference = write(folders[name], {**layout.files, layout.edited: edited})
            before = layout.files[layout.edited] if state == "new" else None
            found[name] = score(reference)
            if before is not None:
                changed = FunctionReward(function=reference).version
                write(folders[name], {layout.edited: before})
                assert FunctionReward(function=reference).version != changed, name
                assert score(reference) == 1.0, name
                write(folders[name], {layout.edited: edited})
        assert found == dict.fromkeys(LAYOUTS, expected)
        assert as_scripts(list(folders.values())) == [expected] * len(folders)


@pytest.mark.parametrize("name", LAYOUTS)
def test_comments_docstrings_and_the_folder_do_not_count(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    reference = write(tmp_path / "one", layout.files)
    other = {file: f'"""Other words."""\n# A comment.\n{text}\n# And another.\n' for file, text in layout.files.items()}
    moved = write(tmp_path / "two", other)
    write(tmp_path / "two", {"not_imported.py": "VALUE = 3"})
    assert provenance_of(FunctionReward(function=moved)) == provenance_of(FunctionReward(function=reference))
    assert follow_code(reference).unfollowed == ()


def test_a_folders_modules_are_its_own(tmp_path: Path) -> None:
    lazy = {"mine.py": LAZY.format("from helper import VALUE")}
    folders = [tmp_path / name for name in ("a", "b", "c")]
    references = [write(folder, {**lazy, "helper.py": f"VALUE = {n}"}) for n, folder in enumerate(folders)]
    with ThreadPoolExecutor(len(references)) as threads:
        assert list(threads.map(score, references * 20)) == [0.0, 1.0, 2.0] * 20
    assert "helper" not in sys.modules
    assert not {str(folder) for folder in folders} & {*sys.path}


def test_files_of_one_folder_share_their_helper_until_it_changes(tmp_path: Path) -> None:
    counting = {"helper.py": "made = []\n"}
    count = (
        "import helper\ndef score(completions, **kwargs):\n    helper.made.append(1)\n    return [len(helper.made)]\n"
    )
    first = write(tmp_path, {"mine.py": count, "second.py": count, **counting})
    second = first.replace("mine.py", "second.py")
    assert [score(first), score(second), score(first)] == [1, 2, 3]
    write(tmp_path, {"helper.py": "made = [0]\n"})
    assert [score(first), score(second)] == [2, 3]


def test_what_was_read_for_the_key_runs_even_if_the_file_changes_before_it_is_imported(tmp_path: Path) -> None:
    reference = write(tmp_path, {"mine.py": LAZY.format("from helper import VALUE"), **HELPER})
    function = load_function("rewards", reference)
    write(tmp_path, {"helper.py": "VALUE = 2"})
    assert function.run({"completions": ["x"]}) == [1.0]
    assert load_function("rewards", reference).run({"completions": ["x"]}) == [2.0]


def test_distributions_count_by_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write(
        tmp_path, {"mine.py": mine("import json, re\nimport numpy as np\nfrom PIL import Image\nVALUE = 1")}
    )
    assert follow_code(reference).distributions == {"numpy": version("numpy"), "pillow": version("pillow")}
    assert follow_code("trl.rewards:think_format_reward").distributions == {"trl": version("trl")}
    before = FunctionReward(function=reference).version
    monkeypatch.setattr("grpo_core.user_code.python_path.version", lambda name: "0.1")
    assert FunctionReward(function=reference).version != before


def test_a_module_on_pythons_path_is_followed_and_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path's modules are imported once in a process, so their first state is what runs."""
    monkeypatch.syspath_prepend(tmp_path / "path")
    lib = {"path/lib_on_path/__init__.py": "", "path/lib_on_path/a.py": "from .b import VALUE\n" + mine("")}
    write(
        tmp_path, {**lib, "path/lib_on_path/b.py": "VALUE = 1", "own/mine.py": mine("from lib_on_path.a import VALUE")}
    )
    module, file = "lib_on_path.a:score", f"{tmp_path}/own/mine.py:score"
    assert {"lib_on_path", "lib_on_path.a", "lib_on_path.b"} == {*follow_code(module).parts}
    assert {"mine.py", "lib_on_path", "lib_on_path.a", "lib_on_path.b"} == {*follow_code(file).parts}
    before = [FunctionReward(function=each).version for each in (module, file)]
    assert [score(module), score(file)] == [1.0, 1.0]
    write(tmp_path, {"path/lib_on_path/b.py": "VALUE = 2"})
    assert [FunctionReward(function=each).version for each in (module, file)] == before
    assert [score(module), score(file)] == [1.0, 1.0]


def test_modules_of_this_project_are_named_for_the_stages_fingerprint(tmp_path: Path) -> None:
    imports = (
        "import grpo_core.seeds\nfrom grpo_core.rollouts.images import to_rgb\nfrom grpo_core.rollouts import streams"
    )
    reference = write(tmp_path, {"mine.py": mine(f"{imports}\nVALUE = 1")})
    followed = {*follow_code(reference).project}
    assert followed >= {"grpo_core.seeds", "grpo_core.rollouts.images", "grpo_core.rollouts.streams"}
    assert score(reference) == 1.0


READ = "{folder}/data.json (read by an import)"
OPEN = "import json, os\nwith open(os.path.dirname(__file__) + '/data.json') as file:\n    VALUE = json.load(file)"
ELSEWHERE = (
    "import sys\nsys.path.insert(0, __file__ + '/../lib')\nVALUE = 1\n"
    "try:\n    import in_lib\nexcept ImportError:\n    pass"
)
UNFOLLOWED: Mapping[str, tuple[str, ...]] = {
    "a computed module": (
        "import importlib\nNAME = 'helper'\nVALUE = importlib.import_module(NAME).VALUE",
        "mine.py:3 (import_module)",
    ),
    "a neighbour by import_module": (
        "from importlib import import_module\nVALUE = import_module('helper').VALUE",
        "mine.py:2 (import_module)",
    ),
    "a computed __import__": ("NAME = 'helper'\nVALUE = __import__(NAME).VALUE", "mine.py:2 (__import__)"),
    "exec": ("exec('VALUE = 1')", "mine.py:1 (exec)"),
    "run_path": (
        "import runpy\nVALUE = runpy.run_path(__file__.replace('mine', 'helper'))['VALUE']",
        "mine.py:2 (run_path)",
        "{folder}/helper.py (read by an import)",
    ),
    "another folder": (ELSEWHERE, "mine.py:2 (sys.path)"),
    "a data file": (OPEN, READ),
    "a data file through a path": (
        "from pathlib import Path\nVALUE = Path(__file__).with_name('data.json').read_text()",
        READ,
    ),
}
FOLLOWED = {
    "what is installed, by import_module": "import importlib\nVALUE = importlib.import_module('json') and 1",
    "the file's own folder": "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nfrom helper import VALUE",
    "what a package reads": "import jinja2.sandbox, yaml\nVALUE = 1",
    "a file that is written": "import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')\nVALUE = 1",
}


@pytest.mark.parametrize("name", [*UNFOLLOWED, *FOLLOWED])
def test_what_cannot_be_followed_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    source, *named = UNFOLLOWED.get(name) or (FOLLOWED[name],)
    reference = write(tmp_path, {"mine.py": mine(source), **HELPER, "data.json": "1", "in_lib.txt": ""})
    function: UserFunction = load_function("rewards", reference)
    assert function.unfollowed == tuple(each.format(folder=tmp_path) for each in named)
    assert score(reference) == 1.0
    sys.modules.pop("helper", None)


def test_consent_sees_comments_and_docstrings_too(tmp_path: Path) -> None:
    reference = write(tmp_path, {"mine.py": mine("from helper import VALUE"), "helper.py": "VALUE = 1\n"})
    seen = [follow_code(reference)]
    for text in ('"""Text that code could run."""\nVALUE = 1\n', "VALUE = 1  # And another.\n"):
        write(tmp_path, {"helper.py": text})
        seen.append(follow_code(reference))
    assert len({each.digest for each in seen}) == 1
    assert len({each.files_digest for each in seen}) == 3


def test_the_code_of_a_loss_is_followed_too(tmp_path: Path) -> None:
    reference = write(tmp_path, {"mine.py": mine("from helper import VALUE"), **HELPER})
    before = custom_loss_digest(reference)
    write(tmp_path, {"helper.py": "VALUE = 2"})
    assert custom_loss_digest(reference) != before
    assert load_custom_loss(reference).run({"completions": ["x"]}) == [2.0]


BROKEN: Mapping[str, Callable[[Path], Mapping[str, str]]] = {
    "helper.py:1": lambda _: {"helper.py": "def (:\n"},
    "helper.py:2": lambda _: {"helper.py": "x = 1\n1 / 0\n"},
}


@pytest.mark.parametrize("place", BROKEN)
def test_an_error_of_a_neighbour_has_its_place_and_is_over_once_it_is_mended(tmp_path: Path, place: str) -> None:
    reference = write(tmp_path, {"mine.py": mine("from helper import VALUE"), **BROKEN[place](tmp_path)})
    (problem,) = FunctionReward(function=reference).preflight()
    assert "Importing it raised" in problem
    write(tmp_path, HELPER)
    assert FunctionReward(function=reference).preflight() == []
    assert score(reference) == 1.0


def test_calls_at_once_leave_the_folder_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins where the first has gone to, and ends after it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with contextlib.ExitStack() as second:
        with keeping_folder():
            os.chdir("elsewhere")
            second.enter_context(keeping_folder())
        assert Path.cwd() == tmp_path
        os.chdir("elsewhere")
    assert Path.cwd() == tmp_path
