"""Any reward function written for TRL's trainers, asynchronous or not, unchanged.

It is called as by TRL 1.16's GRPOTrainer (``_calculate_rewards``): everything by keyword, one list entry per sample.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, JsonValue
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.records import Modality
from grpo_core.rewards.functions import trl_call
from grpo_core.rewards.functions.loading import REFERENCE, UserFunction, load_function
from grpo_core.rewards.reward import STRICT, Reward, Score, ScoringBatch

_PLACE = "rewards.function.function"


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

    Keywords of the call: ``prompts``; ``completions``, texts, or images (RGB copies) where samples are images, and
    then ``images`` with the same; with `with_targets` ``targets``, None where there is none; ``completion_ids``, None
    where the tokens are not known; every column of the prompt file; ``trainer_state`` None, since stored samples are
    scored again without a trainer; ``log_extra`` and ``log_metric``, which write to the log.

    Attributes:
        function: ``package.module:function`` or ``path/to/file.py:function``; only its own file counts for the version.
        arguments: keyword arguments, for the factory or, where it is none, for every call.
        factory: whether `function` gives the reward function when called with `arguments`
            (``trl.rewards:get_soft_overlong_punishment``). By default it is one when it is a class or takes none of
            prompts, completions and completion_ids.
        conversational: whether prompts and completions are lists of messages, as TRL gives them when its data set's
            are. By default they are when the function annotates ``completions`` with lists of lists.
        by_group: whether the function compares siblings; it then gets one complete group per call.
        with_targets: whether the function compares with target images.
        on_error: ``raise``, or ``null``: a sample whose call raises has a failure instead of a score.
        revision: any text; change it when a module that the function's file imports has changed.
    """

    function: Annotated[str, AfterValidator(_check_reference)] = ""
    arguments: Annotated[Mapping[str, JsonValue], AfterValidator(_check_finite)] | None = None
    factory: bool | None = None
    conversational: bool | None = None
    by_group: bool = False
    with_targets: bool = False
    on_error: Literal["raise", "null"] | None = "raise"
    revision: str | None = None

    name: ClassVar[str] = "function"
    media: ClassVar[tuple[Modality, ...]] = ("image", "text")
    needs_tokens: ClassVar[bool] = True

    @property
    def version(self) -> str:
        """Includes the function's source file."""
        return f"1+{self._load().sha256[:16]}"

    @property
    def needs_group(self) -> bool:
        """Whether the function compares siblings."""
        return self.by_group

    @property
    def needs_target(self) -> bool:
        """Whether the function compares with targets."""
        return self.with_targets

    @property
    def needs_column(self) -> str | None:
        """The function's first parameter without a default that no call passes; None while it cannot load."""
        try:
            columns = trl_call.needed_columns(self._load())
        except InputError:
            return None  # reported by preflight
        return columns[0] if columns else None

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
        """Report a module or function that is missing, cannot be imported or refuses the keywords of a call."""
        try:
            function = self._load()
        except InputError as error:
            return [str(error)]
        refused = trl_call.refused_keywords(function)
        if not refused:
            return []
        hint = f"It does not take the keyword(s) {', '.join(refused)}. Let it take **kwargs, as TRL asks too."
        return [str(InputError(f"{_PLACE}, {function.place}", self.function, hint))]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample, with one call per group or one call for all.

        Raises:
            InputError: the function cannot be loaded, raised (unless `on_error` is null), or did not return
                one number or None per sample.
        """
        function = self._load()
        if not self.by_group:
            return self._score_rows(function, batch)
        if not batch.group_ids:
            raise InputError("rewards.function.by_group", True, "These samples come without groups. Set it to false.")
        groups = itertools.groupby(range(len(batch)), key=lambda row: batch.group_ids[row])
        return [score for _, rows in groups for score in self._score_rows(function, batch.select(list(rows)))]

    def _load(self) -> UserFunction:
        return load_function(_PLACE, self.function, json.dumps(dict(self.arguments or {})), self.factory)

    def _score_rows(self, function: UserFunction, batch: ScoringBatch) -> list[Score]:
        messages = trl_call.takes_messages(function) if self.conversational is None else self.conversational
        keywords = trl_call.call_keywords(function, batch, messages, self.with_targets)
        try:
            returned = trl_call.call(function, keywords)
        except (Exception, SystemExit) as error:  # whatever a user's function raises is reported with its place
            if self.on_error == "raise":
                raise self._raised(function, error) from error
            if len(batch) > 1 and not self.by_group:
                return [score for row in range(len(batch)) for score in self._score_rows(function, batch.select([row]))]
            at = Path(function.raised_at(error)).name
            return [Score.failed(f"the function raised {type(error).__name__}: {error} ({at})")] * len(batch)
        return trl_call.read_scores(function, returned, batch.sample_ids)

    def _raised(self, function: UserFunction, error: BaseException) -> InputError:
        hint = (
            "Fix the function; or, if it wants messages and got texts, or the other way round, set `conversational` "
            "(true or false); or set `on_error: null` to go on without scores for the samples on which it raises. "
            "trainer_state is None in every call."
        )
        place = f"the reward function {self.function}, {function.raised_at(error)}"
        return InputError(place, f"{type(error).__name__}: {error}", hint)
