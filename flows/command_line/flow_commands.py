"""`grpo train`, `replay`, `rescore`, `evaluate` and `verify` run a flow; for scripts, each is a function too.

A function checks its input before anything heavy is imported, runs its flow to the end, also in a notebook, and returns
what the command prints as a summary. Wrong input raises InputError, before anything is written.
"""

import contextvars
import json
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.policy_name import FORM
from configs.validation import validated
from configs.yaml_files import yaml_value
from flows.command_line.options import (
    RESTART,
    Changes,
    Config,
    Json,
    Overrides,
    RunName,
    all_overrides,
    as_request,
    ask_about_change,
    handle_errors,
    is_terminal,
    override_texts,
    print_result,
    takes_request,
)
from flows.command_line.verification_commands import repeat_evaluation
from flows.requests import EvaluateRequest, RepeatRequest, ReplayRequest, RescoreRequest
from flows.run_flow import all_machines, reporting, run_flow, start_server
from grpo_core.errors import InputError
from tasks.process import collection_paused
from tasks.progress import log

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.evaluation import EvaluateSummary
    from flows.pipeline.lineage import ChangedRunError
    from flows.replaying import ReplaySummary
    from flows.rescoring.rescore import Rescoring
    from flows.training.hooks import IterationHook
    from flows.training.summary import TrainSummary

commands = typer.Typer()


@commands.command("train")
def train_command(
    config: Config,
    run: RunName = None,
    overrides: Overrides = None,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="resume with stored results that other code made, and record it")
    ] = False,
    continue_from: Annotated[
        str | None,
        typer.Option(metavar=FORM, help="train a new run from another's weights, by default the last"),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="with other settings, start over; earlier results become the run NAME~1")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start or resume a training run."""
    with handle_errors(as_json):
        chosen = [f"run.continue_from={yaml_value(continue_from)}"] if continue_from is not None else []
        chosen += [RESTART] if restart else []
        given = all_overrides(config, run, overrides, *chosen)
        ask = ask_about_change if is_terminal() else None
        summary = train(config, overrides=given, accept_code=accept_code, ask=ask)
        print_result(summary.report(), summary, as_json)


def train(
    config: "RunConfig | Mapping[str, Any] | str | Path",
    *,
    overrides: Changes = (),
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
    """
    from configs.loader import as_config
    from flows.preflight.files import check_files, refuse_missing_files
    from tasks.runs.trust import remember, uses_of

    given = as_config(config, override_texts(overrides))
    refuse_missing_files(given)
    remember(uses_of(given))

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

    with all_machines(given, progress=progress):
        if on_iteration is None:
            done = reporting(lambda: stored_summary(given), progress=progress)
            if done is not None:
                return done
        return run_flow(body, on_iteration, progress=progress)


def stored_summary(config: "RunConfig") -> "TrainSummary | None":
    """Return the summary of a run in a local folder that has nothing left to do; None if it has to be started."""
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
        from flows.training.summary import read_finished

        finished = contextvars.copy_context().run(read_finished, config)
    if finished is not None:
        log(f"{finished.run} has finished, and its files are as they were written: nothing to do")
    return finished


@commands.command("replay")
@takes_request(ReplayRequest)
def replay_command(request: ReplayRequest, as_json: Json = False) -> None:
    """Train a policy from another run's stored rollouts, off-policy corrected; no training rollouts are sampled."""
    summary = replay(request)
    print_result(summary.report(), summary, as_json)


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
        on_iteration, progress: as of :func:`train`.
        options: fields of ReplayRequest: advantages, iterations, max_staleness, name, overrides, trust_code, root.
    """
    request = as_request(ReplayRequest, source, "source", options)

    def body() -> "Coroutine[Any, Any, ReplaySummary]":
        from flows.preflight.files import check_files
        from flows.preflight.trust import requested_config

        _, config = requested_config(request, request.overrides)
        check_files(config, storage=False)
        start_server()
        from flows.replaying import plan_replay
        from flows.replaying import replay as flow

        plan_replay(request)
        return flow(request)

    return run_flow(body, on_iteration, progress=progress)


@commands.command("rescore")
@takes_request(RescoreRequest)
def rescore_command(request: RescoreRequest, as_json: Json = False) -> None:
    """Score stored rollouts with other rewards or weights and report what changed; only missing scores are computed."""
    done = rescore(request)
    print_result(done.report(), done.summary, as_json)


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
    """
    with _rewards_file(rewards) as file:
        given = options if file is None else {**options, "rewards": file}
        request = as_request(RescoreRequest, (runs,) if isinstance(runs, str) else runs, "sources", given)

        def body() -> "Coroutine[Any, Any, Rescoring]":
            from configs.loader import read_rewards_file
            from flows.preflight.files import check_reward_files
            from tasks.runs.lookup import find_run

            for source in request.sources:
                find_run(source, request.root)
            check_reward_files(read_rewards_file(request.rewards, "--rewards"))
            start_server()
            from flows.rescoring.plan import plan_rescore
            from flows.rescoring.rescore import rescore as flow

            plan_rescore(request)
            return flow(request)

        return run_flow(body, progress=progress)


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


@commands.command("evaluate")
@takes_request(EvaluateRequest)
def evaluate_command(
    request: EvaluateRequest,
    card: Annotated[
        bool, typer.Option("--card", help="RUN is an exported folder: repeat the evaluation of its card, and compare")
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a policy version on held-out prompts with fixed seeds; stored results are not computed again."""
    if card:
        if request.prompts is not None:
            raise InputError("--prompts", request.prompts, "With --card the prompts are those of the card.")
        given = {"overrides": request.overrides, "trust_code": request.trust_code}
        repeated = repeat_evaluation(validated(RepeatRequest, {"folder": request.run, **given}))
        print_result(repeated.report(), repeated, as_json)
        if not repeated.is_repeated:
            raise typer.Exit(1)
        return
    summary = evaluate(request)
    print_result(summary.report(), summary, as_json)


def evaluate(run: str | EvaluateRequest, *, progress: bool = True, **options: Any) -> "EvaluateSummary":
    """Evaluate a policy version on held-out prompts with fixed seeds; stored results are not computed again.

    Args:
        run: a run under the storage root, or the path of its folder.
        progress: as of :func:`train`.
        options: fields of EvaluateRequest: prompts, overrides, trust_code, root.
    """
    request = as_request(EvaluateRequest, run, "run", options)

    def body() -> "Coroutine[Any, Any, EvaluateSummary]":
        from flows.preflight.files import check_heldout_files
        from flows.preflight.trust import EVALUATED, requested_config

        _, config = requested_config(request, request.changes, EVALUATED)
        check_heldout_files(config)
        start_server()
        from flows.evaluation import evaluate as flow
        from flows.evaluation import plan_evaluate

        plan_evaluate(request)
        return flow(request)

    return run_flow(body, progress=progress)
