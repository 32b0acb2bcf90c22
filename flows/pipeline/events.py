"""Events on Prefect's server, for automations to react to: an evaluation has ended, a guardrail has fallen.

The resource of both is `grpo.run.NAME`; Prefect adds the flow run, its deployment and its tags as related resources. An
event is sent once, when its policy version is evaluated; a run that was killed at that moment sends it again.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from prefect.events import emit_event

from grpo_core.rewards.hacking import HackingSign
from tasks.runs.records import StoredEvaluation
from tasks.storage.artifacts.reference import PolicyRef

EVALUATED, HACKING_SIGN = "grpo.evaluated", "grpo.hacking-sign"


def emit_evaluated(run: str, policy: PolicyRef, done: StoredEvaluation) -> None:
    """Report the means of an evaluation: held-out reward, rewards, guardrails; null where no sample has a score."""
    figures = {
        "heldout_reward": done.advantages.metrics.get("reward"),
        "rewards": {label: scores.metrics.get(f"rewards/{label}/mean") for label, scores in done.rewards.items()},
        "guardrails": {label: scores.metrics.get(f"rewards/{label}/mean") for label, scores in done.guardrails.items()},
        "samples": done.rollouts.rows,
    }
    _emit(EVALUATED, run, policy, figures)


def emit_hacking_sign(run: str, policy: PolicyRef, sign: HackingSign) -> None:
    """Report a guardrail that has fallen while the reward rose: its levels, and the sign in words."""
    _emit(HACKING_SIGN, run, policy, {**asdict(sign), "message": str(sign)})


def _emit(event: str, run: str, policy: PolicyRef, figures: Mapping[str, Any]) -> None:
    resource = {"prefect.resource.id": f"grpo.run.{run}", "prefect.resource.name": run}
    described = {"run": run, "policy": policy.version, "policy_digest": policy.digest}
    emit_event(event, resource=resource, payload={**described, **figures})
