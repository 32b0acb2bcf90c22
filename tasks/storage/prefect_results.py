"""Prefect's results: references to artifacts, stored in the run's folder and verified when they are read.

Prefect's record of a result names the class that decodes it, pickle among them, so a changed file could run code.
Only the reference is kept here, as JSON with a checksum; it is always decoded by `decode_reference`.
"""

import json
from pathlib import Path
from typing import Any

from prefect.filesystems import WritableFileSystem
from prefect.results import ResultRecord, ResultRecordMetadata  # type: ignore[attr-defined]
from prefect.serializers import JSONSerializer

from tasks.process import map_in_threads
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.store import ArtifactStore, current_store
from tasks.storage.files import dump_checked, is_local, load_checked, matching, write_file_atomically

FOLDER = ".stages"
"""Folders of records: in the run, so that its folder suffices to continue; next to the runs, which share them."""
_ARTIFACT, _POLICY = "$artifact", "$policy"


class StageRecords(WritableFileSystem):
    """Prefect's result storage over the artifact store of the current context; its keys are those of the stages."""

    _block_type_name = "GRPO stage records"
    _block_type_slug = "grpo-stage-records"
    _description = "References to the artifacts of finished stages, in the folder of their run."

    # Prefect calls the plain methods with _sync=True, and those with an "a" from coroutines.
    def read_path(self, path: str, *, _sync: bool = True) -> bytes:  # type: ignore[override]
        """Read a key's reference as a Prefect record; StaleReferenceError if there is none, or it was changed."""
        with current_store().noting_unread(path):
            reference = _find(path)
        metadata = ResultRecordMetadata(serializer=reference_serializer(), storage_key=path)
        return ResultRecord(metadata=metadata, result=reference).serialize()

    async def aread_path(self, path: str) -> bytes:
        """Read the record of a key asynchronously."""
        return self.read_path(path)

    def write_path(self, path: str, content: bytes, *, _sync: bool = True) -> None:  # type: ignore[override]
        """Keep the reference that a Prefect record contains."""
        record: ResultRecord[str] = ResultRecord.model_validate_json(content)
        _keep(current_store(), path, json.loads(record.result))

    async def awrite_path(self, path: str, content: bytes) -> None:
        """Write the record of a key asynchronously."""
        self.write_path(path, content)


def record_stage(store: ArtifactStore, key: str, reference: ArtifactRef | PolicyRef) -> None:
    """Record what a stage made, for the Prefect task of the stage in another process."""
    _keep(store, key, encode_reference(reference))


def recorded_stage(store: ArtifactStore, key: str) -> ArtifactRef | PolicyRef | None:
    """Return what the run's record of a stage names, whose files are not read; None if it is missing or damaged."""
    try:
        return _checked(key, store.read_file(f"{FOLDER}/{key}.json") or b"")
    except StaleReferenceError:
        return None


def _keep(store: ArtifactStore, key: str, result: Any) -> None:
    """Write a record in the run and next to the runs; a record lost there is only a cache miss of another run."""
    name, content = f"{FOLDER}/{key}.json", dump_checked({"key": key, "result": result})
    if not is_local(store.filesystem):
        map_in_threads(lambda shared: store.write_file(name, content, shared=shared), [False, True])
        return
    with store.staging() as scratch:
        write_file_atomically(store.filesystem, store.path(name), content, scratch=scratch)
        shared, temporary = Path(store.path_of(name)), scratch / "shared"
        temporary.write_bytes(content)
        shared.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(shared)


def _find(key: str) -> ArtifactRef | PolicyRef:
    """Return the reference under this key: of this run, or of another run of the same root."""
    store, name = current_store(), f"{FOLDER}/{key}.json"
    local = is_local(store.filesystem)
    # Most stages have neither, which a bucket says of both at once.
    found = map_in_threads(lambda read: read(name), [store.read_file, *([] if local else [store.read_shared])])
    own = found[0]
    if own is not None:
        try:
            return _checked(key, own)
        except StaleReferenceError as error:
            store.quarantine([name], reason=str(error))
    shared = store.read_shared(name) if local else found[1]
    if shared is None:
        raise StaleReferenceError(f"{key}: no stage has been recorded")
    reference = _checked(key, shared)
    store.write_file(name, shared)
    return reference


def note_copied(store: ArtifactStore) -> bool:
    """Note which artifacts were copied from another run; False without records, or if one is not as it was written."""
    names = matching(store.filesystem, store.path(FOLDER), "*.json")
    for path in names:
        key = path.rsplit("/", 1)[-1].removesuffix(".json")
        try:
            reference = _checked(key, store.read_file(f"{FOLDER}/{key}.json") or b"")
        except StaleReferenceError:
            return False
        artifact = reference.checkpoint if isinstance(reference, PolicyRef) else reference
        if artifact is not None and artifact.run != store.run:
            store.copied[artifact.folder] = artifact.run
    return bool(names)


def _checked(key: str, content: bytes) -> ArtifactRef | PolicyRef:
    try:
        kept = load_checked(content)
        if kept["key"] != key:
            raise ValueError(f"it has the key {kept['key']}")
        return _reference(kept["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise StaleReferenceError(f"{key}.json is not the record that was written ({error})") from error


def encode_reference(value: object) -> dict[str, Any]:
    """Encode a reference as plain JSON; TypeError for any other value."""
    if isinstance(value, PolicyRef):
        return {_POLICY: value.model_dump(mode="json")}
    if isinstance(value, ArtifactRef):
        return {_ARTIFACT: value.model_dump(mode="json")}
    raise TypeError(f"a task returned {type(value).__name__}; tasks return references only")


def decode_reference(value: dict[str, Any]) -> Any:
    """Decode a reference whose files are present and verified in this run's folder, else StaleReferenceError.

    Prefect treats an error here as a cache miss, so a stage whose files are gone or changed runs again; but not while
    a bucket does not answer (`noting_unread`).
    """
    if not {_ARTIFACT, _POLICY} & value.keys():
        return value
    reference, store = _reference(value), current_store()
    artifact = reference.checkpoint if isinstance(reference, PolicyRef) else reference
    if artifact is None:
        return reference
    with store.noting_unread(artifact.uri):
        restored = restore_artifact(store, artifact)
    return reference.model_copy(update={"checkpoint": restored}) if isinstance(reference, PolicyRef) else restored


def _reference(value: dict[str, Any]) -> ArtifactRef | PolicyRef:
    if _POLICY in value:
        return PolicyRef.model_validate(value[_POLICY])
    return ArtifactRef.model_validate(value[_ARTIFACT])


def reference_serializer() -> JSONSerializer:
    """Make Prefect's JSON serializer with `encode_reference` and `decode_reference`."""
    return JSONSerializer(object_encoder=f"{__name__}.encode_reference", object_decoder=f"{__name__}.decode_reference")


async def registered_records() -> StageRecords:
    """Register the storage with Prefect's server, which a task needs before it can use it."""
    records = StageRecords()
    await records.asave("stages", overwrite=True)
    return records
