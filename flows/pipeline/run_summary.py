"""The figures of a run under the names that every command's `--json` uses."""

from pydantic import BaseModel


class RunSummary(BaseModel):
    """What a run has reached.

    Attributes:
        run: its name.
        iterations: updates made.
        reward_first: mean training reward of the first iteration.
        reward_last: of the last.
        heldout_before: mean held-out reward of the first policy that was evaluated; None without held-out prompts.
        heldout_after: of the last policy that was evaluated; None where no other than the first was.
        policy_digest: of the last policy's weights; None where no whole file says it.
        seconds: `total`, and by stage over all iterations as measured when each ran.
        folder: where the run is kept.
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
