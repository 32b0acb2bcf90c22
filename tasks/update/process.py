"""One of the processes that `accelerate launch` starts for an update: `python -m tasks.update.process FOLDER`.

The folder holds the job. The first process writes the outcome into it and tells on its standard output how far it is;
a process that fails leaves an error record. Standard input ends with the process that started all this.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

JOB_FILE = "job.json"
OUTCOME_FILE = "outcome.json"
PROGRESS = "progress"


def main(folder: Path) -> None:
    """Take part in the update; end with code 1 if it fails."""
    end_with_parent()
    # The models' libraries take seconds to import; by now nobody is left behind if the parent goes.
    from tasks.execution.error_records import record_of

    try:
        take_part(folder)
    except Exception as error:
        record = record_of(error, time.time())
        (folder / f"error-{os.environ.get('RANK', '0')}.json").write_text(record.model_dump_json())
        print(record.trace, file=sys.stderr, flush=True)
        # An orderly end would wait for processes that wait for this one.
        os._exit(1)


def take_part(folder: Path) -> None:
    """Join the others, carry the job out, and part from them.

    Raises:
        Exception: whatever the update raises.
    """
    from grpo_core.update.accelerated import AcceleratedProcessGroup
    from tasks.models.resident import configure_torch
    from tasks.storage.artifacts.open_store import open_store
    from tasks.storage.artifacts.store import use_store
    from tasks.storage.filesystem.failures import translate_storage_errors
    from tasks.update.job import SharedJob, carry_out

    shared = SharedJob.model_validate_json((folder / JOB_FILE).read_text())
    store = open_store(shared.storage, shared.run)
    use_store(store)
    placement = shared.job.placement
    kind: type[AcceleratedProcessGroup] = AcceleratedProcessGroup
    if placement.sharding == "fsdp2":
        from grpo_core.update.sharded import ShardedProcessGroup

        kind = ShardedProcessGroup
    process_group = kind(configure_torch(placement))
    with translate_storage_errors(store.filesystem, store.root):
        outcome = carry_out(
            shared.job, Path(shared.staged), process_group, None if process_group.rank else report_progress
        )
        if outcome is not None:
            (folder / OUTCOME_FILE).write_text(outcome.model_dump_json())
    process_group.leave()


def report_progress(done: int, total: int) -> None:
    """Passes done, for the process that reads the standard output."""
    print(json.dumps({PROGRESS: [done, total]}), flush=True)


def end_with_parent() -> None:
    """End this process as soon as nobody holds the other end of its standard input."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
