"""A run that a newer version wrote is left alone: nothing here knows what its files mean."""

from grpo_core.errors import InputError
from tasks.storage.artifacts.run_description import RUN_FILE, load_description
from tasks.storage.tables.schemas import SCHEMA_VERSION
from tasks.storage.artifacts.store import ArtifactStore


def refuse_newer(store: ArtifactStore) -> None:
    """Raise InputError for a run whose description says a later schema version than this program's."""
    try:
        described = load_description(store.read_file(RUN_FILE) or b"{}")
    except ValueError:
        # Whoever reads it for more than this says that it is damaged.
        return
    version = described.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        hint = f"This program reads version {SCHEMA_VERSION} and nothing was touched; use the version that wrote it."
        raise InputError(f"{store.run}/{RUN_FILE}", f"schema version {version}", hint)
