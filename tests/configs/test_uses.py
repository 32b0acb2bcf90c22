"""Every setting that could name code, a command, an address, a variable or a file says whether it does."""

import enum
import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from configs.schema import ROLLOUTS, ReplayConfig, RewardsFile
from configs.scoring import RewardSection
from configs.validation import Section
from grpo_core.rewards.registry import REWARDS, reward_class
from grpo_core.uses import Uses, declared_uses, settings_fields, use_of

_HARMLESS = (int, float, bool, type(None))


def parts(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of, those of literals left out."""
    if get_origin(annotation) is Literal:
        return
    if get_origin(annotation) is Annotated:
        yield from parts(get_args(annotation)[0])
    elif get_args(annotation):
        yield from (each for inner in get_args(annotation) for each in parts(inner))
    elif annotation not in (..., types.UnionType):
        yield annotation


def sections() -> set[type[BaseModel]]:
    """Every section of every configuration, found from the types of the fields."""
    found: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [ReplayConfig, RewardsFile, *ROLLOUTS.values()]
    while waiting:
        model = waiting.pop()
        if model in found:
            continue
        found.add(model)
        types_ = [each for kind in settings_fields(model).values() for each in parts(kind)]
        waiting += [each for each in types_ if inspect.isclass(each) and issubclass(each, BaseModel)]
    return found


SETTINGS: list[type] = [*sorted(sections(), key=lambda each: each.__name__), *map(reward_class, REWARDS)]


def unmarked(settings: type) -> list[str]:
    """Names of the fields that could carry any text and have no mark."""
    return [
        name
        for name, kind in settings_fields(settings).items()
        if use_of(kind) is None and not all(is_harmless(each) for each in parts(kind))
    ]


def is_harmless(kind: Any) -> bool:
    # Of sections and settings inside of a field each field is asked for itself.
    own = (Section, enum.Enum, *_HARMLESS)
    return inspect.isclass(kind) and (issubclass(kind, own) or hasattr(kind, "__dataclass_fields__"))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each.__name__)
def test_every_field_that_can_hold_a_text_is_marked(settings: type) -> None:
    assert unmarked(settings) == []


def test_the_walk_reaches_every_section_and_finds_what_has_no_mark() -> None:
    names = {each.__name__ for each in SETTINGS}
    assert {"VllmSection", "DatasetSection", "StorageSection", "NftUpdateSection", "JudgeReward"} <= names
    assert len(SETTINGS) > 50

    class Inner(Section):
        command: str

    class Made(Section):
        number: int | None = None
        choice: Literal["a"] = "a"
        inner: Inner | None = None
        text: str | None = None
        path: Path | None = None
        anything: Any = None
        texts: Mapping[str, tuple[str, ...]] = MappingProxyType({})
        known: Annotated[str, Uses.NOTHING] | None = None

    assert unmarked(Made) == ["text", "path", "anything", "texts"]
    assert unmarked(Inner) == ["command"]


def test_a_mark_counts_wherever_it_stands() -> None:
    assert use_of(tuple[Annotated[str, Uses.PLACE], ...] | None) is Uses.PLACE
    assert use_of(Annotated[str | None, Uses.CODE]) is Uses.CODE
    with pytest.raises(TypeError, match="CODE and PLACE"):
        use_of(Annotated[str, Uses.CODE] | Annotated[int, Uses.PLACE])


def test_what_the_marks_say() -> None:
    """Those of which a run may name one, by hand."""
    found = {
        f"{settings.__name__}.{name}": use.name
        for settings in SETTINGS
        for name, use in declared_uses(settings).items()
        if use is not Uses.NOTHING
    }
    assert sorted(f"{use} {key}" for key, use in found.items() if use in ("CODE", "COMMAND", "VARIABLE")) == [
        "CODE DenoisingUpdateSection.loss",
        "CODE FunctionReward.function",
        "CODE UpdateSection.loss",
        "COMMAND VllmSection.command",
        "VARIABLE JudgeReward.token_env",
        "VARIABLE RemoteReward.token_env",
        "VARIABLE VllmSection.token_env",
    ]
    assert sorted(key for key, use in found.items() if use == "ADDRESS") == [
        "JudgeReward.url",
        "RemoteReward.url",
        "RunSection.trackers",
        "VllmSection.url",
    ]
    assert [key for key, use in found.items() if use == "ROOT"] == ["StorageSection.root"]
    assert [key for key, use in found.items() if use == "OF_REWARD"] == [f"{RewardSection.__name__}.settings"]
