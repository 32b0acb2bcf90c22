"""A language model with one number as its output, trained to rate completions.

Ouyang et al., 2022, "Training language models to follow instructions with human feedback" (arXiv:2203.02155),
section 3.5: r(x, y), one scalar of prompt and completion, at the last token. Rendered and tokenized as TRL 1.16's
GRPOTrainer does for a reward model.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from grpo_core.errors import InputError
from grpo_core.rewards.model_reward import (
    ModelReward,
    Placed,
    Sha256,
    batched,
    exact_inference,
    load_model,
    load_once,
    load_tokenizer,
)
from grpo_core.rewards.reward import STRICT, Needs
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.weights import Published, Weights
from grpo_core.rollouts.messages import Message, read_messages
from grpo_core.uses import Uses

_PLACE = "rewards.reward_model.model"
_PUBLISHED = Published("its authors", note="for example Skywork/Skywork-Reward-V2-Qwen3-0.6B")
_UNBOUNDED = 10**9
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_NEEDS_TEMPLATE = (
    "The prompts are conversations, and the reward model's tokenizer has no chat template. Give another one."
)


@dataclass(frozen=True, config=STRICT)
class RewardModelReward(ModelReward):
    """Raw is the model's output (a logit), the value the same or its sigmoid.

    A tokenizer with a chat template gets prompt and completion as messages; another one gets both texts one after the
    other. Special tokens are those of the template only.

    Attributes:
        model: folder of a sequence classification model with one label and its tokenizer, or ``owner/repo[@revision]``
            on the Hub.
        model_sha256: digest over the model's files that it must have, complete or its first 8 digits or more.
        scale: ``none``, unbounded, or ``sigmoid``, in (0, 1).
        max_length: of prompt and completion in tokens, of which the beginning is left out if it is longer; by default
            what the model has positions for.
    """

    model: Annotated[str | None, Uses.PLACE] = None
    model_sha256: Sha256 | None = None
    scale: Literal["none", "sigmoid"] = "none"
    max_length: Annotated[int, Field(ge=1, le=10_000_000)] | None = None

    name: ClassVar[str] = "reward_model"
    version: ClassVar[str] = "2"
    needs: ClassVar[Needs] = Needs(("text",))
    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "model", "model_sha256"})

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the model; chat template and tokenizer are among its files."""
        return {"model": Weights(_PLACE, self.model, self.model_sha256, _PUBLISHED)}

    def check_prompt(self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]], prompt: str = "") -> None:
        """Refuse a conversation if the tokenizer has no chat template; what else it lacks, `preflight` reports."""
        if read_messages(prompt) is not None and not _has_template(self.weight_sources()["model"]):
            raise InputError("prompt", prompt, _NEEDS_TEMPLATE)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the model."""
        scorer = load_scorer(self.weight_sources()["model"], self.runs_on)
        logits = scorer.logits(batch.prompts, batch.completions, self.max_length, self.batch_size)
        return [Score(logit if self.scale == "none" else _sigmoid(logit), logit) for logit in logits]


@plain_dataclass(frozen=True)
class RewardModelScorer:
    """A reward model, logits [N, 1] for token ids [N, T], and its tokenizer; `positions` None without a bound."""

    network: nn.Module
    tokenizer: Any
    positions: int | None
    placed: Placed

    def logits(
        self, prompts: Sequence[str], completions: Sequence[str], max_length: int | None = None, batch_size: int = 1
    ) -> list[float]:
        """Return the model's output for each prompt and completion.

        Texts of about one length share a pass. InputError, for more than one a pass, for a model whose output for a
        text depends on what it is padded with.
        """
        limit = min((n for n in (max_length, self.positions) if n is not None), default=_UNBOUNDED)
        pairs = zip(prompts, completions, strict=True)
        rows = [self.token_ids(*pair)[-limit:] for pair in pairs]
        if batch_size > 1 and self.moved_by_padding:
            hint = "It has another output for a text beside a longer one than for the text alone. Leave it out."
            raise InputError("rewards.reward_model.batch_size", batch_size, hint)
        found: dict[int, float] = {}
        for together in batched(sorted(range(len(rows)), key=lambda row: len(rows[row])), batch_size):
            found |= zip(together, self.pass_over([rows[row] for row in together]), strict=True)
        return [found[row] for row in range(len(rows))]

    def pass_over(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the output for each row of token ids, from one pass."""
        with exact_inference(self.placed.device):
            # On the right, where what reads from left to right does not see it and positions are those of the text.
            padding = self.tokenizer.pad_token_id or 0
            ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            given = {"input_ids": ids.to(self.placed.device), "attention_mask": mask.to(self.placed.device)}
            logits: list[float] = self.network(**given).logits[:, 0].float().tolist()
        return logits

    @functools.cached_property
    def moved_by_padding(self) -> bool:
        """Whether the output for a text beside a longer one is another than alone, beyond rounding."""
        short, long = (self.token_ids("1 + 1 =", text) for text in ("2", "2, as everybody can see"))
        (alone,), (beside, _) = self.pass_over([short]), self.pass_over([short, long])
        return abs(beside - alone) > _ROUNDING[self.placed.dtype] * max(1.0, abs(alone))

    def token_ids(self, prompt: str, completion: str) -> list[int]:
        """Tokenize prompt and completion, into at least one token."""
        messages = read_messages(prompt)
        if self.tokenizer.chat_template is not None:
            text = self._render(messages or [{"role": "user", "content": prompt}], completion)
        elif messages is None:
            text = prompt + completion
        else:
            raise InputError(_PLACE, self.tokenizer.name_or_path, _NEEDS_TEMPLATE)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # An empty text is judged as the end of a text.
        return ids or [self.tokenizer.eos_token_id or self.tokenizer.pad_token_id or 0]

    def _render(self, messages: Sequence[Message], completion: str) -> str:
        from jinja2 import TemplateError

        from grpo_core.rollouts.messages import render_messages

        try:
            return render_messages(self.tokenizer, [*messages, {"role": "assistant", "content": completion}])
        except (TemplateError, ValueError, TypeError) as error:
            hint = f"The tokenizer's chat template refuses a question and its answer ({error}). Give another model."
            raise InputError(_PLACE, self.tokenizer.name_or_path, hint) from error


@functools.lru_cache(maxsize=4)
def _has_template(weights: Weights) -> bool:
    try:
        return load_tokenizer(weights).chat_template is not None
    except InputError:
        return True


@load_once
def load_scorer(weights: Weights, placed: Placed) -> RewardModelScorer:
    """Load the model and its tokenizer; InputError for another kind of model."""
    # Imported where it is used: the import takes longer than reading a configuration, which only needs the names.
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(weights)
    network = load_model(weights, AutoModelForSequenceClassification, num_labels=1)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    config: Any = network.config
    text_config = config.get_text_config()
    # The model answers at the last token that is none of padding, so the two must mean the same one.
    text_config.pad_token_id = tokenizer.pad_token_id
    # Where padding takes some positions, as in RoBERTa, only the tokenizer has the length; without a bound it is 1e30.
    positions = min(getattr(text_config, "max_position_embeddings", None) or _UNBOUNDED, tokenizer.model_max_length)
    network = network.to(placed.device, placed.dtype)
    return RewardModelScorer(network, tokenizer, positions if positions < _UNBOUNDED else None, placed)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    odds = math.exp(logit)
    return odds / (1.0 + odds)
