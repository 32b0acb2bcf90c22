"""Nothing that a run's folder contains leads a command out of it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.execution.call import CALLS, clear_calls, remove_call
from tasks.pruning import abandoned_writes, find_prunable, old_calls
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.links import LinkError, RootFileSystem
from tasks.storage.prefect_results import note_copied, record_stage
from tasks.storage.run_lock import is_locked, locked
from tests.tasks.storage.made_artifacts import FILES, FOLDER, MANIFEST, PART, another, commit, delete, read

Action = Callable[[ArtifactStore], object]


def take_lock(store: ArtifactStore) -> None:
    with locked(store, setting="run.name", value="run"):
        pass


def stay(store: ArtifactStore) -> None:
    with store.staging():
        pass


REFUSED: list[tuple[str, Action]] = [
    (".calls", lambda store: old_calls(store, datetime.now(UTC))),
    (".calls", clear_calls),
    (".calls", lambda store: remove_call(store, "old")),
    (".incoming", stay),
    (".incoming", ArtifactStore.clear_abandoned),
    (".incoming", abandoned_writes),
    (".incoming", ArtifactStore.require_writable),
    (".incoming/commit.lock", lambda store: store.quarantine([MANIFEST], reason="a test")),
    (".lock", take_lock),
    (".lock", is_locked),
    (".stages", lambda store: record_stage(store, "key", commit(store, "iteration_000002/rollouts"))),
    ("../.stages", lambda store: record_stage(store, "key", commit(store, "iteration_000002/rollouts"))),
    (".stages", note_copied),
    ("quarantine", lambda store: store.quarantine([MANIFEST], reason="a test")),
    ("starts.jsonl", lambda store: store.read_file("starts.jsonl")),
    ("starts.jsonl", lambda store: store.write_file("starts.jsonl", b"a line")),
    ("policies", lambda store: commit(store, "policies/000002")),
    ("policies/000002", lambda store: commit(store, "policies/000002")),
    ("iteration_000001", lambda store: store.find(FOLDER)),
    ("iteration_000001", lambda store: RunReader(store).artifact_names("iteration_000001")),
    (FOLDER, lambda store: store.find(FOLDER)),
    (
        FOLDER,
        lambda store: find_prunable(store, FOLDER) and delete(store, find_prunable(store, FOLDER).reference, FILES),
    ),
    (MANIFEST, lambda store: store.find(FOLDER)),
    (PART, lambda store: store.find(FOLDER)),
    (PART, lambda store: store.filesystem.rm_file(store.path(PART))),
    ("../run~1", lambda store: store.give_to("run~1", ["iteration_000001"])),
    ("../other", lambda store: store.read_shared("other/config.yaml")),
    ("", lambda store: store.find(FOLDER)),
    ("", take_lock),
    ("", lambda store: store.write_file("run.json", b"{}")),
]


def is_file(name: str) -> bool:
    return name in (PART, MANIFEST, ".lock", ".incoming/commit.lock", "starts.jsonl")


def outside_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    ("name", "action"), REFUSED, ids=[f"{number} {name or 'run'}" for number, (name, _) in enumerate(REFUSED)]
)
@pytest.mark.parametrize("dangling", [False, True], ids=["", "dangling"])
def test_a_link_that_leaves_the_run_is_refused_and_what_it_leads_to_stays(
    local: ArtifactStore, tmp_path: Path, name: str, action: Action, dangling: bool
) -> None:
    commit(local)
    outside = tmp_path / "outside"
    outside.mkdir()
    place, end = Path(os.path.normpath(f"{local.path()}/{name}")), outside / "end"
    if place.exists():
        place.rename(end)
    elif is_file(name):
        end.write_bytes(b"a line of a person")
    else:
        (end / "old").mkdir(parents=True)
        (end / "old.json").write_bytes(b"a file of a person")
        os.utime(end / "old.json", (0, 0))
    if dangling:
        end.rename(tmp_path / "elsewhere")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(end)
    before = outside_of(outside)
    with pytest.raises(LinkError) as caught:
        action(another(local))
    assert (caught.value.place, caught.value.value) == (str(place), str(end))
    assert outside_of(outside) == before


def test_a_link_among_unfinished_writes_is_left_alone(local: ArtifactStore, tmp_path: Path) -> None:
    commit(local)
    outside = tmp_path / "outside"
    outside.mkdir()
    link = Path(local.path(".incoming")) / "writing"
    link.symlink_to(outside)
    (outside / "lock").touch()
    assert abandoned_writes(local) == []
    local.clear_abandoned()
    assert [path.name for path in outside.iterdir()] == ["lock"]
    assert link.is_symlink()


@pytest.mark.parametrize("at", ["the root", "above the root", "next to the runs", "in the run"])
def test_links_that_stay_are_followed(tmp_path: Path, at: str) -> None:
    first = ArtifactStore(str(tmp_path / "disk" / "runs"), "run")
    reference = commit(first)
    root, run = first.root, "run"
    if at == "the root":
        root = str(tmp_path / "runs")
        Path(root).symlink_to(first.root)
    if at == "above the root":
        (tmp_path / "home").symlink_to(tmp_path / "disk")
        root = str(tmp_path / "home" / "runs")
    if at == "next to the runs":
        run = "latest"
        Path(root, run).symlink_to("run")
    if at == "in the run":
        Path(first.path(FOLDER)).rename(first.path("moved"))
        Path(first.path(FOLDER)).symlink_to("../moved")
    store = ArtifactStore(root, run)
    store.refuse_links()
    found = store.find(FOLDER)
    assert found.sha256 == reference.sha256
    assert read(store, found, tmp_path / "read") == FILES
    commit(store, "iteration_000002/rollouts")
    assert another(store, run).find("iteration_000002/rollouts") is not None


@pytest.mark.parametrize("end", ["policies", ".", "..", "../other"])
def test_nothing_is_deleted_through_a_link(local: ArtifactStore, end: str) -> None:
    """Also not in the run itself: calls and unfinished writes are deleted whatever their names are."""
    for name in ("policies", "../other"):
        folder = Path(local.path()) / name
        folder.mkdir(parents=True)
        (folder / "000001").touch()
        os.utime(folder / "000001", (0, 0))
    Path(local.path(), CALLS).symlink_to(end)
    for action in (lambda store: old_calls(store, datetime.now(UTC)), clear_calls):
        with pytest.raises(LinkError):
            action(local)
    Path(local.path(), CALLS).rename(f"{local.path()}/.incoming")
    with pytest.raises(LinkError):
        local.clear_abandoned()
    assert (Path(local.path()) / "policies" / "000001").exists()


def test_every_link_of_a_run_is_reported_at_once(local: ArtifactStore, tmp_path: Path) -> None:
    commit(local)
    for name in ("starts.jsonl", "iteration_000001/rollouts/nested/more", "quarantine"):
        Path(f"{local.path()}/{name}").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="starts") as caught:
        local.refuse_links()
    places = [error.place.removeprefix(f"{local.path()}/") for error in caught.value.errors]
    assert places == ["iteration_000001/rollouts/nested/more", "quarantine", "starts.jsonl"]


NAMES = ("a", "b", "c")
ENDS = ("a", "b", ".", "..", "../..", "../a", "../b/c", "../../a", "../../../outside", "/", "missing/x")


@contextlib.contextmanager
def linked_root(links: dict[tuple[str, ...], str]) -> Iterator[str]:
    """A root with two runs of folders three deep, some of whose names are links."""
    with TemporaryDirectory() as top:
        root = Path(top, "disk", "runs")
        Path(top, "outside").mkdir()
        root.mkdir(parents=True)
        for place, end in sorted(links.items()):
            path = root.joinpath(*place)
            with contextlib.suppress(OSError):
                os.makedirs(path.parent, exist_ok=True)
                path.symlink_to(end)
        for first in NAMES[:2]:
            for second in NAMES:
                with contextlib.suppress(OSError):
                    os.makedirs(root / first / second / "a", exist_ok=True)
        yield str(root)


Places = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)


@given(links=st.dictionaries(Places, st.sampled_from(ENDS), max_size=4), place=Places)
def test_a_path_passes_exactly_if_all_of_it_stays(links: dict[tuple[str, ...], str], place: tuple[str, ...]) -> None:
    with linked_root(links) as root:
        steps = [f"{root}/{'/'.join(place[:count])}" for count in range(1, len(place) + 1)]
        run, *below = (os.path.realpath(step) for step in steps)
        linked = [os.path.islink(step) for step in steps]
        stays = run.startswith(f"{os.path.realpath(root)}/") or not linked[0]
        stays &= all(end.startswith(f"{run}/") for end, is_link in zip(below, linked[1:], strict=True) if is_link)
        files = RootFileSystem(root)
        for deleting, expected in ((False, stays), (True, stays and not any(linked[1:]))):
            with contextlib.nullcontext() if expected else pytest.raises(LinkError):
                assert files.inside(steps[-1], deleting=deleting) == steps[-1]
