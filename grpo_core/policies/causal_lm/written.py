"""The tokens of a batch of completions while they are sampled, and where each ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.ends import StopTexts
from grpo_core.rollouts.actions import Sources, TokenBatch
from grpo_core.rollouts.records import SampledTokens
from grpo_core.sampling import SupportRecorder, draw_tokens, truncate
from grpo_core.settings import Truncation


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is sampled from logits, and when to stop.

    Attributes:
        vocabulary: ids [0, vocabulary) can be sampled, except the forbidden ones.
        ends: ids that end a row; they are sampled and trained as any other.
        stops: texts that end a row; None: there are none.
        max_tokens: of a row.
        width: number of ids that the model has logits for; 0: as many as `vocabulary`.
    """

    vocabulary: int
    temperature: float
    truncation: Truncation
    ends: tuple[int, ...]
    stops: StopTexts | None
    max_tokens: int
    forbidden: Int[Tensor, " forbidden"] | None = None
    width: int = 0

    @property
    def can_end(self) -> bool:
        """Whether a row can end before its last token."""
        return bool(self.ends or self.stops)

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """The ids that the model has logits for and that cannot be sampled."""
        forbidden = () if self.forbidden is None else self.forbidden.tolist()
        return (*forbidden, *range(self.vocabulary, self.width))


class Written:
    """The tokens of all rows so far; the model reads those of `rows`, some of which may have ended.

    Stop texts and the ids that could be chosen are found by `look`, in the tokens since the last look.
    """

    def __init__(
        self,
        rows: int,
        rule: SamplingRule,
        uniforms: Float[Tensor, "batch time"],
        device: torch.device,
        tokens_per_look: int,
    ) -> None:
        self.rule, self.uniforms = rule, uniforms.to(device)
        self.ids = torch.zeros(rows, rule.max_tokens, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, rule.max_tokens, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(rows, rule.max_tokens, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(rule.ends, dtype=torch.long, device=device)
        self.recorder = SupportRecorder(rows) if rule.truncation.truncates else None
        recorded = rows if rule.truncation.truncates else 0
        self.possible = torch.empty(recorded, tokens_per_look, rule.vocabulary, dtype=torch.bool, device=device)
        self.looked_at = 0
        self.numbers = list(range(rows))  # of `rows`
        self.written: list[list[int]] = [[] for _ in range(rows)]  # only for stop texts

    def add(self, index: int, logits: Float[Tensor, "rows ids"]) -> None:
        """Sample the token at this index of each row, from the logits that predict it."""
        rule, rows = self.rule, self.rows
        distribution = truncate(
            vocabulary_logprobs(logits, rule.vocabulary, rule.temperature, rule.forbidden), rule.truncation
        )
        sampled = draw_tokens(distribution, self.uniforms[rows, index])
        if self.recorder is not None:
            # NaN stays: such a distribution was not cut, and its log-prob is refused by name later.
            torch.ne(distribution, -torch.inf, out=self.possible[: len(rows), index - self.looked_at])
        self.ids[rows, index] = torch.where(self.active, sampled, 0)
        self.logprobs[rows, index] = torch.where(self.active, gather_logprobs(distribution, sampled), 0.0)
        self.mask[rows, index] = self.active
        self.active = self.active & ~torch.isin(sampled, self.ends)
        self.finished[rows] = ~self.active

    def look(self, time: int) -> None:
        """End rows at the stop texts in their first `time` tokens, and record the ids that could be chosen."""
        new = slice(self.looked_at, time)
        self.looked_at = time
        if self.rule.stops:
            self._stop(self.rule.stops, new)
        if self.recorder is not None:
            possible = self.possible[: len(self.rows), : new.stop - new.start]
            self.recorder.add(possible.logical_and_(self.mask[self.rows, new].unsqueeze(-1)), self.numbers)

    def read(self, index: int) -> Int[Tensor, " rows"]:
        """Return the ids at this index that the model reads."""
        return self.ids[:, index] if len(self.rows) == len(self.ids) else self.ids[self.rows, index]

    def keep(self, places: Int[Tensor, " kept"]) -> None:
        """Leave the other rows as they are."""
        self.rows, self.active = self.rows[places], self.active[places]
        self.numbers = self.rows.tolist()

    def _stop(self, stops: StopTexts, new: slice) -> None:
        ids, mask = torch.stack([self.ids[self.rows, new], self.mask[self.rows, new].long()]).tolist()
        ends = [
            self._end(stops, self.written[number], tokens[: sum(written)])
            for number, tokens, written in zip(self.numbers, ids, mask, strict=True)
        ]
        if all(end is None for end in ends):
            return
        device, time = self.rows.device, new.stop - new.start
        limits = torch.tensor([time if end is None else end for end in ends], device=device)
        after = torch.arange(time, device=device) >= limits.unsqueeze(-1)
        for values in (self.ids, self.mask, self.logprobs):
            values[self.rows, new] = values[self.rows, new].masked_fill(after, 0)
        self.active = self.active & torch.tensor([end is None for end in ends], device=device)
        self.finished[self.rows] = ~self.active

    @staticmethod
    def _end(stops: StopTexts, written: list[int], new: Sequence[int]) -> int | None:
        """Add the new ids to those of a row, up to the one that completes a stop text; return the number of these."""
        for count, token in enumerate(new, start=1):
            written.append(token)
            if stops.completed(written):
                return count
        return None

    def sampled(
        self, prompts: tuple[str, ...], sources: Sources | None, prompt_lengths: Int[Tensor, " rows"]
    ) -> SampledTokens:
        """Return the tokens up to the last of all rows, on the CPU; ids and log-probs after the end of one are zero."""
        mask = self.mask.cpu()
        time = int(mask.any(0).sum())
        ids, logprobs, finished = self.ids[:, :time].cpu(), self.logprobs[:, :time].cpu(), self.finished.cpu()
        support = None if self.recorder is None else self.recorder.support(time)
        tokens = TokenBatch(prompts, ids, mask[:, :time], self.rule.temperature, support, sources=sources)
        return SampledTokens(tokens, logprobs, finished, self.rule.max_tokens, prompt_lengths.cpu())
