"""References as Prefect results. Only these records come back: a result names no class, and nothing is unpickled."""

from typing import Any

from prefect.serializers import JSONSerializer

from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store

_ARTIFACT, _POLICY = "$artifact", "$policy"


def encode_reference(value: object) -> dict[str, Any]:
    """A reference as plain JSON."""
    if isinstance(value, PolicyRef):
        return {_POLICY: value.model_dump(mode="json")}
    if isinstance(value, ArtifactRef):
        return {_ARTIFACT: value.model_dump(mode="json")}
    raise TypeError(f"a task returned {type(value).__name__}; tasks return references only")


def decode_reference(value: dict[str, Any]) -> Any:
    """The reference, its files present and verified in this run's folder.

    Prefect takes an error here for a cache miss, so a stage whose files are gone or changed runs again.

    Raises:
        StaleReferenceError: the files are nowhere whole.
        StorageError: a bucket did not say; the stage then refuses to run.
    """
    if _ARTIFACT in value:
        return _brought_home(ArtifactRef.model_validate(value[_ARTIFACT]))
    if _POLICY in value:
        policy = PolicyRef.model_validate(value[_POLICY])
        if policy.checkpoint is None:
            return policy
        return policy.model_copy(update={"checkpoint": _brought_home(policy.checkpoint)})
    return value


def _brought_home(reference: ArtifactRef) -> ArtifactRef:
    store = current_store()
    with store.noting_unread(reference.uri):
        return store.restore_artifact(reference)


def reference_serializer() -> JSONSerializer:
    """Prefect's JSON serializer with this codec."""
    name = "tasks.storage.prefect_results.serializer"
    return JSONSerializer(object_encoder=f"{name}.encode_reference", object_decoder=f"{name}.decode_reference")
