"""How near a completion is to the answer given with its prompt."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from rapidfuzz.distance import Levenshtein

from grpo_core.errors import InputError
from grpo_core.modality import Modality
from grpo_core.rewards.reward import NOT_APPLICABLE, STRICT, Reward, Score, ScoringBatch, Text


@dataclass(frozen=True, config=STRICT)
class AnswerReward(Reward):
    """1 - edit distance / length of the longer of the two (Levenshtein, 1966), or 1 for the very same and 0 otherwise.

    White space at both ends does not count.

    Attributes:
        column: the prompt file's column with the answer; a sample without one has no score.
        mode: ``similarity`` or ``exact``.
    """

    column: Text = "answer"
    mode: Literal["similarity", "exact"] = "similarity"

    name: ClassVar[str] = "answer"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "1"

    @property
    def needs_column(self) -> str:
        """The answer's column."""
        return self.column

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; raw is the number of edits."""
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
