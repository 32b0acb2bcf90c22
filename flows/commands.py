"""The flows as plain functions, for scripts and notebooks; the program `grpo` calls the same ones.

Each checks its input before anything heavy is imported, runs its flow to the end, also where an event loop runs already
(a notebook), and returns what the command prints as a summary. Wrong input raises InputError.
"""

import contextvars
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.validation import Section, validated
from configs.yaml_files import yaml_value
from flows.pipeline.requests import EvaluateRequest, ReplayRequest, RescoreRequest, refuse_overrides
from grpo_core.errors import InputError
from tasks.process import collection_paused
from tasks.progress import Lines, Silence, listen, log

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.evaluation import EvaluateSummary
    from flows.pipeline.lineage import ChangedRunError
    from flows.replaying import ReplaySummary
    from flows.rescoring.rescore import Rescoring
    from flows.training.hooks import IterationHook
    from flows.training.summary import TrainSummary
    from tasks.storage.artifacts.store import ArtifactStore

Overrides = Mapping[str, object] | Sequence[str]
"""Settings to change: values by dotted key, `{"update.learning_rate": 1e-4}`, or texts as of `--set`."""

R = TypeVar("R")
Q = TypeVar("Q", bound=Section)


def train(
    config: "RunConfig | Mapping[str, Any] | str | Path",
    *,
    overrides: Overrides = (),
    accept_code: bool = False,
    on_iteration: "IterationHook | None" = None,
    ask: "Callable[[ChangedRunError], Sequence[str]] | None" = None,
    progress: bool = True,
) -> "TrainSummary":
    """Start or resume a training run.

    Args:
        config: a YAML file, a mapping with the same sections, or a RunConfig.
        overrides: settings to change.
        accept_code: keep stored results that other code made, and record it.
        on_iteration: called with the record of each iteration, in order; it ends the run after this one by returning
            True or raising StopTraining. A run that resumes passes all of its iterations again, the previous ones with
            `record.stored`, so that a hook that counts decides as in a run that was never interrupted.
        ask: called when the run has policies of other settings, code or prompts and `run.on_change` is refuse; returns
            the settings to change, as of `--set`. None refuses such a start.
        progress: show bars in a terminal, lines elsewhere; if False, the log goes to Prefect's UI only.

    Raises:
        InputError: everything that is wrong with the input, before anything is written.
    """
    from configs.loader import as_config
    from flows.preflight.files import refuse_missing_files
    from tasks.runs.trust import remember, uses_of

    given = as_config(config, _texts(overrides))
    refuse_missing_files(given)
    remember(uses_of(given))
    with _all_machines(given, progress=progress):
        return _train(given, accept_code=accept_code, on_iteration=on_iteration, ask=ask, progress=progress)


def _train(
    given: "RunConfig",
    *,
    accept_code: bool,
    on_iteration: "IterationHook | None",
    ask: "Callable[[ChangedRunError], Sequence[str]] | None",
    progress: bool,
) -> "TrainSummary":
    from configs.loader import as_config
    from flows.preflight.files import check_files

    if on_iteration is None:
        finished = _reporting(lambda: read_finished(given), progress=progress)
        if finished is not None:
            return finished

    def body() -> "Coroutine[Any, Any, TrainSummary]":
        check_files(given)
        start_server()
        from flows.pipeline.run import changed_run
        from flows.preflight.inputs import check_inputs
        from flows.training.train import train as flow

        chosen = given
        check_inputs(chosen)
        if (change := changed_run(chosen, accept_code=accept_code)) is not None:
            if ask is None:
                raise change
            chosen = as_config(given, ask(change))
            check_inputs(chosen)
        return flow(chosen, accept_code=accept_code)

    return _run(body, on_iteration, progress=progress)


@contextmanager
def _all_machines(given: "RunConfig", *, progress: bool) -> Iterator[None]:
    """Run the updates of a training on every machine on which it was started; only the first one has the run.

    Raises:
        SystemExit: on another machine, once the training has ended.
    """
    if "MASTER_ADDR" not in os.environ:
        yield
        return
    # torch, which takes seconds to import, is not needed to learn that a run has finished.
    from tasks.update.machines import Machines, claim_rendezvous, first_machine
    from tasks.update.process import take_part_in_updates

    rendezvous = claim_rendezvous(os.environ)
    if rendezvous is None or rendezvous.rank == 0:
        with first_machine(rendezvous):
            yield
        return

    def take_part() -> None:
        take_part_in_updates(Machines(rendezvous), given.placement)

    _reporting(take_part, progress=progress)
    raise SystemExit(0)


def replay(
    source: str | ReplayRequest,
    *,
    on_iteration: "IterationHook | None" = None,
    progress: bool = True,
    **options: Any,
) -> "ReplaySummary":
    """Train a policy from another run's stored rollouts.

    Args:
        source: a run under the storage root, or the path of its folder.
        on_iteration: as of :func:`train`.
        progress: as of :func:`train`.
        options: fields of ReplayRequest: advantages, iterations, max_staleness, name, overrides,
            trust_code, root.

    Raises:
        InputError: what is wrong with the request or the source.
    """

    def body() -> "Coroutine[Any, Any, ReplaySummary]":
        from flows.preflight.files import check_files
        from flows.preflight.trust import trusted_config

        request = _request(ReplayRequest, source, "source", options)
        (store,) = require_runs([request.named.run], request.root)
        refuse_overrides(request.overrides, request.hint_against)
        chosen = trusted_config(store, request.overrides, trust=request.trust_code)
        check_files(chosen, storage=False)
        start_server()
        from flows.replaying import plan_replay

        plan_replay(request)
        from flows.replaying import replay as flow

        return flow(request)

    return _run(body, on_iteration, progress=progress)


def evaluate(run: str | EvaluateRequest, *, progress: bool = True, **options: Any) -> "EvaluateSummary":
    """Evaluate a policy version on held-out prompts with fixed seeds; stored results are not computed again.

    Args:
        run: a run under the storage root, or the path of its folder.
        progress: as of :func:`train`.
        options: fields of EvaluateRequest: prompts, overrides, trust_code, root.

    Raises:
        InputError: what is wrong with the request or the run.
    """

    def body() -> "Coroutine[Any, Any, EvaluateSummary]":
        from flows.preflight.files import check_heldout_files
        from flows.preflight.trust import EVALUATED, trusted_config

        request = _request(EvaluateRequest, run, "run", options)
        (store,) = require_runs([request.named.run], request.root)
        refuse_overrides(request.overrides, request.hint_against)
        config = trusted_config(store, request.changes, trust=request.trust_code, sections=EVALUATED)
        check_heldout_files(config)
        start_server()
        from flows.evaluation import plan_evaluate

        plan_evaluate(request)
        from flows.evaluation import evaluate as flow

        return flow(request)

    return _run(body, progress=progress)


def rescore(
    runs: str | Sequence[str] | RescoreRequest,
    *,
    rewards: str | Path | Sequence[Mapping[str, Any]] | None = None,
    progress: bool = True,
    **options: Any,
) -> "Rescoring":
    """Score stored rollouts with other rewards or weights; only missing scores are computed.

    Args:
        runs: one run or several, under the storage root or by the paths of their folders.
        rewards: the path of a YAML file with `rewards:`, or the list itself.
        progress: as of :func:`train`.
        options: other fields of RescoreRequest: name, iterations, html, root.

    Returns:
        The summary, what changed, and as a frame the samples whose rank moved most.

    Raises:
        InputError: what is wrong with the request, the rewards or the runs.
    """
    with _rewards_file(rewards) as file:

        def body() -> "Coroutine[Any, Any, Rescoring]":
            from configs.loader import read_rewards_file
            from flows.preflight.files import check_reward_files

            sources = (runs,) if isinstance(runs, str) else runs
            given = options if file is None else {**options, "rewards": file}
            request = _request(RescoreRequest, sources, "sources", given)
            require_runs(request.sources, request.root)
            check_reward_files(read_rewards_file(request.rewards, "--rewards"))
            start_server()
            from flows.rescoring.plan import plan_rescore

            plan_rescore(request)
            from flows.rescoring.rescore import rescore as flow

            return flow(request)

        return _run(body, progress=progress)


def _run(body: Callable[[], Coroutine[Any, Any, R]], hook: "IterationHook | None" = None, *, progress: bool) -> R:
    """Run a flow in a separate context, so that listeners and hooks end with it.

    Args:
        body: checks the input and returns the flow. It may ask a person, so bars begin with the flow.
    """

    def run() -> R:
        from flows.training.hooks import use_hook

        use_hook(hook)
        with collection_paused():
            work = body()
        from flows.terminal.progress import training_progress

        with closing(work), training_progress() if progress else nullcontext():
            return _run_to_the_end(work)

    return _reporting(run, progress=progress)


def _reporting(call: Callable[[], R], *, progress: bool) -> R:
    """Call a function in a separate context, whose messages are lines on stderr."""

    def run() -> R:
        listen(Lines() if progress else Silence())
        return call()

    return contextvars.copy_context().run(run)


def read_finished(config: "RunConfig") -> "TrainSummary | None":
    """Return the summary of a run in a local folder that has nothing left to do; None if it has to be started.

    Raises:
        InputError: another process writes the run.
    """
    from tasks.runs.layout import policy_folder
    from tasks.storage.artifacts.store import open_store
    from tasks.storage.files import is_local

    # Trackers may lack iterations that the run has.
    if config.run.trackers:
        return None
    try:
        store = open_store(config.storage, config.run.name)
    except InputError:
        return None
    # Most starts end here, before anything heavy is imported.
    if not is_local(store.filesystem) or store.manifest_at(store.path(policy_folder(config.run.iterations))) is None:
        return None
    with collection_paused():
        from flows.training.summary import read_finished as read

        finished = contextvars.copy_context().run(read, config)
    if finished is not None:
        log(f"{finished.run} has finished, and its files are as they were written: nothing to do")
    return finished


def start_server() -> None:
    """Start a temporary server if none is configured, while this process imports and checks what a flow needs.

    Raises:
        InputError: nothing listens at the configured address.
    """
    from flows.server.reachable import refuse_closed_address
    from flows.server.temporary import start_temporary_server

    refuse_closed_address()
    if start_temporary_server():
        log("starting Prefect's server, and loading libraries meanwhile ...")


def _run_to_the_end(work: Coroutine[Any, Any, R]) -> R:
    from flows.server.temporary import require_not_lost, wait_for_temporary_server
    from flows.server.watched import watching_server

    wait_for_temporary_server()
    try:
        with watching_server():
            return _run_in_loop(work)
    except Exception:
        # Whatever request was the first to fail; the server is why.
        require_not_lost()
        raise


def _run_in_loop(work: Coroutine[Any, Any, R]) -> R:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        from tasks.execution.stopping import signals_raise

        with signals_raise():
            return asyncio.run(work)
    # A running loop cannot be entered again, so the flow has its own in a thread; an interrupt here cancels it.
    from anyio.from_thread import start_blocking_portal

    async def awaited() -> R:
        return await work

    with start_blocking_portal() as portal:
        future = portal.start_task_soon(awaited)
        # Not in one wait: after polars is imported, its own handler of SIGINT lets a wait for a lock go on.
        while not wait([future], timeout=0.25).done:
            pass
        return future.result()


def _request(model: type[Q], first: object, field: str, options: Mapping[str, Any]) -> Q:
    """Return the request that was given, or build one from the options of a call."""
    if isinstance(first, model):
        if options:
            raise TypeError(f"a {model.__name__} has all options; change its fields instead of {', '.join(options)}")
        return first
    given = {**options, field: first}
    if "overrides" in given:
        given["overrides"] = _texts(given["overrides"])
    return validated(model, given)


def _texts(overrides: Overrides) -> tuple[str, ...]:
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(f"{key}={yaml_value(value)}" for key, value in overrides.items())


def require_runs(sources: Sequence[str], root: str) -> "list[ArtifactStore]":
    """Find runs by name or folder; one that does not exist is refused before the models' libraries are imported."""
    from tasks.runs.lookup import find_run

    return [find_run(source, root) for source in sources]


@contextmanager
def _rewards_file(rewards: str | Path | Sequence[Mapping[str, Any]] | None) -> Iterator[str | None]:
    """Yield the path of a rewards file; a list is written to one, which the plan of the rescoring reads."""
    if rewards is None or isinstance(rewards, str | Path):
        yield None if rewards is None else str(rewards)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rewards.yaml"
        file.write_text(json.dumps({"rewards": [dict(each) for each in rewards]}))
        yield str(file)
