"""One strange folder is one line of the list with its fault, and is refused by whoever opens it; others are shown."""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.inspect_run import inspect_run
from flows.list_runs import list_runs, write_list_page
from flows.pruning.plan import _other_configs
from grpo_core.errors import InputError
from tasks.runs.lookup import find_run
from tasks.storage.files import dump_checked
from tests.tasks.reports.made_runs import whole_run


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        # The path of a socket may have 107 bytes.
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(40 * 2**30)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def entries(**described: object) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(dump_checked(described))


MERGES = "# before@1\na0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
STRANGE: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "a pipe as configuration": ("config.yaml", pipe),
    "a pipe as description": ("run.json", pipe),
    "a pipe as lock": (".lock", pipe),
    "a pipe as manifest": ("policies/000002.manifest.json", pipe),
    "a pipe as the last advantages": ("iteration_000002/advantages.manifest.json", pipe),
    "a socket as configuration": ("config.yaml", socket_file),
    "a socket as lock": (".lock", socket_file),
    "merges of merges": ("config.yaml", text(MERGES)),
    "aliases of aliases": ("config.yaml", text(MERGES.replace("{<<: ", "[").replace("]}", "]]"))),
    "deep lists": ("config.yaml", text("[" * 100_000)),
    "deep JSON": ("run.json", text('{"a":' * 100_000)),
    "an identity that is a text": ("run.json", entries(identity="x")),
    "settings that are a number": ("run.json", entries(identity={"settings": 5, "code": [1]})),
    "settings of nothing": ("run.json", entries(identity={"settings": {}})),
    "scores of no JSON": ("run.json", entries(identity={"scores": [["[", ""]]})),
    "a date that is none": ("config.yaml", text("run: {name: 2001-99-99}")),
    "a number that is too long": ("config.yaml", text("run: {iterations: 0x" + "f" * 5000 + "}")),
    "a deep lock": (".lock", text("[" * 100_000)),
    "40 GiB of configuration": ("config.yaml", sparse),
    "40 GiB of description": ("run.json", sparse),
    "40 GiB of lock": (".lock", sparse),
    "40 GiB of manifest": ("iteration_000002/advantages.manifest.json", sparse),
    "long YAML": ("config.yaml", text("a: [" + "1, " * 200_000 + "1]")),
}
NAMED = {name for name, (file, _) in STRANGE.items() if file == "config.yaml"}
"""Those with a fault in the line; what the others damage is said by `grpo inspect`."""


@pytest.mark.parametrize("name", STRANGE)
def test_the_other_runs_are_listed(tmp_path: Path, name: str) -> None:
    for run in ("before", "strange", "zlast"):
        whole_run(tmp_path, run)
    file, make = STRANGE[name]
    make(tmp_path / "strange" / file)
    listed = {each.run: each for each in list_runs(str(tmp_path))}
    assert listed.keys() == {"before", "strange", "zlast"}
    for run in ("before", "zlast"):
        assert (listed[run].state, listed[run].iterations, listed[run].problem) == ("finished", 2, None)
    problem = listed["strange"].problem
    assert problem is not None or name not in NAMED
    write_list_page(str(tmp_path), list(listed.values()), tmp_path / "list.html")
    # A run beside it can be pruned, and goes on.
    assert list(_other_configs(find_run("before", str(tmp_path)), {"before"})) == []
    # Whoever opens it is answered, too: with the run and its damage, or with a refusal.
    with contextlib.suppress(InputError):
        inspect_run("strange", root=str(tmp_path))


def test_a_table_of_millions_of_rows_in_a_few_bytes_is_damage(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    table = next((maker.folder / "iteration_000002/rewards").glob("*/*.parquet"))
    known = pq.read_schema(table)
    columns = {
        each.name: pa.array([0.5 if pa.types.is_floating(each.type) else None], each.type).take([0] * 2**20)
        for each in known
    }
    bomb = pa.table(columns, schema=known)
    with pq.ParquetWriter(table, known, compression="zstd") as writer:
        for _ in range(40):
            writer.write_table(bomb)
    assert table.stat().st_size < 2**21
    manifest = table.parent.with_name(f"{table.parent.name}.manifest.json")
    described = json.loads(manifest.read_text())
    del described["checksum"]
    described["files"][table.name] = hashlib.sha256(table.read_bytes()).hexdigest()
    manifest.write_bytes(dump_checked(described))
    (warning, *_) = inspect_run("made", root=str(tmp_path)).warnings
    assert "unpacks to" in warning
    assert table.name in warning
