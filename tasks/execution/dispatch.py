"""Where a stage runs: in this process, a child that can be killed, those of the devices, on a pool, or in shards."""

import contextlib
import threading
from collections.abc import Callable

from prefect.futures import PrefectFuture
from prefect.transactions import CommitMode, get_transaction, transaction

from tasks.execution.call import call_of, run_in_child, run_on_device
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import RetriesExhaustedError, retryable_kind
from tasks.execution.resources import resource
from tasks.execution.stage import Arguments, Child, Device, Devices, Here, Part, Pool, Reference, Shards, Stage, place
from tasks.execution.stopping import stages_cancelled_on_interrupt
from tasks.execution.work_pool import carry_out_on_pool
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import current_store

Submit = Callable[[Part], PrefectFuture[Reference]]


class _PolicyLock:
    """Held by the stage that uses this process's policy: each brings its weights to the version that it needs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def dispatch(stage: Stage, arguments: Arguments, submit: Submit) -> Reference:
    """Run the stage where its placement says, with its own errors; `submit` starts the stage's task on a part."""
    store, where = current_store(), place(stage, arguments)
    # Another process would not know that the artifact may exist.
    store.require_read()
    match where:
        case Shards(count):
            return run_in_shards(stage, arguments, count, submit)
        case Pool(name, timeout):
            task = get_transaction()
            assert task is not None, "a stage is a Prefect task, whose transaction has the stage's key"
            return carry_out_on_pool(call_of(stage, arguments, store, task.key), name, timeout, store)
        case Device(timeout):
            return run_on_device(stage, arguments, timeout, store)
        case Child(timeout):
            call = call_of(stage, arguments, store)
            # Rollouts and updates share a child, and so its model, as long as they take turns.
            group = "policy" if stage.uses_policy(arguments) else f"{call.stage} {call.arguments.get('section')}"
            with resource(ChildProcesses).borrow(group, call.stage, child_command("stage")) as process:
                return run_in_child(process, call, timeout, store)
        case Here() | Devices():
            with resource(_PolicyLock).lock if stage.uses_policy(arguments) else contextlib.nullcontext():
                return stage.function(**arguments)


def run_in_shards(stage: Stage, arguments: Arguments, count: int, submit: Submit) -> Reference:
    """Cut the stage, run at most `count` parts concurrently as stages with own records, and join them in order.

    Once all have ended, the first failure is raised, as RetriesExhaustedError if it is retryable; other parts are kept.
    """
    assert stage.sharding is not None, "only a stage with sharding is cut"
    parts = stage.sharding.cut(arguments, count)
    # Each part is recorded when it ends; inside the stage's own task Prefect would record it at the end of that task.
    with transaction(commit_mode=CommitMode.EAGER):
        futures = [submit(part) for part in parts]
    with stages_cancelled_on_interrupt():
        for future in futures:
            future.wait()
    try:
        made = [future.result() for future in futures]
    except Exception as error:
        if retryable_kind(error) is None:
            raise
        raise RetriesExhaustedError(f"{type(error).__name__}: {error}") from error
    return stage.sharding.join(arguments, [part for part in made if isinstance(part, ArtifactRef)])
