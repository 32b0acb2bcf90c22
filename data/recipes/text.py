"""A Llama of the stock transformers classes that sorts the letters of a made-up word, for one CPU core."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.recipes import trainer
from data.recipes.trainer import DATA, ProgressCallback, Quality, measure, print_progress, replace_shipped, train
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice


@dataclass(frozen=True)
class TinyTextRecipe:
    """How the tiny text model is built and trained; the same recipe gives the same weights on the same machine.

    The supervised answers are imperfect on purpose: the policy learns the task and also the slips, which
    training with rewards can then remove.

    Attributes:
        heldout_words: words that are in neither the supervised training nor the training prompts.
        swap_probability, skip_probability, repeat_probability: per letter of a supervised answer.
        context: ids that the model can read and write.
    """

    seed: int = 0
    heldout_words: int = 256
    corpus_size: int = 32768
    swap_probability: float = 0.22
    skip_probability: float = 0.12
    repeat_probability: float = 0.12
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 192
    context: int = 512
    initializer_range: float = 0.05
    steps: int = 1200
    batch: int = 64
    learning_rate: float = 4e-3
    train_prompts: int = 256
    heldout_prompts: int = 32


_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SHORTEST, _LONGEST = 3, 8
INSTRUCTION = "sort the letters of"


def prompt_of(word: str) -> str:
    """Return the prompt, for example "sort the letters of tomato"."""
    return f"{INSTRUCTION} {word}"


def answer_of(word: str) -> str:
    """Return the correct answer, for example "amoott"."""
    return "".join(sorted(word))


def draw_words(count: int, rng: np.random.Generator, *, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Draw distinct words of three to eight alternating consonants and vowels, none of them in `without`."""
    seen = set(without)
    words: list[str] = []
    while len(words) < count:
        word = _draw_word(rng)
        if word not in seen:
            seen.add(word)
            words.append(word)
    return tuple(words)


def _draw_word(rng: np.random.Generator) -> str:
    first = int(rng.integers(2))
    kinds = [(_CONSONANTS, _VOWELS)[(first + place) % 2] for place in range(rng.integers(_SHORTEST, _LONGEST + 1))]
    return "".join(letters[rng.integers(len(letters))] for letters in kinds)


def split_words(seed: int, *, train: int, heldout: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return words for training and held-out words; the held-out ones do not depend on the number of others."""
    unseen = draw_words(heldout, np.random.default_rng([seed, 1]))
    return draw_words(train, np.random.default_rng([seed, 2]), without=unseen), unseen


TRAIN_FILE = "letters_train.jsonl"
HELDOUT_FILE = "letters_heldout.jsonl"


def write_prompt_files(recipe: TinyTextRecipe, folder: Path) -> None:
    """Write one JSON object per word, with the columns prompt, answer and word."""
    folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words)
    for name, words in ((TRAIN_FILE, seen), (HELDOUT_FILE, unseen[: recipe.heldout_prompts])):
        rows = ({"prompt": prompt_of(word), "answer": answer_of(word), "word": word} for word in words)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


_SYSTEM, _USER, _ASSISTANT, _END, _PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '" + _END + "' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + _ASSISTANT + "' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: a word of the instruction is one id, so that each letter of the word to sort is one too."""
    specials = [_PAD, _SYSTEM, _USER, _ASSISTANT, _END]
    built = trainer.build_tokenizer(INSTRUCTION.split(), specials, eos_token=_END, pad_token=_PAD)
    built.chat_template = _CHAT_TEMPLATE
    return built


def build_model(recipe: TinyTextRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama with random weights from the recipe's seed; global random state does not change."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config).eval()


def save_tiny_text_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save model and tokenizer; `AutoModelForCausalLM.from_pretrained(folder)` loads it without this project."""
    # Its progress bars would break ours.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 saves a class name that transformers 4 does not know; both know the previous one.
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Corpus:
    """Conversations as ids, int64 [conversations, time], padded on the right, and which belong to answers."""

    ids: Tensor
    trained: Tensor


def draw_corpus(tokenizer: PreTrainedTokenizerFast, recipe: TinyTextRecipe) -> Corpus:
    """Draw `recipe.corpus_size` answers, one per prompt, with slips at the recipe's rates."""
    words, _ = split_words(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_words)
    rng = np.random.default_rng([recipe.seed, 3])
    rows = [encode_answer(tokenizer, word, draw_answer(word, recipe, rng)) for word in words]
    time = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), time), tokenizer.pad_token_id)
    trained = torch.zeros(len(rows), time, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        trained[row, len(prompt) : end] = True
    return Corpus(ids, trained)


def encode_answer(tokenizer: PreTrainedTokenizerFast, word: str, answer: str) -> tuple[list[int], list[int]]:
    """Encode the prompt about a word, and an answer with its end token."""
    messages = [{"role": "user", "content": prompt_of(word)}]
    requested = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt: list[int] = tokenizer.encode(requested, add_special_tokens=False)
    written: list[int] = tokenizer.encode(answer, add_special_tokens=False)
    return prompt, [*written, tokenizer.eos_token_id]


def draw_answer(word: str, recipe: TinyTextRecipe, rng: np.random.Generator) -> str:
    """Sort the letters with slips: a letter is replaced, missing, or repeated."""
    swap, skip, repeat = recipe.swap_probability, recipe.skip_probability, recipe.repeat_probability
    written = []
    for letter in answer_of(word):
        chance = rng.random()
        if chance < swap:
            written.append(_ALPHABET[rng.integers(len(_ALPHABET))])
        elif chance >= swap + skip:
            written.append(letter * (2 if chance < swap + skip + repeat else 1))
    return "".join(written)


def answer_loss(model: LlamaForCausalLM, corpus: Corpus, rows: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the answers' tokens in these rows, in nats, as a scalar tensor."""
    ids, trained = corpus.ids[rows], corpus.trained[rows, 1:]
    # Padding is on the right, where a causal model's earlier positions do not see it.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits[trained], ids[:, 1:][trained])


def train_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: TinyTextRecipe,
    on_step: ProgressCallback | None = None,
) -> float:
    """Train `model` in place on the recipe's corpus; return the loss of the last steps, nats per token."""
    corpus = draw_corpus(tokenizer, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (recipe.batch,), generator=generator)
        return answer_loss(model, corpus, rows)

    return train(model, model.parameters(), recipe.learning_rate, recipe.steps, loss, on_step)


_LONGEST_ANSWER = 24


def measure_saved(folder: Path, words: Sequence[str], temperature: float) -> Quality:
    """Measure the share of exact answers about these words, with the policy of training with rewards."""
    settings = CausalLMSettings(temperature=temperature, max_completion_length=_LONGEST_ANSWER)
    policy = CausalLMPolicy.load(str(folder), settings, {"tokens": TrainingChoice(lora=None)})
    return measure(policy, [prompt_of(word) for word in words], "answer", answer=[answer_of(word) for word in words])


def make() -> None:
    """Make the tiny text model and its prompt files; it has never seen the held-out words."""
    recipe, tokenizer = TinyTextRecipe(), build_tokenizer()
    _, unseen = split_words(recipe.seed, train=0, heldout=recipe.heldout_words)
    model = build_model(recipe, tokenizer)
    replace_shipped(
        "tiny-text",
        recipe,
        ("torch", "transformers", "tokenizers", "numpy"),
        lambda: {"final_loss": train_model(model, tokenizer, recipe, print_progress("train text model"))},
        lambda folder: save_tiny_text_model(model, tokenizer, folder),
        lambda folder: {f"temperature {warm}": measure_saved(folder, unseen, warm) for warm in (1.0, 0.1)},
    )
    write_prompt_files(recipe, DATA / "prompts")
