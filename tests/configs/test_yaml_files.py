"""What people write: TRL's names of settings, the nearest key, keys of another kind of section, RUN@N."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import GRPOConfig, ModelConfig, ScriptArguments

import configs
from configs.loader import check_config, read_config
from configs.policy_name import PolicyName
from configs.schema import ROLLOUTS, RunConfig
from configs.training import ALGORITHMS
from configs.trl_names import OTHER_MEANING, TRL_NAMES, options_without_setting, reason_for_none
from configs.yaml_files import MAX_CHARACTERS, parse_yaml, read_mapping
from grpo_core.errors import InputError

DOCUMENT = Path(configs.__file__).parent.parent / "docs" / "coming_from_trl.md"
MINIMAL: dict[str, Any] = {
    "run": {"name": "mine", "iterations": 2},
    "policy": {"kind": "glm_image", "model": "somewhere"},
    "data": {"prompts": "prompts.txt"},
    "rollout": {"height": 64, "width": 64},
    "rewards": [{"reward": "jpeg", "settings": {"direction": "compressible"}}],
    "evaluate": {"prompts": "heldout.txt"},
}
VALUES: dict[str, Any] = {
    "advantages.multi_objective_aggregation": "normalize_then_sum",
    "advantages.scale_rewards": "batch",
    "evaluate.num_generations_eval": 3,
    "policy.model_name_or_path": "elsewhere",
    "rollout.num_generations": 5,
    "update.adam_epsilon": 1e-6,
    "update.beta": 0.04,
    "update.epsilon": 0.15,
    "update.epsilon_high": 0.28,
    "update.importance_sampling_level": "sequence",
    "update.loss_type": "dr_grpo",
    "update.lr_scheduler_type": "linear",
    "update.mask_truncated_completions": False,
    "update.num_iterations": 2,
    "update.off_policy_mask_threshold": 0.5,
    "update.per_device_train_batch_size": 4,
    "update.ref_model_mixup_alpha": 0.9,
    "update.sapo_temperature_neg": 1.2,
    "update.sapo_temperature_pos": 1.1,
    "update.top_entropy_quantile": 0.2,
    "update.use_bias_correction_kl": False,
    "update.vespo_k_neg": 2.5,
    "update.vespo_k_pos": 1.5,
    "update.vespo_lambda_neg": 2.2,
    "update.vespo_lambda_pos": 3.3,
    "update.vllm_importance_sampling_clip_max": 2.0,
    "update.vllm_importance_sampling_clip_min": 0.5,
}


def written(path: Path, *settings: tuple[str, Any]) -> Path:
    """The minimal file with these settings; a setting of None is left out of it."""
    values = yaml.safe_load(yaml.safe_dump(MINIMAL))
    for place, value in settings:
        section, _, name = place.partition(".")
        if value is None:
            del values[section][name]
        else:
            values.setdefault(section, {})[name] = value
    path.write_text(yaml.safe_dump(values))
    return path


def value_at(config: object, path: str) -> Any:
    for part in path.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def problems(file: Path, *overrides: str) -> dict[str, InputError]:
    with pytest.raises(InputError) as caught:
        read_config(file, overrides)
    return {error.place: error for error in caught.value.errors}


def test_every_name_is_trls_and_not_ours() -> None:
    known = names_of(GRPOConfig) | {"model_name_or_path"}
    assert {path.split(".")[1] for path in (*TRL_NAMES, *OTHER_MEANING)} <= known
    assert not {*TRL_NAMES, *OTHER_MEANING} & {*TRL_NAMES.values()}


@pytest.mark.parametrize("name", TRL_NAMES)
def test_a_name_of_trl_sets_ours_in_the_file_and_as_an_option(tmp_path: Path, name: str) -> None:
    ours, value = TRL_NAMES[name], VALUES[name]
    without = [("policy.model", None)] if name == "policy.model_name_or_path" else []
    # Numbers of one loss alone are refused with another.
    loss = [f"update.loss={name.split('.')[1].split('_')[0]}"] if "loss_settings" in ours else []
    in_file = read_config(written(tmp_path / "a.yaml", *without, (name, value)), loss)
    as_option = read_config(written(tmp_path / "b.yaml"), [f"{name}={value}", *loss])
    assert value_at(in_file, ours) == value
    assert value_at(as_option, ours) == value
    assert in_file.model_dump() == as_option.model_dump()


def test_an_option_in_trls_words_replaces_what_the_file_says_in_ours(tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", ("update.kl_coef", 0.5))
    assert read_config(file, ["update.beta=0.04"]).update.kl_coef == 0.04


@pytest.mark.parametrize(("trl", "ours"), [("true", "group"), ("false", "none"), ("none", "none")])
def test_scale_rewards_has_truth_values_in_trl(tmp_path: Path, trl: str, ours: str) -> None:
    file = written(tmp_path / "a.yaml")
    assert read_config(file, [f"advantages.scale_rewards={trl}"]).advantages.scale == ours


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.yaml", ("update.kl_coef", 0.1), ("update.beta", 0.1))
    assert set(problems(file)) == {"update.beta"}
    assert set(problems(written(tmp_path / "b.yaml"), "update.beta=0.1", "update.kl_coef=0.1")) == {"--set"}


@pytest.mark.parametrize("name", OTHER_MEANING)
def test_a_name_that_means_something_else_is_explained(tmp_path: Path, name: str) -> None:
    found = problems(written(tmp_path / "a.yaml", (name, 7)))
    assert {place: error.value for place, error in found.items()} == {name: 7}
    assert set(problems(written(tmp_path / "b.yaml"), f"{name}=7")) == {name}


@pytest.mark.parametrize("name", ["ratio_cap", "dppo_threshold"])
def test_a_setting_of_one_loss_stands_with_the_loss(tmp_path: Path, name: str) -> None:
    (error,) = problems(written(tmp_path / "a.yaml", (f"update.{name}", 1.5))).values()
    assert f"update.loss_settings.{name}" in error.hint


@pytest.mark.parametrize("loss", ["loss", "loss_type"])
def test_the_upper_bound_of_cispo_is_another_one(tmp_path: Path, loss: str) -> None:
    (error,) = problems(written(tmp_path / "a.yaml"), "update.epsilon_high=5.0", f"update.{loss}=cispo").values()
    assert "update.loss_settings.ratio_cap" in error.hint


def test_every_field_of_trl_has_one_answer() -> None:
    names = [path.split(".")[1] for path in (*TRL_NAMES, *OTHER_MEANING)]
    names += [name for _, each, _, _ in options_without_setting() for name in each]
    assert max(Counter(names).values()) == 1
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Every field")[2].partition("<!-- fields: begin")[0]
    same = {name for row in re.findall(r"^- of `(\w+)`: (.+)$", text, re.MULTILINE) for name in _known(*row)}
    assert not same & set(names)
    scripts = names_of(ModelConfig) | names_of(ScriptArguments)
    earlier = {"warmup_ratio", "max_prompt_length", "use_liger_loss"}
    assert {*names, *same} - scripts - earlier <= names_of(GRPOConfig) <= {*names, *same}


def _known(section: str, row: str) -> list[str]:
    """The names of a row, all of them keys of its section."""
    names = re.findall(r"`(\w+)`", row)
    assert {*names} <= keys_of(section)
    return names


def test_an_option_without_a_setting_is_refused_with_the_reason(tmp_path: Path) -> None:
    for _, names, ours, why in options_without_setting():
        for name in names:
            reason = reason_for_none(name)
            assert reason is not None
            assert why in reason
            assert ours in reason
    assert reason_for_none("learning_rate") is None
    (error,) = problems(written(tmp_path / "a.yaml"), "update.vllm_group_port=1").values()
    assert (error.place, error.value) == ("update.vllm_group_port", "vllm_group_port")
    assert "full weights over NCCL are not sent" in error.hint
    # No option of TRL's any more; people still have it in their files.
    (error,) = problems(written(tmp_path / "a.yaml"), "update.warmup_ratio=0.1").values()
    assert "update.warmup_steps" in error.hint


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("rewards=[ssim]", "rewards.0", "ssim"),
        ("evaluate=null", "evaluate", None),
        ("policy.lora=4", "policy.lora", 4),
        ("data.datasets=[a]", "data.datasets.0", "a"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_answered_with_its_keys(
    tmp_path: Path, override: str, place: str, value: object
) -> None:
    (error,) = problems(written(tmp_path / "a.yaml"), override).values()
    assert (error.place, error.value) == (place, value)
    section = place.partition(".0")[0]
    known = {"rewards": "reward", "evaluate": "prompts", "policy.lora": "rank", "data.datasets": "prompts"}
    assert known[section] in error.hint
    assert "dictionary" not in error.hint


def names_of(arguments: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(arguments)}


def keys_of(section: str) -> set[str]:
    """The names of a section's fields, whatever is trained."""
    annotation: Any = RunConfig.model_fields[section].annotation
    return {name for each in getattr(annotation, "__args__", (annotation,)) for name in each.model_fields}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "update.learning_rate"),
        ("update.group_size", "rollout.group_size"),
        ("update.num_generations", "rollout.group_size"),
        ("beta", "update.kl_coef"),
        ("run.iteration", "run.iterations"),
        ("polcy.model", "policy"),
        ("policy.lora.rnk", "policy.lora.rank"),
        ("rewards.0.wieght", "rewards.0.weight"),
        ("evaluate.target", "evaluate.targets"),
        ("rollout.lerning_rate", "update.learning_rate"),
        ("rollout.kl_coef", "advantages.kl_coef or update.kl_coef"),
        ("lr", "update.learning_rate"),
        ("update.lr", "update.learning_rate"),
    ],
)
def test_an_unknown_key_proposes_the_nearest_by_its_whole_path(tmp_path: Path, key: str, meant: str) -> None:
    (error,) = problems(written(tmp_path / "a.yaml"), f"{key}=1").values()
    assert f"Did you mean {meant}?" in error.hint
    # The other keys of the section would hide it.
    assert len(error.hint) < 120


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
    written = section(read_mapping(path, "", RunConfig, example=""), place)
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
    values = read_mapping(REPOSITORY / "configs" / "tiny.yaml", "", RunConfig, example="")
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


@pytest.mark.parametrize(
    ("text", "run", "version"),
    [
        ("tiny", "tiny", None),
        ("tiny@0", "tiny", "0"),
        ("tiny@20", "tiny", "20"),
        ("tiny@best", "tiny", "best"),
        ("tiny~1@3", "tiny~1", "3"),
        ("s3://bucket/runs/tiny@3", "s3://bucket/runs/tiny", "3"),
        # The folder above has an @ in its name.
        ("/home/me@work/runs/tiny", "/home/me@work/runs/tiny", None),
        ("runs@2/tiny@4", "runs@2/tiny", "4"),
        # What is no version belongs to the run, which there is none of.
        *((text, text, None) for text in ("tiny@last", "tiny@-1", "tiny@1.5", "tiny@", "@3", "tiny@1234567890")),
    ],
)
def test_what_people_write(text: str, run: str, version: str | None) -> None:
    assert PolicyName.parse(text) == PolicyName(run, version)


def test_a_text_of_as_many_characters_as_are_read_and_one_more() -> None:
    assert parse_yaml("x" * MAX_CHARACTERS, "run.yaml") == "x" * MAX_CHARACTERS
    with pytest.raises(InputError, match=f"{MAX_CHARACTERS + 1:,} characters") as caught:
        parse_yaml("x" * (MAX_CHARACTERS + 1), "run.yaml")
    assert caught.value.place == "run.yaml"
