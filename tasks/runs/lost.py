"""Refuse to make an artifact again that is in quarantine and whose source `grpo prune` has removed."""

from grpo_core.errors import InputError
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import removed_by


def refuse_lost(store: ArtifactStore, rollouts: ArtifactRef, folder: str, needed: str) -> None:
    """Refuse to make the artifact of a folder again if it is in quarantine and what it is made of was pruned.

    Args:
        rollouts: what the artifact is made of.
        folder: the artifact's folder in the run.
        needed: which part of the rollouts it is made of, IMAGES_REMOVED or STATES_REMOVED.

    Raises:
        InputError: the artifact is in quarantine and that part was pruned; the command line exits with code 2.
    """
    pruned = store.pruned_reason(rollouts)
    if pruned is None or needed not in removed_by(pruned):
        return
    names = {folder, store.manifest_path(folder)}
    found = [each for each in RunReader(store).moved_files(QUARANTINE) if not names.isdisjoint(each.paths)]
    if not found:
        return
    last = found[-1]
    hint = (
        f"It is in {store.path(last.place)} ({last.reason}) and cannot be computed again: the {needed} of "
        f"{rollouts.uri} were removed by `{pruned.get('by', 'grpo prune')}` on {pruned.get('on', 'an earlier day')}. "
        f"Put {store.path(folder)} and {store.manifest_path(store.path(folder))} back from a copy and start again, or "
        "start under another --run name, which starts from the beginning. Other iterations are untouched."
    )
    raise InputError(f"{store.run}/{folder}", "damaged", hint)
