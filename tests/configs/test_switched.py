"""Files whose `--set` chooses another kind of section than they are written for, and lists written as mappings."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.loader import check_config, read_config
from configs.schema import ROLLOUTS
from configs.training import ALGORITHMS
from configs.yaml_files import read_mapping
from grpo_core.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]

FILES = ("tiny.yaml", "tiny_text.yaml", "tiny_grounding.yaml", "tiny_sd3.yaml", "tiny_sd3_nft.yaml", "tiny_both.yaml")
KEYS_OF_KIND = {value: set(model.model_fields) for value, model in ROLLOUTS.items()}
KEYS_OF_ALGORITHM = {value: set(model.model_fields) for value, model in ALGORITHMS["denoising"].items()}
DENOISING = {"tiny_sd3.yaml": "update", "tiny_sd3_nft.yaml": "update", "tiny_both.yaml": "update.denoising"}


def switches() -> Iterator[Any]:
    """Each shipped file with each other kind of policy and algorithm: which of the file's keys do not fit."""
    for file, kind in itertools.product(FILES, ROLLOUTS):
        yield pytest.param(file, "policy.kind", kind, "rollout", KEYS_OF_KIND, id=f"{file}-{kind}")
    for (file, place), algorithm in itertools.product(DENOISING.items(), KEYS_OF_ALGORITHM):
        setting = f"{place}.algorithm"
        yield pytest.param(file, setting, algorithm, place, KEYS_OF_ALGORITHM, id=f"{file}-{algorithm}")


def section(values: dict[str, Any], place: str) -> dict[str, Any]:
    for name in place.split("."):
        values = values[name]
    return values


@pytest.mark.parametrize(("file", "setting", "value", "place", "keys"), list(switches()))
def test_keys_that_another_kind_has_are_named_with_what_chooses_it(
    file: str, setting: str, value: str, place: str, keys: dict[str, set[str]]
) -> None:
    path = REPOSITORY / "configs" / file
    written = section(read_mapping(path, "", example="", keys=""), place)
    strange = {key for key in written if key not in keys[value] and any(key in each for each in keys.values())}
    try:
        read_config(path, [f"{setting}={value}"])
        found: dict[str, InputError] = {}
    except InputError as error:
        found = {each.place: each for each in error.errors}
    refused = {where: each for where, each in found.items() if "There is no such key with" in each.hint}
    assert set(refused) == {f"{place}.{key}" for key in strange}
    for key in strange:
        hint = refused[f"{place}.{key}"].hint
        assert f"with {setting} {value}" in hint
        assert any(other in hint for other, each in keys.items() if key in each)
        assert refused[f"{place}.{key}"].value == key


@pytest.mark.parametrize(
    ("place", "form"),
    [
        ("data.datasets", "datasets: [{prompts: ..., name: ...}]"),
        ("evaluate.datasets", "datasets: [{prompts: ..., name: ...}]"),
        ("rewards", "rewards: [{reward: ...}]"),
        ("guardrails.rewards", "rewards: [{reward: ...}]"),
    ],
)
@pytest.mark.parametrize("written", [{"mine": {"prompts": "a.txt"}}, "a.txt", 3])
def test_a_list_of_sections_that_is_none_is_shown_an_entry(place: str, form: str, written: object) -> None:
    values = read_mapping(REPOSITORY / "configs" / "tiny.yaml", "", example="", keys="")
    *above, last = place.split(".")
    inside = values
    for name in above:
        inside = inside.setdefault(name, {})
    inside[last] = written
    with pytest.raises(InputError) as error:
        check_config(values)
    assert f"{place}: " in str(error.value)
    assert form in str(error.value)


def test_a_list_of_plain_values_stays_a_plain_list() -> None:
    with pytest.raises(InputError) as error:
        read_config(REPOSITORY / "configs" / "tiny.yaml", ["run.trackers=wandb"])
    assert "a list, as in [a, b]" in str(error.value)
