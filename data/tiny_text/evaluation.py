"""Measure a saved tiny text model on words, with the same policy as in training with rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein

from data.tiny_text.letters import answer_of, prompt_of
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained import TrainingChoice
from grpo_core.seeds import derive_seed

LONGEST_ANSWER = 24


@dataclass(frozen=True)
class TinyTextReport:
    """The quality of a tiny text model's answers, as means over answers.

    Attributes:
        temperature: of the token distribution.
        answers: number of answers measured.
        similarity: 1 - edit distance (Levenshtein, 1966) / length of the longer of the answer and the correct one.
        exact: share of correct answers.
        finished: share that was not truncated.
        mean_length: tokens, including the end token.
        similarity_group_std: Bessel-corrected standard deviation of the similarity among answers to one prompt: what a
            reward can distinguish.
    """

    temperature: float
    answers: int
    similarity: float
    exact: float
    finished: float
    mean_length: float
    similarity_group_std: float


def evaluate_tiny_text_model(
    folder: Path, words: Sequence[str], *, temperature: float, group_size: int = 4, seed: int = 0
) -> TinyTextReport:
    """Sample `group_size` answers for each word and measure them.

    Args:
        folder: a saved model with its tokenizer.
        words: usually the held-out ones of :func:`data.tiny_text.letters.split_words`.
        temperature: of the token distribution.
        group_size: answers per word, at least two.
        seed: for the tokens.
    """
    settings = CausalLMSettings(temperature=temperature, max_completion_length=LONGEST_ANSWER)
    choice, cpu = TrainingChoice(lora=None), torch.device("cpu")
    policy = CausalLMPolicy.load(str(folder), settings, choice, dtype=torch.float32, device=cpu)
    seeds = [derive_seed(seed, "tokens", row) for row in range(len(words) * group_size)]
    sampled = policy.sample([prompt_of(word) for word in words], group_size=group_size, seeds=seeds)
    answers = policy.render(sampled.tokens, noise_seeds=seeds)
    right = [answer_of(word) for word in words for _ in range(group_size)]
    pairs = list(zip(answers, right, strict=True))
    similarity = torch.tensor([Levenshtein.normalized_similarity(*pair) for pair in pairs], dtype=torch.float64)
    return TinyTextReport(
        temperature=temperature,
        answers=len(pairs),
        similarity=similarity.mean().item(),
        exact=sum(answer == wanted for answer, wanted in pairs) / len(pairs),
        finished=sampled.finished.double().mean().item(),
        mean_length=sampled.tokens.loss_mask.sum(-1).double().mean().item(),
        similarity_group_std=similarity.view(-1, group_size).std(1).mean().item(),
    )
