"""A small artifact, its run on both kinds of root, what is done to it, and kills before each step of that."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tasks.storage import schemas
from tasks.storage.artifacts.commit import commit_artifact, delete_files
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import ArtifactStore


def image(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (shade, 0, 255 - shade)).save(buffer, "PNG")
    return buffer.getvalue()


def rollouts(rows: int, *, seed: int = 2**63 - 1) -> dict[str, list[object]]:
    known = {
        "sample_id": "i000001.p0000.s00",
        "prompt": "a cup, 一只猫",
        "token_ids": [1, 2, 3],
        "rollout_logprobs": [-0.5, -0.25, 0.0],
        "loss_mask": [True, True, False],
        "finished": True,
        "temperature": 1.0,
        "seed": seed,
    }
    columns: dict[str, list[object]] = {
        name: [known.get(name)] * rows for name in (*schemas.IMAGE_ROLLOUTS.names, "image")
    }
    columns["sibling"] = list(range(rows))
    columns["image"] = [{"bytes": image(shade), "path": f"{shade}.png"} for shade in range(rows)]
    return columns


Entry = dict[str, str | float | None]


def entry(reward: str, value: float | None, scaled: float | None) -> Entry:
    return {"reward": reward, "value": value, "scaled": scaled}


BREAKDOWNS: list[list[Entry]] = [
    [entry("ssim", 0.25, 0.25), entry("ein Maß", 2.0, 1.0)],
    [entry("ssim", None, 0.75), entry("ein Maß", None, None)],
    [],
]


def advantages(breakdowns: list[list[Entry]]) -> dict[str, list[Any]]:
    known = {"sample_id": "i000001.p0000.s00", "advantage": -0.5, "dropped": False, "imputed": 0}
    columns: dict[str, list[Any]] = {name: [known.get(name)] * len(breakdowns) for name in schemas.ADVANTAGES.names}
    return {**columns, "reward_breakdown": breakdowns}


FOLDER = "iteration_000001/rollouts"
MANIFEST = f"{FOLDER}.manifest.json"
PART = f"{FOLDER}/part-00000.parquet"
FILES = {"part-00000.parquet": b"first part", "nested/part-00001.bin": bytes(range(256))}
NESTED = "nested/part-00001.bin"
PRUNED = {"removed": "images", "older_than_days": 30}

ON_EACH_KIND_OF_ROOT = pytest.mark.parametrize(
    "store", ["local", pytest.param("remote", marks=pytest.mark.slow)], indirect=True
)
"""For tests of many steps or several processes: in a bucket they take seconds."""


def stage(staged: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (staged / name).parent.mkdir(exist_ok=True)
        (staged / name).write_bytes(content)


def commit(
    store: ArtifactStore, folder: str = FOLDER, *, seconds: float = 1.0, rows: int = 4, peak_memory: int | None = None
) -> ArtifactRef:
    with store.staging() as staged:
        stage(staged, FILES)
        return commit_artifact(
            store,
            staged,
            folder,
            digest="d" * 64,
            schema_version=1,
            rows=rows,
            seconds=seconds,
            metrics={"reward": 0.5},
            peak_memory=peak_memory,
        )


def delete(
    store: ArtifactStore, reference: ArtifactRef, names: Collection[str], pruned: Mapping[str, Any] = PRUNED
) -> ArtifactRef:
    delete_files(store, reference, names, pruned=pruned)
    return reference


def root_url(store: ArtifactStore) -> str:
    return str(store.filesystem.unstrip_protocol(store.root))


def another(store: ArtifactStore, run: str = "run") -> ArtifactStore:
    return ArtifactStore(root_url(store), run)


WRITER = """
import sys
from tasks.storage.artifacts.store import ArtifactStore
with ArtifactStore(sys.argv[1], "run").staging() as staged:
    (staged / "theirs").write_bytes(b"x")
    print(staged, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writer_elsewhere(store: ArtifactStore) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process that has begun to write an artifact, and its staging folder."""
    command = [sys.executable, "-c", WRITER, root_url(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child, Path(child.stdout.readline().strip())
        child.kill()


def read(store: ArtifactStore, reference: ArtifactRef, folder: Path) -> dict[str, bytes]:
    local = store.local_files(reference, folder)
    return {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}


def moved(store: ArtifactStore) -> list[str]:
    """Reasons why something was moved to `quarantine/`."""
    notes = sorted(store.filesystem.glob(store.path(f"{QUARANTINE}/*/reason.json")))
    return [json.loads(store.filesystem.cat_file(note))["reason"] for note in notes]


def contents(store: ArtifactStore) -> dict[str, bytes]:
    """Every file of a run but those of locks and `quarantine/`."""
    top = store.path()
    found = {str(path).removeprefix(f"{top}/"): path for path in store.filesystem.find(top)}
    shown = {name: path for name, path in found.items() if not name.startswith((".", QUARANTINE))}
    return {name: store.filesystem.cat_file(path) for name, path in shown.items()}


def overwrite(store: ArtifactStore, name: str, content: bytes) -> None:
    store.filesystem.pipe_file(store.path(name), content)


def flip(store: ArtifactStore, name: str) -> None:
    content = bytearray(store.filesystem.cat_file(store.path(name)))
    content[len(content) // 2] ^= 1
    overwrite(store, name, bytes(content))


Steps = list[tuple[Any, str]]
"""Methods that count as steps: owner and name."""


def kill_before_each_step(prepare: Callable[[int], Callable[[], tuple[Steps, Callable[[], object]]]]) -> None:
    """Print how often the action was started: each time in a forked process, killed one step later than the last.

    Args:
        prepare: prepares the start with this number, from 1, and returns what gives the steps and the action in the
            forked process. The last start comes to its end.
    """
    for number in itertools.count(1):
        begin = prepare(number)
        pid = os.fork()
        if pid == 0:
            (steps, action), left = begin(), iter(range(number - 1))
            for owner, name in steps:
                setattr(owner, name, _killed_at_the_end_of(left, getattr(owner, name)))
            action()
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            print(number)
            break


def _killed_at_the_end_of(left: Iterator[int], real: Callable[..., object]) -> Callable[..., object]:
    def step(*arguments: Any, **options: Any) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    return step
