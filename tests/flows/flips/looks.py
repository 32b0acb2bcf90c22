"""One bit flipped in a file of a kind, and the file read by whoever reads it: what came of each flip."""

import hashlib
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.execution.call import StageCall, StageOutcome, code_of
from tasks.execution.pool import CALLS, leave_outcome, read_call, read_outcome
from tasks.storage.artifacts.open_store import described
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.replace import replace_artifact
from tasks.storage.artifacts.store import MANIFEST_ENDING, ArtifactStore, use_store
from tasks.storage.filesystem.checked_json import dump_checked
from tasks.storage.filesystem.read_cache import ReadCache
from tasks.storage.locks.run_lock import LOCK, locked
from tasks.storage.prefect_results import FOLDER, StageRecords
from tests.flows.conftest import Runs
from tests.flows.flips.conftest import SETTINGS, Evaluated
from tests.flows.flips.damage import rot
from tests.flows.flips.ledger import Flip, Outcome, kind_of

OF_A_FILE, OF_A_RECORD, OF_OTHERS, ROUNDS = 4, 3, 6, 2
DESCRIPTIONS = ("run.json", "config.yaml", "iteration_000001/metrics.parquet", "contact_sheet.png")


def told_of(name: str) -> str:
    """How a message names a file and says what is wrong with it, as a pattern."""
    return rf"\b{re.escape(name)} (has sha256 \w{{12}}, not \w{{12}}|is damaged \(.+\))"


def in_artifacts(evaluated: Evaluated, folder: Path, chance: random.Random) -> Iterator[Flip]:
    """Every file of every artifact, and its manifest: named, moved away with the artifact, and found no more."""
    for artifact, file in evaluated.files():
        reference, place = evaluated.references[artifact], folder / "run" / file
        for _ in range(OF_A_FILE):
            store = ArtifactStore(str(folder), "run")
            evaluated.bring(artifact, store)
            assert store.find(artifact) == reference
            rot(place, chance)
            assert store.find(artifact) != reference, file
            with pytest.raises(StaleReferenceError, match=told_of(place.name)):
                store.local_files(reference)
            (reason,) = store.reasons
            assert re.search(told_of(place.name), reason)
            assert not Path(store.path(artifact)).exists()
            assert store.find(artifact) is None
            yield Flip(kind_of(f"run/{file}"), Outcome.QUARANTINED)


def in_pruned_manifests(evaluated: Evaluated, folder: Path, chance: random.Random) -> Iterator[Flip]:
    """What a prune leaves of an artifact: without a word that holds, nothing says that it was taken on purpose."""
    artifact = next(folder for folder in evaluated.references if folder.startswith("policies/"))
    reference = evaluated.references[artifact]
    for _ in range(OF_OTHERS):
        store = ArtifactStore(str(folder), "run")
        evaluated.bring(artifact, store)
        replace_artifact(store, reference, None, pruned={"by": "grpo prune run --policies-last 1", "at": "2026-01-01"})
        assert store.pruned_reason(reference) is not None
        manifest = Path(store.path(f"{artifact}{MANIFEST_ENDING}"))
        rot(manifest, chance)
        with pytest.raises(StaleReferenceError, match=told_of(manifest.name)):
            store.pruned_reason(reference)
        yield Flip("manifest of what was pruned", Outcome.REFUSED)


def in_records(evaluated: Evaluated, folder: Path, chance: random.Random) -> Iterator[Flip]:
    """Records of the run and of the root, each alone."""
    for source in sorted((evaluated.runs.root / FOLDER).glob("*.json")):
        for place in (f"run/{FOLDER}", FOLDER):
            for _ in range(OF_A_RECORD):
                yield _in_record(source, folder, place, chance)


def _in_record(source: Path, folder: Path, place: str, chance: random.Random) -> Flip:
    key, record = source.stem, folder / place / source.name
    for present in (folder / "run", folder / FOLDER):
        shutil.rmtree(present, ignore_errors=True)
    record.parent.mkdir(parents=True)
    shutil.copy(source, record)
    store = ArtifactStore(str(folder), "run")
    use_store(store)
    said = StageRecords().read_path(key)
    shutil.rmtree(folder / "run" / FOLDER, ignore_errors=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, record)
    rot(record, chance)
    kind = kind_of(f"{place}/{source.name}")
    try:
        # The last digit of a number may be beyond what a float holds.
        assert StageRecords().read_path(key) == said
    except StaleReferenceError as error:
        assert f"{key}.json is not the record that was written" in [*store.reasons, str(error)][0]  # noqa: PT017
        assert (store.reasons != []) == place.startswith("run")
        return Flip(kind, Outcome.QUARANTINED if store.reasons else Outcome.REFUSED)
    return Flip(kind, Outcome.SAME)


ROOTS = ("tasks.update.policy:update_policy_task",)


def in_calls(folder: Path, chance: random.Random) -> Iterator[Flip]:
    """What a stage is asked on a pool, and what it answers: as if there were none, so that it is asked once more."""
    store = ArtifactStore(str(folder), "run")
    requested = StageCall(
        stage="update policy",
        storage=described(store),
        run="run",
        roots=ROOTS,
        code=code_of(ROOTS),
        arguments={"seed": 3},
    )
    answered = StageOutcome(reasons=("a file was damaged",))
    for _ in range(OF_OTHERS):
        store.write_file(f"{CALLS}/{requested.digest}.json", dump_checked(requested.model_dump(mode="json")))
        assert read_call(store, requested.digest) == requested
        rot(Path(store.path(f"{CALLS}/{requested.digest}.json")), chance)
        with pytest.raises(ValueError):  # noqa: PT011 - of many kinds
            read_call(store, requested.digest)
        yield Flip("call of a pool", Outcome.UNUSED)
        leave_outcome(store, requested.digest, answered)
        assert read_outcome(store, requested.digest) == answered
        rot(Path(store.path(f"{CALLS}/{requested.digest}.outcome.json")), chance)
        assert read_outcome(store, requested.digest) is None
        yield Flip("outcome of a call", Outcome.UNUSED)


def in_locks(folder: Path, chance: random.Random) -> Iterator[Flip]:
    """The kernel holds the lock; what the file says is for people, so a flip neither opens nor closes it."""
    store = ArtifactStore(str(folder), "run")
    for _ in range(OF_OTHERS):
        with locked(store, setting="run.name", value="run") as lock:
            rot(Path(store.path(LOCK)), chance)
            with (
                pytest.raises(InputError, match="It is being written by"),
                locked(store, setting="run.name", value="run"),
            ):
                pass
            lock.require_held()
            left = Path(store.path(LOCK)).read_bytes()
        Path(store.path(LOCK)).write_bytes(left)  # as of a holder that was killed
        with locked(store, setting="run.name", value="run") as lock:
            lock.require_held()
        yield Flip("lock", Outcome.UNUSED)


def in_cached_copies(evaluated: Evaluated, folder: Path, chance: random.Random) -> Iterator[Flip]:
    """Copies of what a bucket holds: one that is damaged is removed, and read from the bucket again."""
    cache, source = ReadCache(folder / "cache", 2**30), evaluated.runs.path("policies/000001/adapter_model.safetensors")
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    for _ in range(OF_OTHERS):
        shutil.copy(source, folder / "read")  # the cache keeps a link to it
        cache.keep(folder / "read", sha256)
        (kept,) = [path for path in (cache.folder / "contents").rglob("*") if path.is_file()]
        rot(kept, chance)
        assert not cache.take(sha256, folder / "taken")
        assert not kept.exists()
        assert not (folder / "taken").exists()
        yield Flip("copy in the read cache", Outcome.UNUSED)


def in_descriptions(evaluated: Evaluated, copied: Runs, chance: random.Random) -> Iterator[Flip]:
    """What says how the run was made, and what is shown of it: every start writes it from what was verified."""
    whole = {name: copied.path(name).read_bytes() for name in DESCRIPTIONS}
    for _ in range(ROUNDS):
        for name in DESCRIPTIONS:
            rot(copied.path(name), chance)
        again = copied.start(**SETTINGS)
        assert again.stages == ()
        evaluated.require_same_end(copied, again)
        for name in DESCRIPTIONS:
            assert copied.path(name).read_bytes() == whole[name]
            yield Flip(kind_of(f"run/{name}"), Outcome.ANEW)
