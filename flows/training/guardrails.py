"""What a run does about a sign of reward hacking: report it, end, or wait for a person in Prefect's UI."""

import json
from collections.abc import Sequence

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run

from flows.pipeline.run import Run
from flows.training.history import TrainingHistory
from tasks.progress import log
from tasks.runs.layout import SIGNS_FILE
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

_SECONDS_BETWEEN_POLLS = 5


class NotResumedError(RuntimeError):
    """Nobody resumed a paused run within its timeout."""


async def ends_at_sign(run: Run, history: TrainingHistory, policy: PolicyRef) -> bool:
    """Report guardrails that have fallen at this version, and do what `guardrails.on_fall` says.

    A run pauses when a guardrail has newly fallen. Resuming it accepts the sign, which is stored, so that a later start
    does not pause there again.

    Returns:
        Whether the run ends here.

    Raises:
        NotResumedError: nobody resumed it within `guardrails.pause_timeout`.
    """
    guardrails, version = run.config.guardrails, policy.version
    if not guardrails.rewards or history.evaluation_of(version) is None:
        return False
    for sign in history.signs:
        log(f"guardrail, policy {version}: {sign}")
    stops, resumed = history.stopped_by(run.config, version), _read_resumed(run.store)
    _write_signs(run.store, history, version, resumed, stops)
    if stops:
        log(f"stopped after iteration {version}, because guardrails.on_fall is stop")
    ask = guardrails.on_fall == "pause" and bool(history.new_signs) and version < run.config.run.iterations
    if ask and policy.digest not in resumed:
        await _wait_for_a_person(policy, guardrails.pause_timeout)
        _write_signs(run.store, history, version, [*resumed, policy.digest], stops)
    return stops


async def _wait_for_a_person(policy: PolicyRef, timeout: int) -> None:
    log(f"paused after iteration {policy.version}, for {timeout:,} s at most: resume it on its page in the UI")
    try:
        # With the key of a pause that was resumed before, a flow run that is retried goes on at once.
        await apause_flow_run(timeout=timeout, poll_interval=_SECONDS_BETWEEN_POLLS, key=policy.digest[:16])
    except FlowPauseTimeout as error:
        raise NotResumedError(
            f"nobody resumed the run within {timeout:,} s (guardrails.pause_timeout); the same command asks again, and "
            "with --set guardrails.on_fall=report it goes on"
        ) from error
    log(f"resumed after iteration {policy.version}")


def _read_resumed(store: ArtifactStore) -> list[str]:
    """Return the digests of the policies after which a person resumed the run."""
    try:
        content = json.loads(store.read_file(SIGNS_FILE) or b"{}")
        return [str(digest) for digest in content.get("resumed", [])]
    except (ValueError, AttributeError, TypeError):
        # It is damaged, and the person is asked again.
        return []


def _write_signs(
    store: ArtifactStore, history: TrainingHistory, version: int, resumed: Sequence[str], stops: bool
) -> None:
    """Store the guardrails that have fallen at a version, or that there are none, for reports and later starts."""
    content = {
        "version": version,
        "signs": [str(sign) for sign in history.signs],
        "stopped": stops,
        "resumed": list(resumed),
    }
    store.write_file(SIGNS_FILE, json.dumps(content, indent=1).encode())
