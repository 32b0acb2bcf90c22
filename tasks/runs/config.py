"""Read a run's stored configuration."""

from tasks.storage.artifacts.store import ArtifactStore
from grpo_core.errors import InputError
from grpo_core.errors import InputErrors
from pathlib import Path
from configs.schema import RunConfig
from collections.abc import Sequence
import json
from configs.loader import read_config
from tasks.storage.artifacts.run_description import read_config_file
from configs.loader import read_mapping
import tempfile


def stored_config(store: ArtifactStore, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run was made with; of a replay, without what it took from another run.

    Args:
        store: of the run.
        overrides: `section.key=value`, what is to be changed.

    Raises:
        InputError, InputErrors: it is not there, or no configuration.
    """
    content = read_config_file(store)
    with tempfile.TemporaryDirectory() as fetched:
        path = Path(fetched) / f"{store.run}.yaml"
        path.write_bytes(content)
        values = read_mapping(path, "RUN", example="configs/tiny.yaml", keys="run, policy")
        values.pop("replay", None)
        path.write_text(json.dumps(values))
        return read_config(path, overrides)
