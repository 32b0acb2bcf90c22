"""Any reward function written for TRL's trainers, asynchronous or not, unchanged.

It is called and its answer is read as in TRL 1.16's GRPOTrainer (``_calculate_rewards``): everything by keyword, one
list entry per sample.
"""

import copy
import inspect
import itertools
import json
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from PIL import Image
from pydantic import AfterValidator, JsonValue
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.functions.call_log import CallLog
from grpo_core.rewards.reward import STRICT, Needs, Reward, problems_of
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch, not_finite
from grpo_core.rollouts.images import to_rgb
from grpo_core.rollouts.messages import Message, shown_question, with_images
from grpo_core.services import run_awaitable
from grpo_core.user_code.functions import (
    REFERENCE,
    UserFunction,
    find_function,
    keeping_folder,
    load_function,
    shown_error,
    signature_of,
)
from grpo_core.uses import Uses

_PLACE = "rewards.function.function"
_SAMPLES = ("prompts", "completions", "completion_ids")
"""What every reward function may be called with, besides the columns of the prompt file."""

_HOOKS = ("trainer_state", "log_extra", "log_metric")
_SOURCES = "source_images"
_OF_TRL = ("image", "images")
"""What TRL calls the images in prompts; with samples that are images, the second are the samples."""

_FIX = (
    "Fix the function: a call passes every argument by its name, so let it take the rest as **kwargs. Or set "
    "`on_error: null` to go on without scores for the samples on which it raises."
)

_GIVEN = (*_SAMPLES, *_HOOKS, *_OF_TRL, "targets", _SOURCES)
_LEFT_OUT = ("prompt", "completion", "completion_ids")


def _check_reference(reference: str) -> str:
    if not REFERENCE.fullmatch(reference):
        raise InputError("", reference, "Set package.module:function, or path/to/file.py:function.")
    return reference


def _check_finite(arguments: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    json.dumps(arguments, allow_nan=False)
    return arguments


@dataclass(frozen=True, config=STRICT)
class FunctionReward(Reward):
    """Value and raw are what the function returned, unbounded; None means not applicable.

    Keywords of the call: ``prompts``; ``completions``, texts, or images (RGB copies) and then also ``images``; with
    `with_targets` ``targets``, None where there is none; ``source_images``, lists of the images in the prompts, if the
    function names it, of texts also as TRL gives them, ``images`` and, the first alone, ``image``; ``completion_ids``,
    None where the tokens are not known; every column of the prompt file; ``trainer_state`` None; ``log_metric``, whose
    values become metrics of the run, and ``log_extra``, whose values become columns of the samples.

    Attributes:
        function: ``package.module:function`` or ``path/to/file.py:function``. The version is made of its file, of the
            files that this imports from its own folder tree, and of the versions of the packages that these import.
        arguments: keyword arguments, for the factory or, where it is none, for every call.
        factory: whether `function` gives the reward function when called with `arguments`
            (``trl.rewards:get_soft_overlong_punishment``); by default if it is a class, or takes nothing that a call of
            a reward function passes.
        conversational: whether prompts and completions are lists of messages; by default where those of the data set
            are, as in TRL. true makes messages of texts, false gives the text of the user's last message.
        by_group: whether the function compares siblings; it then gets one complete group per call.
        with_targets: whether the function compares with target images.
        on_error: ``raise``, or ``null``: a sample whose call raises has a failure instead of a score.
        revision: any text; change it when something else has changed that the function uses.
    """

    function: Annotated[str, AfterValidator(_check_reference), Uses.CODE] = ""
    arguments: Annotated[Mapping[str, JsonValue], AfterValidator(_check_finite), Uses.ARGUMENTS] | None = None
    factory: Annotated[bool | None, Uses.ARGUMENTS] = None
    conversational: bool | None = None
    by_group: bool = False
    with_targets: bool = False
    on_error: Literal["raise", "null"] | None = "raise"
    revision: Annotated[str | None, Uses.NOTHING] = None

    name: ClassVar[str] = "function"

    @property
    def user_function(self) -> str:
        """The function's reference."""
        return self.function

    @property
    def unfollowed(self) -> Sequence[str]:
        """What the function's code uses and `version` does not see; empty while the function cannot load."""
        try:
            return self._load().unfollowed
        except InputError:
            return ()

    @property
    def version(self) -> str:
        """Includes the function's code."""
        return f"1+{self._load().code.digest[:16]}"

    @property
    def needs(self) -> Needs:
        """What the settings say; the function's parameters say more."""
        return Needs(("image", "text"), target=self.with_targets, group=self.by_group, tokens="optional")

    def load_needs(self) -> Needs:
        """Return these with what the function's parameters ask for: those without a default are required."""
        try:
            function = self._load()
        except InputError:
            return self.needs
        required = function.required
        reads = function.signature is None or any(_takes(function, name) for name in (_SOURCES, *_OF_TRL))
        return replace(
            self.needs,
            tokens="required" if "completion_ids" in required else "optional",
            sources="required" if _SOURCES in required else "optional" if reads else None,
            column=next((name for name in required if name not in _GIVEN), None),
        )

    def settings(self) -> Mapping[str, object]:
        """Return all of them; a file by its name, because its content is in the version."""
        module, _, name = self.function.rpartition(":")
        return {
            **super().settings(),
            "function": f"{Path(module).name if module.endswith('.py') else module}:{name}",
            "arguments": dict(self.arguments or {}),
            "on_error": self.on_error or "null",
        }

    def preflight(self) -> Sequence[str]:
        """Report a module or function that is missing or cannot be imported."""
        return problems_of(self._load)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample, with one call per group or one call for all."""
        function = self._load()
        if not self.by_group:
            return self._score_rows(function, batch)
        return [score for rows in batch.groups(self.name) for score in self._score_rows(function, batch.select(rows))]

    def _load(self) -> UserFunction:
        factory = _is_factory(find_function(_PLACE, self.function)) if self.factory is None else self.factory
        return load_function(_PLACE, self.function, json.dumps(dict(self.arguments or {})), factory=factory)

    def _score_rows(self, function: UserFunction, batch: ScoringBatch) -> list[Score]:
        keywords, log = _call_keywords(function, batch, self.conversational, self.with_targets), CallLog()
        keywords |= {"trainer_state": None, "log_extra": log.log_extra, "log_metric": log.log_metric}
        try:
            returned = _call(function, keywords)
        except (Exception, SystemExit) as error:  # whatever a user's function raises is reported with its place
            if self.on_error == "raise":
                place = f"the reward function {self.function}, {function.raised_at(error)}"
                raise InputError(place, shown_error(error), _FIX) from error
            if len(batch) > 1 and not self.by_group:
                return [score for row in range(len(batch)) for score in self._score_rows(function, batch.select([row]))]
            at = Path(function.raised_at(error)).name
            return [Score.failed(f"the function raised {shown_error(error)} ({at})")] * len(batch)
        scores, logged = _read_scores(function, returned, batch.sample_ids), log.metrics
        extras = log.extras(len(batch), f"the reward function at {function.place}")
        return [replace(score, logged=logged, extra=extra) for score, extra in zip(scores, extras, strict=True)]


def _is_factory(named: Callable[..., object]) -> bool:
    signature = signature_of(named)
    if inspect.isclass(named) or signature is None:
        return inspect.isclass(named)
    return not _is_open(signature) and not any(name in _GIVEN for name in signature.parameters)


def _call_keywords(
    function: UserFunction, batch: ScoringBatch, conversational: bool | None, targets: bool
) -> dict[str, object]:
    """Build the call's arguments: copies, so that a function may change them.

    InputError for a column with the name of an argument, or token ids that the function needs and nobody knows.
    """
    for name in ("prompts", "completions"):
        if name in batch.columns:
            hint = "The reward function gets another value by this name. Rename the column in the prompt file."
            raise InputError(f"{function.place}, column of the prompt file", name, hint)
    if not batch.token_ids and "completion_ids" in function.required:
        hint = "The function needs completion_ids, and these samples come without tokens. Let it do without."
        raise InputError(function.place, None, hint)
    images = _rgb_copies(batch.sample_ids, batch.images, "sample") if batch.images else []
    sources = _copies_of_sources(batch)
    outputs: Sequence[object] = images or batch.completions
    keywords: dict[str, object] = {
        key: copy.deepcopy(list(values)) for key, values in batch.columns.items() if key not in _LEFT_OUT
    }
    given = list(_prompts_given(batch, sources, conversational))
    keywords["prompts"] = given
    keywords["completions"] = [
        output if isinstance(prompt, str) else _message("assistant", output)
        for prompt, output in zip(given, outputs, strict=True)
    ]
    keywords["completion_ids"] = [list(ids) for ids in batch.token_ids] if batch.token_ids else None
    if images:
        keywords["images"] = images
    elif batch.source_images:
        keywords |= {"images": sources, "image": [next(iter(each), None) for each in sources]}
        keywords = {name: each for name, each in keywords.items() if name not in _OF_TRL or _takes(function, name)}
    if function.signature is not None and _SOURCES in function.signature.parameters:
        keywords[_SOURCES] = sources
    if targets:
        keywords["targets"] = _rgb_copies(batch.sample_ids, batch.targets or [None] * len(batch), "target of sample")
    return keywords


def _prompts_given(
    batch: ScoringBatch, sources: Sequence[Sequence[object]], conversational: bool | None
) -> Iterator[str | list[Message]]:
    """Yield each prompt as TRL gives it, or as `conversational` wants it."""
    for prompt, images in zip(batch.prompts, sources, strict=True):
        if conversational is False:
            yield shown_question(prompt)
            continue
        given = with_images(prompt, images if batch.source_images else None)
        yield _message("user", given) if conversational and isinstance(given, str) else given


def _copies_of_sources(batch: ScoringBatch) -> list[list[Image.Image]]:
    return [[image.copy() for image in images] for images in batch.source_images or [()] * len(batch)]


def _is_open(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _takes(function: UserFunction, name: str) -> bool:
    return function.signature is None or name in function.signature.parameters or _is_open(function.signature)


def _rgb_copies(sample_ids: Sequence[str], images: Sequence[Image.Image | None], what: str) -> list[Image.Image | None]:
    found = zip(sample_ids, images, strict=True)
    return [None if image is None else to_rgb(image, f"rewards.function, {what} {i}").copy() for i, image in found]


def _call(function: UserFunction, keywords: Mapping[str, object]) -> object:
    with keeping_folder():
        answer = function.run(keywords)
        answer = run_awaitable(answer) if inspect.isawaitable(answer) else answer
        if not isinstance(answer, Iterator):
            return answer
        # Here its errors are reported with their place; one item more shows that there are too many.
        return list(itertools.islice(answer, len(keywords["prompts"]) + 1))  # type: ignore[arg-type]


def _read_scores(function: UserFunction, returned: object, sample_ids: Sequence[str]) -> list[Score]:
    """Read one score per number; None is not applicable, NaN and infinity are failures, all else InputError."""
    place = f"the reward function at {function.place}"
    answers = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(answers, str | bytes | Mapping | AbstractSet) or not isinstance(answers, Iterable):
        kind, shown = type(returned).__name__, repr(returned)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InputError(place, f"{kind} {shown}", "Return a list with one number, or None, per sample.")
    listed = list(answers)
    if len(listed) != len(sample_ids):
        hint = f"It got {len(sample_ids)} samples. Return one number, or None, for each, in order."
        raise InputError(place, f"{len(listed)} rewards", hint)
    scores = []
    for answer, sample_id in zip(listed, sample_ids, strict=True):
        try:
            # Several numbers have no single item.
            plain = answer.item() if hasattr(answer, "item") else answer
        except (ValueError, RuntimeError):
            plain = answer
        if plain is not None and not isinstance(plain, numbers.Real):
            hint = "Return a number, or None where the function does not apply."
            raise InputError(f"{place}, sample {sample_id}", answer, hint)
        scores.append(NOT_APPLICABLE if plain is None else _score_of(plain, Path(function.place).name))
    return scores


def _score_of(number: numbers.Real, at: str) -> Score:
    try:
        value = float(number)
    except OverflowError:
        # Only integers overflow: every other real number has a float.
        value = math.inf if abs(number) == number else -math.inf
    return Score.of(value, value, f"{not_finite(value)} (the function at {at})")


def _message(role: str, output: object) -> list[Message]:
    if isinstance(output, str):
        return [{"role": role, "content": output}]
    return [{"role": role, "content": [{"type": "image", "image": output}]}]
