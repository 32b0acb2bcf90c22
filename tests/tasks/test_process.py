"""Objects that are made while garbage collection is paused, and where pages of docs/ are."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tasks.process import CHECKOUT, collection_paused, environment, openable
from tasks.runs.signs import SIGNS, Sign


class _Node:
    """An object that a cycle can be made of."""

    def __init__(self) -> None:
        self.itself = self


_PROGRAM = """
import gc
from tasks.process import collection_paused

with collection_paused():
    made = [[]]
print([gc.is_tracked(made), any(each is made for each in gc.get_objects(generation=2)), gc.get_freeze_count()])
"""


def test_what_a_pause_made_waits_in_the_oldest_generation() -> None:
    # In a process of its own, since the tests' objects are frozen.
    output = subprocess.check_output([sys.executable, "-c", _PROGRAM], env=environment(), text=True)
    assert output == "[True, True, 0]\n"


def test_garbage_of_a_pause_is_collected_later() -> None:
    with collection_paused():
        made = weakref.ref(_Node())
    assert made() is not None
    gc.collect()
    assert made() is None


def test_a_pause_within_another_does_not_end_it() -> None:
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_page_of_every_sign_can_be_opened_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (CHECKOUT, CHECKOUT / "docs", tmp_path):
        monkeypatch.chdir(folder)
        for name in SIGNS:
            page, _, anchor = openable(str(Sign(name, 1, "x"))).rpartition("(")[2].rstrip(")").partition("#")
            assert Path(page).is_file()
            assert anchor == name
    assert openable("my/docs/operations.md") == "my/docs/operations.md"
