"""Which version of a run's policy is meant, and whether it is whole."""

from tasks.runs.iterations import POLICIES, held_versions, missing_version, read_policy
from grpo_core.errors import InputError, InputErrors
from tasks.storage.artifacts.reader import ArtifactReader
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore


def choose_policy(store: ArtifactStore, version: int | None, model_digest: str) -> tuple[PolicyRef, tuple[str, ...]]:
    """A version of the policy, and what people ought to know of the choice.

    Args:
        store: of the run; nothing in it is changed.
        version: 0 for the model as it was given; None for the last one that is whole.
        model_digest: of that model.

    Raises:
        InputErrors: there is no such version, or it is not whole.
    """
    base = PolicyRef(version=0, digest=model_digest)
    reader = ArtifactReader(store)
    held = sorted({*held_versions(store)} - {0})
    if version == 0:
        return base, ()
    if version is not None:
        if version not in held:
            raise InputErrors([missing_version(store, version)])
        if damage := _damage(reader, version):
            hint = f"{damage}. Choose another version, or start the run again: what is damaged is made again."
            raise InputErrors([InputError("--policy", version, hint)])
        return read_policy(store, version), ()
    notes: list[str] = []
    for each in reversed(held):
        damage = _damage(reader, each)
        if damage is None:
            return read_policy(store, each), tuple(notes)
        notes.append(f"{store.run}: version {each} is passed over: {damage}")
    return base, tuple(notes)


def _damage(reader: ArtifactReader, version: int) -> str | None:
    """What is wrong with the files of a version; None when they are whole."""
    known = len(reader.damages)
    found = reader.find(f"{POLICIES}/{version:06d}")
    if found is not None and reader.verify(found):
        return None
    return "; ".join(f"{each.place}: {each.reason}" for each in reader.damages[known:])
