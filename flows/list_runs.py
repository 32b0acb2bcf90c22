"""Read what `grpo list` shows of every run below a folder; only small files are read, and nothing is verified."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError
from tasks.reports.report import Report, Table, require_page_path, write_page
from tasks.reports.text import number
from tasks.runs.layout import ADVANTAGES, evaluation_folder, iteration_folder, policy_folder
from tasks.runs.lookup import CONFIG_FILE, read_description, runs_below
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import MANIFEST_ENDING
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore
from tasks.storage.links import LinkError
from tasks.storage.run_lock import is_locked

if TYPE_CHECKING:
    from tasks.reports.list_page import RunCurves


class ListedRun(BaseModel):
    """A line of the list.

    Attributes:
        state: `running` while a process has the run's lock; `refused` where it cannot be read, or a link leads out.
        iterations: number of policy updates; `planned` is the configuration's, None without a readable one.
        reward, heldout: means of the last iteration, and of the last evaluated policy; None without one.
        progress: when the last policy was stored, or else when the run was last started, UTC.
        problem: why it is refused, or what of its configuration is wrong; None for other runs.
    """

    run: str
    state: Literal["running", "finished", "stopped", "refused"]
    iterations: int
    planned: int | None
    reward: float | None
    heldout: float | None
    progress: datetime | None
    problem: str | None = None


def list_runs(root: str) -> list[ListedRun]:
    """Return the runs below a storage root, the one that made progress last at the end."""
    stores = runs_below(root, "ROOT")
    if stores is None:
        raise InputError("ROOT", root, "There is no such folder; name the one of storage.root, by default runs.")
    begun = datetime.min.replace(tzinfo=UTC)
    return sorted((_listed(store) for store in stores), key=lambda each: (each.progress or begun, each.run))


def write_list_page(root: str, runs: Sequence[ListedRun], html: Path) -> None:
    """Write the page of the runs below a storage root; of refused ones it has the reason alone."""
    # The page takes longer to import than the list to read.
    from tasks.reports.list_page import render_list_page

    require_page_path(html)
    known = {each.run for each in runs if each.problem is None}
    curves = {store.run: _curves(store) for store in runs_below(root, "ROOT") or () if store.run in known}
    ordered = [curves[each.run] for each in runs if each.run in curves]
    write_page(html, render_list_page(root, runs_report(root, runs), ordered))


def _curves(store: ArtifactStore) -> "RunCurves":
    from tasks.reports.list_page import RunCurves

    reader = RunReader(store)
    rewards = [(float(number), _reward(reader, iteration_folder(number))) for number in reader.iterations()]
    heldout = [(float(version), _reward(reader, evaluation_folder(version))) for version in reader.evaluations()]
    kept = [[(x, y) for x, y in points if y is not None] for points in (rewards, heldout)]
    return RunCurves(store.run, _config(store), _described(store), *kept)


def runs_report(root: str, runs: Sequence[ListedRun]) -> Report:
    """Return a table of runs, in their order."""
    rows = [
        {
            "run": each.run,
            "state": each.state,
            "iterations": f"{each.iterations:,} of {'?' if each.planned is None else f'{each.planned:,}'}",
            "reward": "" if each.reward is None else number(each.reward),
            "held-out": "" if each.heldout is None else number(each.heldout),
            "last progress": "" if each.progress is None else f"{each.progress:%Y-%m-%d %H:%M}",
        }
        for each in runs
    ]
    notes = [] if runs else [f"no runs in {root}; `grpo train CONFIG` starts one"]
    notes += [f"{each.run}: {each.problem}" for each in runs if each.problem is not None]
    return Report(root if runs else "", tables=[Table("", rows, ("state", "last progress"))], notes=notes)


def _listed(store: ArtifactStore) -> ListedRun:
    try:
        return _read(store)
    except (InputError, OSError) as error:
        # One strange folder hides no other run.
        unknown = dict.fromkeys(("planned", "reward", "heldout", "progress"))
        return ListedRun(run=store.run, state="refused", iterations=0, problem=str(error), **unknown)


def _read(store: ArtifactStore) -> ListedRun:
    reader = RunReader(store)
    config: Mapping[str, Any] = {}
    problem = None
    try:
        config = _config(store)
    except LinkError:
        raise
    except InputError as error:
        problem = str(error)
    planned = _planned(config)
    iterations = max(reader.policies(), default=0)
    heldout = [_reward(reader, evaluation_folder(version)) for version in reader.evaluations()]
    done = planned is not None and iterations >= planned and reader.has_evaluated(iterations, config)
    return ListedRun(
        run=store.run,
        state="running" if is_locked(store) else "finished" if done else "stopped",
        iterations=iterations,
        planned=planned,
        reward=_reward(reader, iteration_folder(iterations)),
        heldout=next((reward for reward in reversed(heldout) if reward is not None), None),
        progress=_modified(store, f"{policy_folder(iterations)}{MANIFEST_ENDING}") or _modified(store, RUN_FILE),
        problem=problem,
    )


def _planned(config: Mapping[str, Any]) -> int | None:
    section = config.get("run")
    planned = section.get("iterations") if isinstance(section, Mapping) else None
    return planned if isinstance(planned, int) else None


def _described(store: ArtifactStore) -> Mapping[str, Any]:
    try:
        return read_description(store)
    except InputError:
        return {}


def _config(store: ArtifactStore) -> Mapping[str, Any]:
    """Read config.yaml, or raise InputError; empty where it is missing or has no sections."""
    content = store.read_file(CONFIG_FILE) or b""
    values = parse_yaml(content.decode(errors="replace"), f"{store.run}/{CONFIG_FILE}")
    return values if isinstance(values, Mapping) else {}


def _reward(reader: RunReader, folder: str) -> float | None:
    scored = reader.scored_rounds(folder)
    found = reader.find(f"{scored[-1]}/{ADVANTAGES}") if scored else None
    return found.reference.metrics.get("reward") if found else None


def _modified(store: ArtifactStore, name: str) -> datetime | None:
    try:
        modified: datetime = store.filesystem.modified(store.path(name))
    except (FileNotFoundError, NotImplementedError):
        return None
    return modified if modified.tzinfo else modified.replace(tzinfo=UTC)
