"""Which configuration, model, prompts and code what stands in a run was made with, as the run's description says."""

import contextlib

from tasks.storage.artifacts.run_description import RUN_FILE
from tasks.storage.filesystem.checked_json import load_checked
from tasks.storage.filesystem.run_folder import RunFolder

LINEAGE = "lineage"
_EVALUATIONS = "evaluations/"


def lineage_of(store: RunFolder, folder: str = "", file: str = RUN_FILE) -> str | None:
    """A digest of what made the artifact in a folder of the run; None where the description does not say.

    Args:
        store: the run.
        folder: of the artifact. Those of evaluations depend on the held-out prompts too.
        file: the description, within the run.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError):
        described = load_checked(store.read_file(file) or b"{}")
        lineage: str = described[LINEAGE]
        return f"{lineage} {described['evaluation']}" if folder.startswith(_EVALUATIONS) else lineage
    return None
