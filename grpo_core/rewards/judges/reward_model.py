"""A language model with one number as its output, trained to tell how good a completion is.

Ouyang et al., 2022, "Training language models to follow instructions with human feedback" (arXiv:2203.02155),
section 3.5: r(x, y), one scalar of prompt and completion, at the last token. Rendered and tokenized as TRL 1.16's
GRPOTrainer does for a reward model.
"""

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from grpo_core.errors import InputError
from grpo_core.records import Modality
from grpo_core.rewards.devices import check_device_setting, exact_inference, find_device_problem
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_choice, check_integer
from grpo_core.rewards.weights.files import check_digest_setting
from grpo_core.rewards.weights.models import (
    find_model_problem,
    load_pretrained,
    load_tokenizer,
    model_folder,
    model_sha256,
)

_PLACE = "rewards.reward_model.model"
_EXAMPLE = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
SCALES = ("none", "sigmoid")
_UNBOUNDED = 10**9


@dataclass(frozen=True)
class RewardModelReward(Reward):
    """Raw is the model's output (a logit), the value the same or its sigmoid.

    A tokenizer with a chat template gets the prompt as the user's message and the completion as the assistant's,
    another one both texts one after the other; special tokens are those of the template only.

    Attributes:
        model: folder of a sequence classification model with one label and its tokenizer, or ``owner/repo[@revision]``
            on the Hub.
        model_sha256: digest over the model's files that it must have, whole or its first 8 digits or more.
        scale: ``none``, unbounded, or ``sigmoid``, in (0, 1).
        max_length: of prompt and completion in tokens; by default what the model has positions for. Of a longer text
            the beginning is left out, since the model answers at the last token.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: str | None = None
    model_sha256: str | None = None
    scale: str = "none"
    max_length: int | None = None
    device: str = "cpu"

    name: ClassVar[str] = "reward_model"
    version: ClassVar[str] = "1"
    media: ClassVar[tuple[Modality, ...]] = ("text",)

    def __post_init__(self) -> None:
        if self.model is not None and not (isinstance(self.model, str) and self.model.strip()):
            raise InputError(_PLACE, self.model, f"Set a folder, or a name on the Hub such as {_EXAMPLE}.")
        check_digest_setting(f"{_PLACE}_sha256", self.model_sha256)
        check_choice("rewards.reward_model.scale", self.scale, SCALES)
        if self.max_length is not None:
            check_integer("rewards.reward_model.max_length", self.max_length, 1, 10_000_000)
        check_device_setting("rewards.reward_model.device", self.device)

    def settings(self) -> Mapping[str, object]:
        """Scale and length."""
        return {"scale": self.scale, "max_length": self.max_length}

    def weight_digests(self) -> Mapping[str, str]:
        """The model's, over its files; chat template and tokenizer are among them."""
        return {"model": model_sha256(self._folder(), _PLACE)}

    def preflight(self) -> Sequence[str]:
        """A missing or wrong model, a device that is not there."""
        problems = (
            find_model_problem(_PLACE, self.model, self.model_sha256, _EXAMPLE),
            find_device_problem("rewards.reward_model.device", self.device),
        )
        return [str(problem) for problem in problems if problem is not None]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the model.

        Raises:
            InputError: a missing, wrong or broken model; a chat template that refuses a conversation of two messages.
        """
        folder = self._folder()
        scorer = load_scorer(folder, model_sha256(folder, _PLACE), self.device)
        # One at a time: padding and the batch that a matrix product runs in change its last bits.
        pairs = zip(batch.prompts, batch.completions, strict=True)
        return [self._score(scorer.logit(*pair, self.max_length)) for pair in pairs]

    def _score(self, logit: float) -> Score:
        return Score(logit if self.scale == "none" else _sigmoid(logit), logit)

    def _folder(self) -> str:
        return str(model_folder(_PLACE, self.model, self.model_sha256, _EXAMPLE))


@dataclass(frozen=True)
class RewardModelScorer:
    """A reward model and its tokenizer.

    Attributes:
        network: gives logits of shape [1, 1] for token ids of shape [1, T].
        tokenizer: as transformers loads it.
        positions: how many tokens the model has positions for; None where nothing bounds them.
        device: where the network is.
    """

    network: nn.Module
    tokenizer: Any
    positions: int | None
    device: str

    def logit(self, prompt: str, completion: str, max_length: int | None = None) -> float:
        """The model's output for one prompt and completion.

        Raises:
            InputError: the chat template refuses them.
        """
        ids = self.token_ids(prompt, completion)
        limit = min((n for n in (max_length, self.positions) if n is not None), default=len(ids))
        with exact_inference(self.device):
            tokens = torch.tensor([ids[-limit:]], device=self.device)
            logits = self.network(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        return float(logits[0, 0].float())

    def token_ids(self, prompt: str, completion: str) -> list[int]:
        """The tokens of prompt and completion, at least one.

        Raises:
            InputError: the chat template refuses them.
        """
        text = prompt + completion
        if self.tokenizer.chat_template is not None:
            text = self._render(prompt, completion)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # Nothing at all is judged as the end of a text.
        return ids or [self.tokenizer.eos_token_id or self.tokenizer.pad_token_id or 0]

    def _render(self, prompt: str, completion: str) -> str:
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        try:
            rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError as error:
            hint = f"The tokenizer's chat template refuses a question and its answer ({error}). Give another model."
            raise InputError(_PLACE, self.tokenizer.name_or_path, hint) from error
        return rendered


def load_scorer(folder: str, sha256: str, device: str) -> RewardModelScorer:
    """The model of this folder, in fp32; loaded once a process for each digest and device.

    Raises:
        InputError: the folder holds no sequence classification model with one label, or no tokenizer.
    """
    with _LOADING:
        return _load_scorer(folder, sha256, device)


_LOADING = threading.Lock()


@functools.lru_cache(maxsize=2)
def _load_scorer(folder: str, sha256: str, device: str) -> RewardModelScorer:
    # Imported where it is used: the import takes longer than reading a configuration, which only needs the names.
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(_PLACE, folder)
    network = load_pretrained(_PLACE, folder, AutoModelForSequenceClassification, num_labels=1)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    config: Any = network.config
    text_config = config.get_text_config()
    # The model answers at the last token that is none of padding, so the two must mean the same one.
    text_config.pad_token_id = tokenizer.pad_token_id
    # Where padding takes some positions, as in RoBERTa, only the tokenizer tells; without a bound it tells 1e30.
    positions = min(getattr(text_config, "max_position_embeddings", None) or _UNBOUNDED, tokenizer.model_max_length)
    return RewardModelScorer(network.to(device), tokenizer, positions if positions < _UNBOUNDED else None, device)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    odds = math.exp(logit)
    return odds / (1.0 + odds)
