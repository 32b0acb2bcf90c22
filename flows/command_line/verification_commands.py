"""`grpo verify` and `grpo evaluate EXPORT --card` compute again what is stored or exported; for scripts, functions too.

They check their input and report as the functions of flow_commands do.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flows.command_line.options import Json, as_request, print_result, takes_request
from flows.requests import RepeatRequest, VerifyRequest
from flows.run_flow import run_flow, start_server

if TYPE_CHECKING:
    from tasks.verification.records import VerificationReport
    from tasks.verification.repeated import RepeatedEvaluation

commands = typer.Typer()


@commands.command("verify")
@takes_request(VerifyRequest)
def verify_command(request: VerifyRequest, as_json: Json = False) -> None:
    """Compute stored stages again, and compare; exit code 1: something differs, 2: nothing could be tried."""
    found = verify(request)
    from tasks.verification.card import verdict, verification_report

    print_result(verification_report(found, title=verdict(found)), found, as_json)
    raise typer.Exit(found.exit_code)


def verify(run: "str | VerifyRequest", *, progress: bool = True, **options: Any) -> "VerificationReport":
    """Compute stored stages again from their stored inputs, and compare; the run is not changed.

    Args:
        run: a run under the storage root, or the path of its folder.
        progress: as of :func:`train`.
        options: fields of VerifyRequest: iterations, stages, tolerance, seed, overrides, trust_code, root.
    """
    request = as_request(VerifyRequest, run, "run", options)

    def body() -> "Coroutine[Any, Any, VerificationReport]":
        from flows.verification.choice import check_options
        from tasks.runs.lookup import find_run

        check_options(request)
        find_run(request.run, request.root)
        start_server()
        from flows.verification.opened import plan_verify
        from flows.verification.verify import verify as flow

        plan_verify(request)
        return flow(request)

    return run_flow(body, progress=progress)


def repeat_evaluation(folder: str | RepeatRequest, *, progress: bool = True, **options: Any) -> "RepeatedEvaluation":
    """Repeat the evaluation of an exported policy from its folder alone, and compare it with the folder's card.

    Args:
        folder: a folder of `grpo export`.
        progress: as of :func:`train`.
        options: fields of RepeatRequest: overrides, trust_code.

    Returns:
        Each score as the card states it and as computed here, and at which level they agree.

    Raises:
        InputError: it cannot be tried: the card, the base, a prompt's image or a reward is missing or not trusted.
    """
    request = as_request(RepeatRequest, folder, "folder", options)

    def body() -> "Coroutine[Any, Any, RepeatedEvaluation]":
        from flows.export.card_request import card_config, read_request

        card_config(read_request(request), request, Path("runs"))
        start_server()
        from flows.verification.repeated_evaluation import repeat_evaluation as flow

        return flow(request)

    return run_flow(body, progress=progress)
