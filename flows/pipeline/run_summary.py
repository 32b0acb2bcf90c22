"""Summarize a run under the names that every command's `--json` uses."""

from pydantic import BaseModel


class RunSummary(BaseModel):
    """Rewards, time and place of a run.

    Attributes:
        run: name.
        iterations: number of policy updates.
        reward_first: mean training reward of the first iteration; None without rewards.
        reward_last: mean training reward of the last iteration; None without rewards.
        heldout_before: mean held-out reward of the first evaluated policy; None without held-out prompts.
        heldout_after: mean held-out reward of the last evaluated policy; None where only one was evaluated.
        policy_digest: of the last policy's weights; None where no valid file states it.
        seconds: `total`, and by stage over all iterations as measured when each ran.
        folder: path or URL of the run.
    """

    run: str
    iterations: int
    reward_first: float | None
    reward_last: float | None
    heldout_before: float | None
    heldout_after: float | None
    policy_digest: str | None
    seconds: dict[str, float]
    folder: str
