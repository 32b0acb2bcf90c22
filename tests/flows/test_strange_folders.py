"""One strange folder is one line of the list with its fault, and is refused by whoever opens it; others are shown."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flows import evaluate, replay, rescore, train
from flows.compare_runs import compare
from flows.export.plan import plan_export
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs, write_list_page
from flows.pruning.plan import OtherConfigs
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.requests import ExportRequest, SampleRequest
from flows.rewards.analyse import analyse_rewards
from flows.sample import open_source
from grpo_core.errors import InputError
from tasks.runs.frames import open_run
from tasks.runs.lookup import find_run
from tasks.storage.files import dump_checked
from tasks.storage.links import LinkError
from tests.flows.conftest import TINY, Compare, Runs, refused, sha256_of
from tests.flows.pruning.conftest import tree
from tests.flows.replaying.test_replaying import UPDATES, run_replay
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


def test_the_other_runs_are_listed(tmp_path: Path) -> None:
    for run in ("before", "zlast"):
        whole_run(tmp_path, run)
    for name, (file, make) in STRANGE.items():
        shutil.copytree(tmp_path / "before", tmp_path / name.replace(" ", "_"))
        make(tmp_path / name.replace(" ", "_") / file)
    listed = {each.run: each for each in list_runs(str(tmp_path))}
    assert listed.keys() == {"before", "zlast", *(name.replace(" ", "_") for name in STRANGE)}
    for run in ("before", "zlast"):
        assert (listed[run].state, listed[run].iterations, listed[run].problem) == ("finished", 2, None)
    assert [name for name in NAMED if listed[name.replace(" ", "_")].problem is None] == []
    write_list_page(str(tmp_path), list(listed.values()), tmp_path / "list.html")
    # A run beside them can be pruned, and goes on.
    assert list(OtherConfigs().of(find_run("before", str(tmp_path)), {"before"})) == []
    # Whoever opens one is answered, too: with the run and its damage, or with a refusal.
    for name in STRANGE:
        with contextlib.suppress(InputError):
            inspect_run(name.replace(" ", "_"), root=str(tmp_path))


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


COMMANDS: Mapping[str, Callable[[str, str], object]] = {
    "train": lambda run, root: train(TINY, overrides={"run.name": run, "storage.root": root}, progress=False),
    "prune": lambda run, root: prune(PruneRequest(sources=(run,), root=root, policies_last=1)),
    "inspect": lambda run, root: inspect_run(run, root=root),
    "evaluate": lambda run, root: evaluate(run, root=root, progress=False),
    "rescore": lambda run, root: rescore(run, rewards=[{"reward": "ssim"}], name="again", root=root, progress=False),
    "replay": lambda run, root: replay(run, root=root, progress=False),
    "compare": lambda run, root: compare([run, run], root=root),
    "export": lambda run, root: plan_export(ExportRequest(run=run, root=root, folder="exported")),
    "sample": lambda run, root: open_source(SampleRequest(source=run, prompts=("a cup",), root=root)),
    "rewards analyse": lambda run, root: analyse_rewards(run, root=root),
    "open_run": lambda run, root: open_run(run, root=root).metrics(),
}
NAMES = (
    *(".calls", ".stages", ".incoming", ".lock", "quarantine", "config.yaml", "run.json", "starts.jsonl"),
    *("policies/000002", "iteration_000001", "iteration_000001/rollouts/part-00000.parquet", "tensorboard", ""),
)


def put_link(runs: Runs, outside: Path, name: str) -> Path:
    """Move what has this name in the run out of it, or make a folder with an old file there, and link to it."""
    outside.mkdir()
    place, end = runs.path(name), outside / "end"
    if place.exists():
        place.rename(end)
    else:
        end.mkdir()
        (end / "old.json").touch()
        os.utime(end / "old.json", (0, 0))
    place.symlink_to(end)
    return place


def test_each_command_refuses_a_link(finished: Runs, tmp_path: Path) -> None:
    place = put_link(finished, tmp_path / "outside", "policies/000002")
    before = tree(tmp_path)
    for name, command in COMMANDS.items():
        # A comparison names the run twice.
        error, *_ = refused(lambda command=command: command("run", str(finished.root)))  # type: ignore[misc]
        assert (error.place, error.value) == (str(place), str(tmp_path / "outside" / "end")), name
    assert tree(tmp_path) == before


def test_a_link_anywhere_in_a_run_is_refused(finished: Runs, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        outside, was_there = tmp_path / f"outside{number}", finished.path(name).exists()
        place = put_link(finished, outside, name)
        before = tree(tmp_path)
        for command in ("prune", "inspect"):
            (error,) = refused(lambda command=command: COMMANDS[command]("run", str(finished.root)))  # type: ignore[misc]
            assert (type(error), error.place) == (LinkError, str(place)), name
        (listed,) = list_runs(str(finished.root))
        assert listed.state in ("finished", "refused")
        assert tree(tmp_path) == before
        place.unlink()
        if was_there:
            (outside / "end").rename(place)


def test_a_root_that_is_a_link_is_a_root(finished: Runs, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(finished.root)
    (listed,) = list_runs(str(link))
    assert (listed.run, listed.state) == ("run", "finished")
    (link / "latest").symlink_to("run")
    assert (
        inspect_run("latest", root=str(link)).run.policy_digest == inspect_run("run", root=str(link)).run.policy_digest
    )


def test_the_list_names_a_refused_run_among_the_others(finished: Runs, tmp_path: Path) -> None:
    finished.path(run="elsewhere").symlink_to(tmp_path)
    found = {each.run: each for each in list_runs(str(finished.root))}
    assert {name: each.state for name, each in found.items()} == {"run": "finished", "elsewhere": "refused"}
    assert str(tmp_path) in (found["elsewhere"].problem or "")


def test_a_run_is_pruned_next_to_one_with_a_link(finished: Runs, tmp_path: Path) -> None:
    """Pruning looks in all runs for what they start from."""
    other = finished.path(run="other")
    (other / "policies").mkdir(parents=True)
    (other / "config.yaml").symlink_to(tmp_path / "secrets.yaml")
    (tmp_path / "secrets.yaml").write_text("\nreplay: {source: run, policy: 1}\nrun: {iterations: 9}\n")
    summary = prune(PruneRequest(sources=("run",), root=str(finished.root), policies_last=1))
    assert summary.bytes > 0


def test_a_root_with_the_characters_of_patterns(finished: Runs, final: Compare, tmp_path: Path) -> None:
    """A storage root is a name: what its path is as a pattern is the path of other runs."""
    others = finished.copied_to(tmp_path / "r of mine")
    runs, before = finished.copied_to(tmp_path / "[r]* {of,a}?mine"), sha256_of(others.root)
    (tmp_path / "r and {of,a} mine").symlink_to(others.root)
    runs.path("policies/000002/tokens/adapter_model.safetensors").write_bytes(b"damaged")
    final(runs, runs.start())
    assert len(runs.reasons()) == 1
    rewards = [{"reward": "ssim", "weight": 0.1}, {"reward": "jpeg", "weight": 0.9}]
    done = rescore("run", rewards=rewards, name="mine", root=str(runs.root), progress=False)
    assert done.summary.computed == {"ssim": 0, "jpeg": 8}
    summary, heard = run_replay(runs)
    assert (summary.policy_digest, tuple(heard.stages)) == (runs.policy_digest(2), UPDATES)
    shown = inspect_run("run", root=str(runs.root))
    assert (shown.summary(None).iterations, shown.samples.groups.total) == (2, 2)
    states = {each.run: each.state for each in list_runs(str(runs.root))}
    assert states == dict.fromkeys(("run", "run-replay"), "finished")
    assert prune(PruneRequest(sources=("run",), root=str(runs.root), images_older_than="0i"))
    assert sha256_of(others.root) == before
