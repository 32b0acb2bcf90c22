"""One of the processes that `accelerate launch` starts for an update: `python -m tasks.update.process FOLDER`.

The folder has the job. The first process sends its progress and the outcome; a process that fails sends its
error. When the launching process ends, standard input closes and they exit.
"""

import os
import sys
import threading
from pathlib import Path

from tasks.execution.child_main import ERROR, OUTCOME, READY, Answers, claim_stdout

JOB_FILE = "job.json"


def main(folder: Path) -> None:
    """Take part in the update; exit with code 1 if it fails."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = claim_stdout()
    # The models' libraries take seconds to import; from here on this process ends with its parent.
    from tasks.execution.errors import record_of

    try:
        take_part(folder, answers)
    except Exception as error:
        record = record_of(error)
        answers.send(ERROR, record.model_dump(mode="json"))
        print(record.trace, file=sys.stderr, flush=True)
        # A normal exit would wait for processes that wait for this one.
        os._exit(1)


def take_part(folder: Path, answers: Answers) -> None:
    """Join the other processes, run the update, and leave the process group.

    Raises:
        Exception: any error of the update.
    """
    from grpo_core.update.accelerated import AcceleratedProcessGroup
    from tasks.models.resident import configure_torch
    from tasks.storage.artifacts.store import open_store, use_store
    from tasks.storage.filesystem.failures import translate_storage_errors
    from tasks.update.job import SharedJob, carry_out

    shared = SharedJob.model_validate_json((folder / JOB_FILE).read_text())
    store = open_store(shared.storage, shared.run)
    use_store(store)
    placement = shared.job.placement
    kind: type[AcceleratedProcessGroup] = AcceleratedProcessGroup
    if placement.sharding == "fsdp2":
        from grpo_core.update.accelerated import ShardedProcessGroup

        kind = ShardedProcessGroup
    process_group = kind(configure_torch(placement))
    is_first = process_group.rank == 0

    def report(done: int, total: int) -> None:
        answers.advance("update policy", done, total)

    if is_first:
        answers.send(READY, True)
    with translate_storage_errors(store.filesystem, store.root):
        outcome = carry_out(shared.job, Path(shared.staged), process_group, report if is_first else None)
    process_group.close()
    if outcome is not None:
        answers.send(OUTCOME, outcome.model_dump(mode="json"))


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
