"""Which stage made which artifact: Prefect's results, kept in the run's own folder and checked when they are read.

Prefect's own record of a result names the class that decodes it, pickle among them, so a changed file could run code.
What is kept here is the reference alone; the decoder is always this project's codec.
"""

import hashlib
import json
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect.filesystems import WritableFileSystem
from prefect.results import ResultRecord, ResultRecordMetadata  # type: ignore[attr-defined]

from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, current_store
from tasks.storage.filesystem.files import is_local, write_whole
from tasks.storage.prefect_results.serializer import reference_serializer

FOLDER = ".stages"
"""In the run, so that its folder alone is enough to go on; and beside the runs, so that they find each other's."""


class StageRecords(WritableFileSystem):
    """Prefect's result storage over the artifact store of the present context; its keys are those of the stages."""

    _block_type_name = "GRPO stage records"
    _block_type_slug = "grpo-stage-records"
    _description = "References to the artifacts of finished stages, in the folder of their run."

    # Prefect calls the plain methods with _sync=True, and those with an "a" from coroutines.
    def read_path(self, path: str, *, _sync: bool = True) -> bytes:  # type: ignore[override]
        """The record of a key as Prefect reads it.

        Raises:
            StaleReferenceError: there is none, or none that is what was written.
            StorageError: a bucket did not say; the stage then refuses to run.
        """
        with current_store().noting_unread(path):
            content = _find(path)
        metadata = ResultRecordMetadata(
            serializer=reference_serializer(), storage_key=path, storage_block_id=self._block_document_id
        )
        record: ResultRecord[str] = ResultRecord(metadata=metadata, result=json.dumps(content))
        return record.model_dump_json(serialize_as_any=True).encode()

    async def aread_path(self, path: str) -> bytes:
        """As read_path."""
        return self.read_path(path)

    def write_path(self, path: str, content: bytes, *, _sync: bool = True) -> None:  # type: ignore[override]
        """Keep the reference that a Prefect record holds."""
        store, result = current_store(), json.loads(json.loads(content)["result"])
        kept = json.dumps({"key": path, "result": result, "sha256": _digest(path, result)}, indent=1).encode()
        _keep(store, f"{FOLDER}/{path}.json", kept)

    async def awrite_path(self, path: str, content: bytes) -> None:
        """As write_path."""
        self.write_path(path, content)


def _keep(store: ArtifactStore, name: str, content: bytes) -> None:
    """In the run, and beside the runs: what is lost there when the power fails is another run's miss and no more."""
    if not is_local(store.filesystem):
        store.write_file(name, content)
        store.write_shared(name, content)
        return
    with store.staging() as scratch:
        write_whole(store.filesystem, store.path(name), content, scratch=scratch)
        shared, temporary = Path(store.root) / name, scratch / "shared"
        temporary.write_bytes(content)
        shared.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(shared)


def _digest(key: str, result: Any) -> str:
    return hashlib.sha256(json.dumps([key, result], sort_keys=True).encode()).hexdigest()


def _find(key: str) -> Any:
    """The result under this key: of this run, or of another run of the same root."""
    store, name = current_store(), f"{FOLDER}/{key}.json"
    own = store.read_file(name)
    if own is not None:
        try:
            return _checked(key, own)
        except StaleReferenceError as error:
            store.set_aside([name], reason=str(error))
    shared = store.read_shared(name)
    if shared is None:
        raise StaleReferenceError(f"{key}: no stage has been recorded")
    result = _checked(key, shared)
    store.write_file(name, shared)
    return result


def _checked(key: str, content: bytes) -> Any:
    try:
        kept = json.loads(content)
        whole = kept["key"] == key and kept["sha256"] == _digest(key, kept["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise StaleReferenceError(f"{key}.json is not the record that was written ({error})") from error
    if not whole:
        raise StaleReferenceError(f"{key}.json does not have the sha256 that it says")
    return kept["result"]


async def registered_records() -> StageRecords:
    """The storage as Prefect's server knows it, which it must before a task may use it."""
    records = StageRecords()
    await records.asave("stages", overwrite=True)
    return records


_CURRENT: ContextVar[StageRecords] = ContextVar("stage_records")


def use_records(records: StageRecords) -> None:
    """Make this the storage of the results of stages in the present context."""
    _CURRENT.set(records)


def current_records() -> StageRecords:
    """The storage of the present context."""
    return _CURRENT.get()
