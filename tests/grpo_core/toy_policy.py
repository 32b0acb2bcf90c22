"""The smallest policy there is: a table of logits, whose log-probs and gradients can be worked out by hand."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_core.logprobs import entropy_of, gather_logprobs
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.microbatches import by_length
from grpo_core.policies.trained.offload import NO_OFFLOAD
from grpo_core.rollouts.actions import Sources, TokenBatch
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import (
    ActionLogprobs,
    Entropies,
    GroupRequest,
    RolloutGroup,
    SampledActions,
    SampledTokens,
    TrainingRows,
)
from grpo_core.rollouts.streams import ImageSize, Stream
from grpo_core.sampling import draw_tokens, uniform_numbers


class TablePolicy:
    """One row of logits for each prompt and place. A prompt is its row's number, written out."""

    offload = NO_OFFLOAD
    trained = SimpleNamespace(shares_prompts=False)

    def __init__(self, prompts: int, time: int = 5, support: int = 4, seed: int = 0) -> None:
        logits = torch.randn(prompts, time, support, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Parameter(logits)
        self.start = logits.clone()
        self.reference = logits.clone()
        self.seen: list[tuple[str, ...]] = []  # the prompts of every pass with gradients
        self.batches: list[tuple[tuple[str, ...], ImageSize | None]] = []  # what was sampled at once

    @property
    def max_length(self) -> int:
        return self.table.shape[1]

    def sample_with(self, settings: Any) -> None:
        """A table samples in one way."""

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _distributions(self, table: Tensor, prompts: Sequence[str], temperature: float) -> Tensor:
        return torch.log_softmax(table[[int(prompt) for prompt in prompts]] / temperature, -1)

    @property
    def components(self) -> Mapping[Stream, "TablePolicy"]:
        return {"tokens": self}

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        for request, drafts in sample_drafts(requests, self.sample_tokens):
            images = self.render(drafts.actions, noise_seeds=request.noise_seeds)
            yield RolloutGroup(request, {"tokens": drafts}, tuple(images))

    def sample_batches(self, batches: Sequence[Sequence[GroupRequest]]) -> Iterator[RolloutGroup]:
        return itertools.chain.from_iterable(map(self.sample, batches))

    @torch.no_grad()
    def sample_tokens(
        self,
        prompts: Sequence[str],
        group_size: int,
        seeds: Sequence[int],
        size: ImageSize | None = None,
        sources: Sources | None = None,
    ) -> SampledTokens:
        self.batches.append((tuple(prompts), size))
        rows = tuple(prompt for prompt in prompts for _ in range(group_size))
        distributions = self._distributions(self.table, rows, 1.0)
        uniforms = uniform_numbers(seeds, self.max_length)
        places = range(self.max_length)
        ids = torch.stack([draw_tokens(distributions[:, place], uniforms[:, place]) for place in places], 1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        finished = torch.ones(len(rows), dtype=torch.bool)
        logprobs, prompt_lengths = gather_logprobs(distributions, ids), torch.tensor([len(row) for row in rows])
        return SampledTokens(TokenBatch(rows, ids, mask, 1.0), logprobs, finished, self.max_length, prompt_lengths)

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image]:
        assert len(noise_seeds) == len(tokens)
        return [
            Image.new("RGB", (1, 1), (*ids[:2], seed % 256))
            for ids, seed in zip(tokens.token_ids.tolist(), noise_seeds, strict=True)
        ]

    def compared(self, batches: Iterable[TrainingRows], *, kl: bool) -> Iterator[tuple[TrainingRows, None]]:
        return ((batch, None) for batch in batches)

    def logprobs(self, tokens: TokenBatch, *, entropy: Entropies = "constant", others: None = None) -> ActionLogprobs:
        if torch.is_grad_enabled():
            self.seen.append(tokens.prompts)
        return self._score(self.table, tokens, entropy=entropy)

    def _score(self, table: Tensor, tokens: TokenBatch, *, entropy: Entropies) -> ActionLogprobs:
        time = tokens.token_ids.shape[1]
        distributions = self._distributions(table, tokens.prompts, tokens.temperature)[:, :time]
        scored = gather_logprobs(distributions, tokens.token_ids)
        entropies = torch.zeros_like(scored) if entropy == "none" else entropy_of(distributions)
        entropies = entropies if entropy == "differentiable" else entropies.detach()
        masked = [torch.where(tokens.loss_mask, values, 0.0) for values in (scored, entropies)]
        return ActionLogprobs(*masked, kl=torch.zeros_like(scored))

    @torch.no_grad()
    def reference_logprobs(self, tokens: TokenBatch) -> Tensor:
        return self._score(self.reference, tokens, entropy="none").logprobs

    def microbatches(self, rows: RaggedRows, indices: Sequence[int], size: int) -> list[list[int]]:
        return by_length(rows.lengths(indices), size)

    def as_reference(self) -> AbstractContextManager[Any]:
        """The reference has a table of its own."""
        return nullcontext()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {"table": self.table}

    def prepare_for_update(self, actions: Any = None) -> None:
        """A table has no modes."""

    def prepare_for_sampling(self) -> None:
        """A table has no modes."""

    def save_weights(self, folder: Path) -> None:
        save_file({"table": self.table.detach()}, folder / "table.safetensors")

    @torch.no_grad()
    def load_weights(self, folder: Path | None) -> None:
        self.table.copy_(self.start if folder is None else load_file(folder / "table.safetensors")["table"])


def sampled_rows(policy: TablePolicy, advantages: Sequence[float], *, seed: int = 0) -> TrainingRows:
    """One row a prompt, sampled by the policy, with these advantages."""
    count = len(advantages)
    prompts, seeds = [str(row) for row in range(count)], [seed + row for row in range(count)]
    return training_rows(policy.sample_tokens(prompts, group_size=1, seeds=seeds), advantages)


def training_rows(sampled: SampledActions, advantages: Sequence[float] | Tensor) -> TrainingRows:
    """What was sampled by the weights before the update, with these advantages, as samples s0, s1, ..."""
    count = len(advantages)
    return TrainingRows(
        **{field.name: getattr(sampled, field.name) for field in fields(SampledActions)},
        sample_ids=tuple(f"s{row}" for row in range(count)),
        advantages=torch.as_tensor(advantages),
        on_policy=torch.ones(count, dtype=torch.bool),
    )
