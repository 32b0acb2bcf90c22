"""What the recipes share: the supervised training, a model's quality, and how it replaces the shipped one."""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from grpo_core.errors import NonFiniteError
from grpo_core.policies.protocol import Policy
from grpo_core.rewards.registry import build_reward
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.records import GroupRequest
from grpo_core.seeds import derive_seed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DATA = Path(__file__).parents[1]
RECIPE_FILE = "recipe.json"
_LINES = 20
_WARMUP = 0.05
_FLOOR = 0.02
_MAX_GRAD_NORM = 1.0

# Called after each step with (steps done, total steps, loss of this step).
ProgressCallback = Callable[[int, int, float], None]


def build_tokenizer(
    words: Iterable[str], specials: Sequence[str], first: Sequence[str] = (), **options: Any
) -> PreTrainedTokenizerFast:
    """Build a tokenizer to which a word, with or without the space before it, is one id and any other its UTF-8 bytes.

    Any text has ids, and none is unknown; pads are on the left.

    Args:
        specials: the last ids.
        first: the first ids; those that `options` name as the start and the end of a text are special too.
        options: of PreTrainedTokenizerFast.
    """
    # Byte-level pre-tokenisation writes the space before a word as this letter, part of the word.
    known = sorted({spaced for word in words for spaced in (word, "\u0120" + word) if len(spaced) > 1})
    entries = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *known, *specials]
    # ignore_merges: a word that is an entry is one id, without the merges that would build it from bytes.
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [options[name] for name in ("bos_token", "eos_token") if options.get(name) in first]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*specials, *marks]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **options)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a linear warm-up over the first twentieth, then a cosine down to 1/50 of the peak; `step` is from 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    steps: int,
    loss_of_next_batch: Callable[[], Tensor],
    on_step: ProgressCallback | None,
) -> float:
    """Train in place by AdamW with clipped gradients, and return the mean loss over the last twentieth of the steps."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    losses: list[float] = []
    model.train()
    for step in range(steps):
        loss = loss_of_next_batch()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NonFiniteError("supervised loss", [], "Lower the recipe's learning rate.")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, _MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    return sum(tail) / len(tail)


def print_progress(stage: str) -> ProgressCallback:
    """Return a callback that prints some of the steps of a stage, each with its loss."""

    def report(step: int, total: int, loss: float) -> None:
        if step % max(1, total // _LINES) == 0 or step == total:
            print(f"{stage}: {step}/{total}, loss {loss:.4f}", file=sys.stderr, flush=True)

    return report


@dataclass(frozen=True)
class Quality:
    """What a reward says of a model's samples.

    Attributes:
        reward: their mean reward; a sample to which it does not apply counts as 0.
        group_std: mean of the Bessel-corrected standard deviations of each prompt's samples: what training with the
            reward can distinguish.
    """

    samples: int
    reward: float
    group_std: float


def measure(
    policy: Policy,
    prompts: Sequence[str],
    reward: str,
    *,
    sources: Sequence[Sequence[SourceImage]] | None = None,
    group_size: int = 4,
    **columns: Sequence[Any],
) -> Quality:
    """Sample each prompt `group_size` times, with fixed seeds, and score the samples with a registered reward.

    Args:
        sources: images in each prompt.
        columns: what the reward compares with, an entry for each prompt: targets, or columns of the prompt file.
    """
    requests = []
    for place, prompt in enumerate(prompts):
        rows = range(place * group_size, (place + 1) * group_size)
        requests.append(
            GroupRequest(
                prompt,
                sample_ids=tuple(str(row) for row in rows),
                seeds=tuple(derive_seed(0, "tokens", row) for row in rows),
                noise_seeds=tuple(derive_seed(0, "noise", row) for row in rows),
                sources=tuple(sources[place]) if sources else (),
            )
        )
    outputs = [output for group in policy.sample(requests) for output in group.outputs]
    repeated = {name: [value for value in values for _ in range(group_size)] for name, values in columns.items()}
    scorer: Any = build_reward(reward)
    scores = torch.tensor([score.value or 0.0 for score in scorer(outputs, **repeated)])
    return Quality(len(scores), scores.mean().item(), scores.view(-1, group_size).std(1).mean().item())


def replace_shipped(
    name: str,
    recipe: "DataclassInstance",
    libraries: Sequence[str],
    train: Callable[[], Mapping[str, object]],
    save: Callable[[Path], object],
    measured: Callable[[Path], Mapping[str, Quality]],
) -> None:
    """Train a model, save it with its recipe, and replace the shipped one once the new one is complete.

    Args:
        name: folder below data/models.
        libraries: those whose versions affect the result.
        train: changes the model in place and returns what was measured on the way.
        measured: loads the saved model as a user would, and measures it on what it has never seen.
    """
    started, models = time.perf_counter(), DATA / "models"
    reached = {**train(), "train_seconds": round(time.perf_counter() - started)}
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        fresh = Path(scratch) / "model"
        save(fresh)
        content = {
            "recipe": asdict(recipe),
            "versions": {library: version(library) for library in libraries},
            "measured": {**reached, "heldout": {what: asdict(value) for what, value in measured(fresh).items()}},
        }
        (fresh / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if (models / name).exists():
            (models / name).rename(Path(scratch) / "previous")
        fresh.rename(models / name)
