"""How near a completion is to the answer that stands beside its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rapidfuzz.distance import Levenshtein

from grpo_core.errors import InputError
from grpo_core.records import Modality
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_choice

MODES = ("similarity", "exact")


@dataclass(frozen=True)
class AnswerReward(Reward):
    """1 - edit distance / length of the longer of the two (Levenshtein, 1966), or 1 for the very same and 0 otherwise.

    White space at both ends does not count.

    Attributes:
        column: the prompt file's column that holds the answer; a sample without one has no score.
        mode: ``similarity`` or ``exact``.
    """

    column: str = "answer"
    mode: str = "similarity"

    name: ClassVar[str] = "answer"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "1"

    def __post_init__(self) -> None:
        check_choice("rewards.answer.mode", self.mode, MODES)
        if not isinstance(self.column, str) or not self.column:
            raise InputError("rewards.answer.column", self.column, "Give the name of a column, as text.")

    @property
    def needs_column(self) -> str:
        """The answer's."""
        return self.column

    def settings(self) -> Mapping[str, object]:
        """Column and mode."""
        return {"column": self.column, "mode": self.mode}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; raw is the number of edits.

        Raises:
            InputError: an answer that is no text.
        """
        answers = batch.columns.get(self.column, [None] * len(batch))
        samples = zip(batch.sample_ids, batch.completions, answers, strict=True)
        return [self._score_text(sample_id, completion, answer) for sample_id, completion, answer in samples]

    def _score_text(self, sample_id: str, completion: str, answer: object) -> Score:
        if answer is None:
            return NOT_APPLICABLE
        if not isinstance(answer, str):
            hint = "Write the answer as text, in quotes."
            raise InputError(f"rewards.answer, sample {sample_id}, column {self.column}", answer, hint)
        given, wanted = completion.strip(), answer.strip()
        edits = Levenshtein.distance(given, wanted)
        if self.mode == "exact":
            return Score(float(edits == 0), float(edits))
        return Score(1.0 - edits / max(len(given), len(wanted), 1), float(edits))
