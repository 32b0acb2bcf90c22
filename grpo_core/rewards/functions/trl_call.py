"""A reward function's call and its answer, as in TRL 1.16's GRPOTrainer (``_calculate_rewards``)."""

import copy
import inspect
import itertools
import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rewards.event_loop import run_awaitable
from grpo_core.rewards.functions.loading import UserFunction
from grpo_core.rewards.images import to_rgb
from grpo_core.rewards.reward import NOT_APPLICABLE, Score, ScoringBatch, not_finite

_LOGGER = logging.getLogger(__name__)
_SAMPLES = ("prompts", "completions", "completion_ids")
_HOOKS = ("trainer_state", "log_extra", "log_metric")
_GIVEN = (*_SAMPLES, *_HOOKS, "images", "targets")
_LEFT_OUT = ("prompt", "completion", "completion_ids")


def needed_columns(function: UserFunction) -> list[str]:
    """List the parameters without a default that no call passes: columns of the prompt file."""
    return [name for name in _required(function) if name not in _GIVEN]


def refused_keywords(function: UserFunction) -> list[str]:
    """List the keywords of every call that the function does not take."""
    parameters = [] if function.signature is None else [*function.signature.parameters.values()]
    if function.signature is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    taken = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return [name for name in (*_SAMPLES, *_HOOKS) if name not in taken]


def takes_messages(function: UserFunction) -> bool:
    """Say whether the function annotates its completions as lists of lists: one list of messages per sample."""
    parameter = function.signature.parameters.get("completions") if function.signature is not None else None
    if parameter is None or parameter.annotation is parameter.empty:
        return False
    annotation = parameter.annotation
    written = annotation if isinstance(annotation, str) else str(annotation)
    inner = written.replace(" ", "").replace("typing.", "").lower().partition("[")[2]
    return inner.startswith(("list[", "sequence[", "collections.abc.sequence[", "list]"))


def call_keywords(function: UserFunction, batch: ScoringBatch, messages: bool, targets: bool) -> dict[str, object]:
    """Build the call's arguments: copies, so that a function may change them.

    Args:
        function: what is called.
        batch: the samples; images go as RGB.
        messages: whether prompts and completions go as lists of messages.
        targets: whether target images go along.

    Raises:
        InputError: a column with the name of an argument; token ids that the function needs are not known.
    """
    for name in ("prompts", "completions"):
        if name in batch.columns:
            hint = "The reward function gets another value by this name. Rename the column in the prompt file."
            raise InputError(f"{function.place}, column of the prompt file", name, hint)
    if not batch.token_ids and "completion_ids" in _required(function):
        hint = "The function needs completion_ids, and these samples come without tokens. Let it do without."
        raise InputError(function.place, None, hint)
    named = zip(batch.sample_ids, batch.images, strict=True) if batch.images else ()
    images = [to_rgb(image, f"rewards.function, sample {sample_id}").copy() for sample_id, image in named]
    outputs: Sequence[str | Image.Image] = images or batch.completions
    columns = {key: copy.deepcopy(list(values)) for key, values in batch.columns.items() if key not in _LEFT_OUT}
    return {
        **columns,
        "prompts": [_message("user", prompt) if messages else prompt for prompt in batch.prompts],
        "completions": [_message("assistant", output) if messages else output for output in outputs],
        "completion_ids": [list(ids) for ids in batch.token_ids] if batch.token_ids else None,
        **({"images": images} if images else {}),
        **({"targets": _targets(batch)} if targets else {}),
        "trainer_state": None,
        "log_extra": _log_extra,
        "log_metric": _log_metric,
    }


def call(function: UserFunction, keywords: Mapping[str, object]) -> object:
    """Call the function, await a coroutine and read an iterator to its end."""
    answer = function.run(keywords)
    answer = run_awaitable(answer) if inspect.isawaitable(answer) else answer
    if not isinstance(answer, Iterator):
        return answer
    # Here its errors are reported with their place; one item more shows that there are too many.
    return list(itertools.islice(answer, len(keywords["prompts"]) + 1))  # type: ignore[arg-type]


def read_scores(function: UserFunction, returned: object, sample_ids: Sequence[str]) -> list[Score]:
    """Read one score per number; None means not applicable, NaN and infinity are failures.

    Raises:
        InputError: not one number or None per sample.
    """
    answers = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(answers, str | bytes | Mapping | AbstractSet) or not isinstance(answers, Iterable):
        kind, shown = type(returned).__name__, repr(returned)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InputError(_place(function), f"{kind} {shown}", "Return a list with one number, or None, per sample.")
    listed = list(answers)
    if len(listed) != len(sample_ids):
        hint = f"It got {len(sample_ids)} samples. Return one number, or None, for each, in order."
        raise InputError(_place(function), f"{len(listed)} rewards", hint)
    return [_read_score(function, *pair) for pair in zip(listed, sample_ids, strict=True)]


def _read_score(function: UserFunction, answer: object, sample_id: str) -> Score:
    try:
        # Several numbers have no single item.
        plain = answer.item() if hasattr(answer, "item") else answer
    except (ValueError, RuntimeError):
        plain = answer
    if plain is None:
        return NOT_APPLICABLE
    if not isinstance(plain, numbers.Real):
        hint = "Return a number, or None where the function does not apply."
        raise InputError(f"{_place(function)}, sample {sample_id}", answer, hint)
    try:
        value = float(plain)
    except OverflowError:
        # Only integers overflow: every other real number has a float.
        value = math.inf if abs(plain) == plain else -math.inf
    if not math.isfinite(value):
        return Score.failed(f"{not_finite(value)} (the function at {function.short_place})")
    return Score(value, value)


def _place(function: UserFunction) -> str:
    return f"the reward function at {function.place}"


def _required(function: UserFunction) -> list[str]:
    parameters = function.signature.parameters.values() if function.signature is not None else ()
    by_name = [entry for entry in parameters if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY)]
    return [entry.name for entry in by_name if entry.default is entry.empty]


def _targets(batch: ScoringBatch) -> list[Image.Image | None]:
    found = zip(batch.sample_ids, batch.targets or [None] * len(batch), strict=True)
    place = "rewards.function, target of sample"
    return [None if target is None else to_rgb(target, f"{place} {i}").copy() for i, target in found]


def _message(role: str, output: str | Image.Image) -> list[dict[str, object]]:
    if isinstance(output, str):
        return [{"role": role, "content": output}]
    return [{"role": role, "content": [{"type": "image", "image": output}]}]


def _log_extra(column: str, values: Sequence[object]) -> None:
    _LOGGER.debug("a reward function's column %s: %s", column, values)


def _log_metric(name: str, value: float) -> None:
    _LOGGER.info("a reward function's metric %s: %s", name, value)
