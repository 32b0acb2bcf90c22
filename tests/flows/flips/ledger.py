"""What was flipped and how it showed, by kind of file, as a table in markdown."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What comes of a flipped bit; each is a column of the table."""

    QUARANTINED = "named and quarantined"
    REFUSED = "named and refused"
    ANEW = "written anew by the next start"
    UNUSED = "not used"
    SAME = "means the same"
    SAME_END = "before a start that came to the same end"


@dataclass(frozen=True)
class Flip:
    """One flipped bit, by kind of file."""

    kind: str
    outcome: Outcome


_PATTERNS = {
    r"\.lock$": "lock",
    r"\.incoming/": "locks of writing",
    r"(quarantine|previous)/": "what was moved away",
    r"^\.stages/": "stage record of the root",
    r"/\.stages/": "stage record of the run",
    r"rescored/\w+/report": "report of a rescoring",
    r"\.manifest\.json$": "manifest",
    r"/part-\d+\.parquet$": "rollouts (Parquet)",
    r"/scores\.parquet$": "scores (Parquet)",
    r"/advantages\.parquet$": "advantages (Parquet)",
    r"/update_steps\.parquet$": "update steps (Parquet)",
    r"/metrics\.parquet$": "metrics (Parquet)",
    r"/adapter_model\.safetensors$": "weights of the adapter (safetensors)",
    r"/adapter_config\.json$": "adapter_config.json",
    r"/model\.safetensors$": "all weights (safetensors)",
    r"/policies/\d+/(generation_)?config\.json$": "config.json of the weights",
    r"/optimizer\.safetensors$": "optimizer state (safetensors)",
    r"/training_state\.json$": "training_state.json (schedule, randomness)",
    r"/(run\.json|config\.yaml|rewards\.yaml|contact_sheet\.png|heldout\.md)$": r"\1",
}


def kind_of(file: str) -> str:
    """The kind of a file by its path below the root; its own name where it has none."""
    for pattern, kind in _PATTERNS.items():
        if found := re.search(pattern, file):
            return found.expand(kind)
    return file.rsplit("/", 1)[-1]


def table_of(flips: Sequence[Flip]) -> str:
    """A row a kind, the number of flips of each outcome."""
    counts = Counter(flips)
    outcomes = [outcome for outcome in Outcome if any(flip.outcome is outcome for flip in flips)]
    rows = [f"| file | {' | '.join(each.value for each in outcomes)} | all |", f"|---|{'---|' * (len(outcomes) + 1)}"]
    for kind in sorted({flip.kind for flip in flips}):
        numbers = [counts[Flip(kind, outcome)] for outcome in outcomes]
        rows.append(f"| {kind} | {' | '.join(str(number or '') for number in numbers)} | {sum(numbers)} |")
    sums = [sum(flip.outcome is outcome for flip in flips) for outcome in outcomes]
    rows.append(f"| all | {' | '.join(map(str, sums))} | {sum(sums)} |")
    return "\n".join(rows) + "\n"
