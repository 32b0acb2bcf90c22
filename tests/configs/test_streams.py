"""What a run trains, by stream: groups, rows, windows and updates; what of it counts as the run's identity."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from configs.identity import changed_settings, run_identity
from configs.loader import as_config, check_config, read_config
from configs.schema import ReplaySection, RunConfig, as_replay
from configs.scoring import RewardSection
from configs.training import (
    AwmUpdateSection,
    DenoisingUpdateSection,
    NftUpdateSection,
    ParitySection,
    UpdateSection,
    change_algorithm,
)
from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError
from grpo_core.parity import ParityTolerance
from grpo_core.seeds import derive_seed

_SIZE = {"height": 64, "width": 64, "num_inference_steps": 10}
_GROUPS = {"prompts_per_iteration": 3, "group_size": 12}
_TEXT = {
    "policy": {"kind": "causal_lm", "model": "m"},
    "rollout": {**_GROUPS, "max_completion_length": 8},
    "rewards": [{"reward": "answer"}],
}
_SERVED = {"engine": "vllm", "vllm": {"url": "http://localhost:1"}}
_BOTH = {"model": "m", "train": ["tokens", "denoising"]}
_NFT_ROLLOUT = {**_SIZE, **_GROUPS, "sde_window_size": 0, "shared_noise": False}
_NFT = {"algorithm": "nft"}
_PIPELINE = {"policy": {"kind": "diffusers", "model": "m"}, "rollout": {**_SIZE, **_GROUPS, "guidance_scale": 4.5}}
BASES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "sets": {"data": {"datasets": [{"name": "a", "prompts": "a.txt"}, {"name": "b", "prompts": "b.txt"}]}},
    "decoder": {"policy": {"model": "m", "train": ["denoising"]}},
    "both": {"policy": _BOTH, "rollout": {**_SIZE, **_GROUPS, "images_per_sample": 5}},
    "pipeline": _PIPELINE,
    "text": _TEXT,
    "engine": {**_TEXT, "rollout": {**_TEXT["rollout"], **_SERVED}},  # type: ignore[dict-item]
    "decoder nft": {"policy": {"model": "m", "train": ["denoising"]}, "rollout": _NFT_ROLLOUT, "update": _NFT},
    "pipeline nft": {**_PIPELINE, "rollout": {**_NFT_ROLLOUT, "guidance_scale": 4.5}, "update": _NFT},
    "pipeline awm": {**_PIPELINE, "rollout": {**_NFT_ROLLOUT, "guidance_scale": 1.0}, "update": {"algorithm": "awm"}},
    "pipeline ram": {**_PIPELINE, "rollout": {**_NFT_ROLLOUT, "guidance_scale": 1.0}, "update": {"algorithm": "ram"}},
    "both nft": {
        "policy": _BOTH,
        "rollout": {**_NFT_ROLLOUT, "images_per_sample": 5},
        "update": {"denoising": _NFT},
    },
}
_COMMON = {
    "run": {"name": "x", "iterations": 4, "seed": 7},
    "policy": {"model": "m"},
    "data": {"prompts": "prompts.txt"},
    "rollout": {**_SIZE, **_GROUPS},
    "rewards": [{"reward": "jpeg"}],
}


def values_of(base: str, changes: str = "") -> dict[str, Any]:
    """A base with changes in turn, `key=value; key=value`; the entry after the last of a list is added to it."""
    values: dict[str, Any] = deepcopy({**_COMMON, **BASES[base]})
    for place, value in parsed(changes):
        *above, last = place.split(".")
        inner: Any = values
        for name in above:
            inner = inner[int(name)] if name.isdigit() else inner.setdefault(name, {})
        if last.isdigit():
            inner[int(last) :] = [value]
        else:
            inner[last] = value
    return values


def parsed(changes: str) -> list[tuple[str, Any]]:
    """Key and value of each change."""
    pairs = [each.lstrip("!").partition("=") for each in changes.split("; ") if each]
    return [(place, parse_yaml(value, place)) for place, _, value in pairs]


def configured(base: str, changes: str = "") -> RunConfig:
    return check_config(values_of(base, changes))


def problems(base: str, changes: str = "") -> list[tuple[str, object]]:
    """Place and value of each mistake."""
    try:
        configured(base, changes)
    except InputError as errors:
        return [(error.place, error.value) for error in errors.errors]
    return []


def expected(row: str | Sequence[Any]) -> tuple[str, str, object]:
    """Changes, place and value of a row: of a text those of the change with a `!` before it."""
    if not isinstance(row, str):
        changes, place, value = row
        return changes, place, value
    ((place, value),) = parsed("; ".join(each for each in row.split("; ") if each.startswith("!")))
    return row, place, value


TINY = Path(configs.__file__).parent / "tiny.yaml"
TINY_TEXT = TINY.with_name("tiny_text.yaml")


@pytest.mark.parametrize(
    ("base", "changes", "renderings", "rows", "samples"),
    [
        ("tokens", "", (1,) * 12, {"tokens": 36}, 36),
        ("text", "", (1,) * 12, {"tokens": 36}, 36),
        ("decoder", "", (12,), {"denoising": 36}, 36),
        ("pipeline", "", (12,), {"denoising": 36}, 36),
        # 12 drafts, one of them 5 times: 16 images of a prompt.
        ("both", "", (5,) + (1,) * 11, {"tokens": 36, "denoising": 15}, 48),
        (
            *("both", "rollout.images_per_sample=2; rollout.samples_with_images=12"),
            *((2,) * 12, {"tokens": 36, "denoising": 72}, 72),
        ),
    ],
)
def test_groups_and_rows(
    base: str, changes: str, renderings: tuple[int, ...], rows: dict[Any, int], samples: int
) -> None:
    config = configured(base, changes)
    assert config.images_of_samples == renderings
    assert [(stream, config.rows_of(stream)) for stream in config.streams] == list(rows.items())
    assert config.samples_per_iteration == samples


def test_the_order_of_the_parts_does_not_matter() -> None:
    turned = configured("both", "policy.train=[denoising, tokens]")
    assert turned.streams == ("tokens", "denoising")
    assert turned == configured("both")
    assert run_identity(turned)["policy"]["train"] == ["tokens", "denoising"]


def test_each_component_has_an_update_of_its_own() -> None:
    updates = configured(
        "both", "update={tokens: {learning_rate: 1e-4, minibatch_size: 12}, denoising: {clip_range: 2e-5}}"
    ).updates
    assert list(updates) == ["tokens", "denoising"]
    assert (updates["tokens"].learning_rate, updates["tokens"].clip_range) == (1e-4, 0.2)
    assert (updates["denoising"].learning_rate, updates["denoising"].clip_range) == (3e-4, 2e-5)
    assert (updates["tokens"].minibatch_size, updates["denoising"].minibatch_size) == (12, None)


@pytest.mark.parametrize("base", ["decoder", "pipeline"])
def test_denoising_alone_is_updated_by_its_own_defaults(base: str) -> None:
    config = configured(base)
    update = config.updates["denoising"]
    assert update is config.update
    assert isinstance(update, DenoisingUpdateSection)
    assert (update.clip_range, update.learning_rate, update.kl_estimator) == (1e-4, 3e-4, "exact")
    assert UpdateSection.model_validate(update.model_dump()).model_dump() == update.model_dump()


def test_a_schedule_has_the_length_of_its_own_stream() -> None:
    of_tokens = "{lr_scheduler: linear, epochs: 2, minibatch_size: 12}"
    config = configured("both", f"update.tokens={of_tokens}; update.denoising={{lr_scheduler: linear, epochs: 2}}")
    # 4 iterations x 2 epochs x (36 rows in minibatches of 12, 15 rows at once).
    steps = {stream: update.total_steps for stream, update in config.scheduled_updates.items()}
    assert steps == {"tokens": 24, "denoising": 8}
    assert run_identity(config)["run"]["iterations"] == 4


def test_the_reference_is_kept_where_a_component_uses_it() -> None:
    config = configured("both", "update.denoising.kl_coef=0.1")
    assert config.references == {"tokens": "none", "denoising": "device"}


def test_one_window_for_an_iteration() -> None:
    assert configured("tokens").window_start(1) is None
    assert configured("text").window_start(1) is None
    noise = "rollout.sde_window=random; rollout.sde_window_range=[1, 6]; rollout.sde_window_size=2"
    drawn = [configured("both", noise).window_start(iteration) for iteration in range(1, 5)]
    assert drawn == [1 + derive_seed(7, "window", iteration) % 4 for iteration in range(1, 5)]


def test_the_tolerance_is_by_stream_and_precision() -> None:
    parity = ParitySection()
    rounded = ParityTolerance(0.7, 0.03, rounding=0.01)
    assert parity.tolerance("tokens", in_fp32=False, rounding=rounded) == rounded
    assert parity.tolerance("denoising", in_fp32=True) == ParityTolerance(1e-5, 1e-6)
    assert parity.tolerance("denoising", in_fp32=False) == ParityTolerance(1e-3, 1e-4)
    summed = parity.tolerance("denoising", in_fp32=True, summed_values=1024)
    assert summed == ParityTolerance(1024 * 1e-5, 1024 * 1e-6)
    assert ParitySection(mean_difference=2.0).tolerance("denoising", in_fp32=True) == ParityTolerance(1e-5, 2.0)
    engine = [parity.tolerance("tokens", in_fp32=each, by_engine=True, rounding=rounded) for each in (True, False)]
    # No tighter than what other kernels round.
    assert engine == [ParityTolerance(1e-3, 1e-4, 1e-3), ParityTolerance(0.7, 0.05, 0.02, 0.01)]
    assert ParitySection(share_beyond=0.0).tolerance("tokens", in_fp32=True, by_engine=True).share_beyond == 0


@pytest.mark.parametrize("base", BASES)
def test_what_was_stored_is_the_same_configuration(base: str) -> None:
    config = configured(base)
    stored = json.loads(json.dumps(config.model_dump(mode="json")))
    assert check_config(stored) == config
    replay = as_replay(config, ReplaySection(source="y", iterations=(1,), max_staleness=0))
    assert isinstance(replay, type(config))
    assert replay.updates == config.updates
    assert replay.model_dump(exclude={"replay"}) == config.model_dump()


@pytest.mark.parametrize(("base", "stream"), [("tokens", "tokens"), ("text", "tokens"), ("pipeline", "denoising")])
def test_the_only_stream_may_be_named(base: str, stream: str) -> None:
    named = configured(base, f"update.{stream}.kl_coef=0.1")
    assert named == configured(base, "update.kl_coef=0.1")
    assert named.model_dump()["update"]["kl_coef"] == 0.1
    assert problems(base, f"update.{stream}.kl_coef=-0.1") == [(f"update.{stream}.kl_coef", -0.1)]


def test_steps_and_guidance_of_held_out_images() -> None:
    config = configured("tokens", "evaluate={num_inference_steps: 40, guidance_scale: 7.0}")
    assert (config.rollout.num_inference_steps, config.evaluation_rollout.num_inference_steps) == (10, 40)
    assert config.evaluation_rollout.guidance_scale == 7.0
    assert configured("text").evaluation_rollout == configured("text").rollout


def test_images_of_a_pipeline_differ_by_their_first_noise() -> None:
    shared = configured("pipeline", "rollout.shared_noise=true")
    assert (shared.rollout.shared_noise, shared.evaluation_rollout.shared_noise) == (True, False)
    assert configured("decoder").evaluation_rollout.shared_noise


@pytest.mark.parametrize("base", ["pipeline nft", "decoder nft"])
def test_diffusion_nft_records_finished_images_alone(base: str) -> None:
    config = configured(base)
    assert [config.window_start(iteration) for iteration in (1, 2)] == [10, 10]
    assert isinstance(config.update, NftUpdateSection)
    assert config.update.learning_rate == 3e-4
    assert config.updates["denoising"].corrected(ReplaySection.model_fields["correction"].default) == config.update
    assert run_identity(config)["update"]["algorithm"] == "nft"
    assert configured("pipeline", "update.algorithm=grpo") == configured("pipeline")


@pytest.mark.parametrize(("base", "place"), [("pipeline nft", "update"), ("both nft", "update.denoising")])
def test_a_stored_configuration_takes_another_algorithm_with_its_own_defaults(base: str, place: str) -> None:
    values = configured(base, f"{place}={{algorithm: nft, learning_rate: 0.01, advantage_clip: 5.0}}").model_dump(
        mode="json"
    )
    overrides = [f"{place}.algorithm=awm", f"{place}.epochs=2"]
    change_algorithm(values, overrides)
    update = as_config(values, overrides).updates["denoising"]
    assert isinstance(update, AwmUpdateSection)
    assert (update.learning_rate, update.epochs, update.advantage_clip) == (0.01, 2, 1.0)


@pytest.mark.parametrize(("base", "wanted"), [("pipeline", "awm"), ("decoder", "nft"), ("pipeline nft", "grpo")])
def test_an_algorithm_is_refused_whose_rollouts_have_something_else(base: str, wanted: str) -> None:
    with pytest.raises(InputError) as refused:
        change_algorithm(configured(base).model_dump(mode="json"), [f"update.algorithm={wanted}"])
    assert (refused.value.place, refused.value.value) == ("update.algorithm", wanted)


def test_of_both_parts_the_decoder_can_be_trained_by_diffusion_nft() -> None:
    config = configured("both nft")
    objectives = {stream: update.objective for stream, update in config.updates.items()}
    assert objectives == {"tokens": "grpo", "denoising": "nft"}
    assert [config.window_start(iteration) for iteration in (1, 2)] == [10, 10]
    assert run_identity(config)["update"]["denoising"]["algorithm"] == "nft"


def test_a_function_gives_its_name_to_its_metrics() -> None:
    def function(reference: str, **fields: Any) -> dict[str, Any]:
        return {"reward": "function", "settings": {"function": reference}, **fields}

    references = ["mine.py:is_short", "pack.mod:Judge.score", "m:_private", "m:größe"]
    labels = [RewardSection(**function(each)).label for each in references]
    assert labels == ["is_short", "Judge.score", "private", "function"]
    assert RewardSection(**function("m:f", name="own")).label == "own"
    two = "; ".join(f"rewards.{each}={{reward: function, settings: {{function: '{each}.py:f'}}}}" for each in (0, 1))
    assert problems("tokens", two) == [("rewards", "f")]


def identity(*overrides: str) -> dict[str, Any]:
    # A revision is one of a hub name.
    return run_identity(read_config(TINY, ["policy.model=organisation/model", *overrides]))


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("rollout.vllm.url=[http://a,http://b/v1]", None),
        ("rollout.vllm={command: vllm serve}", None),
        ("rollout.vllm.concurrency=9", None),
        ("rollout.vllm.dtype=bfloat16", "rollout.vllm.dtype None -> bfloat16"),
    ],
)
def test_the_place_of_a_server_changes_no_result(override: str, change: str | None) -> None:
    values = ["policy.lora={}", "rollout.engine=vllm", "rollout.vllm={url: http://localhost:1}"]
    before, after = (run_identity(read_config(TINY_TEXT, [*values, *more])) for more in ([], [override]))
    assert list(changed_settings(before, after)) == ([change] if change else [])


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("run.keep_policies={last: 1}", None),
        ("update.ema=null", None),
        ("update.ema=0.9", "update.ema None -> 0.9"),
        ("policy.adapter=null", None),
        ("data.split=test", "data.split None -> test"),
        ("data.streaming=true", None),
        ("policy.revision=v1", "policy.revision None -> v1"),
        ("policy.attn_implementation=eager", "policy.attn_implementation None -> eager"),
        ("policy.denoising_lora=null", None),
        ("policy.quantization=null", None),
        ("policy.quantization.kind=nf4", "policy.quantization added"),
        ("policy.lora.use_dora=false", None),
        ("policy.lora.init_lora_weights=true", None),
        ("policy.lora.init_lora_weights=olora", "policy.lora.init_lora_weights True -> olora"),
        ("policy.lora.modules_to_save=[norm]", "policy.lora.modules_to_save None -> ['norm']"),
        ("update.micro_batch_size=24", None),
    ],
)
def test_a_setting_counts_where_it_changes_results(override: str, change: str | None) -> None:
    assert list(changed_settings(identity(), identity(override))) == ([change] if change else [])


def test_another_reward_is_named_and_not_shown_with_all_its_settings() -> None:
    changed = identity("rewards.0.reward=mse", "rewards.0.settings={}")
    assert list(changed_settings(identity(), changed)) == ["rewards.mse added", "rewards.r2 removed"]
    changes = changed_settings(identity(), identity("policy.lora=null", "policy.dtype=float32"))
    assert "policy.lora removed" in changes


def test_a_number_of_minibatches_is_in_the_keys_of_those_runs_alone_that_set_it() -> None:
    assert "minibatches" not in identity()["update"]
    assert identity("update.minibatches=2", "update.minibatch_size=null")["update"]["minibatches"] == 2


def test_the_shipped_rewards_by_stream_need_both() -> None:
    file = Path(configs.__file__).parent / "rewards" / "by_stream.yaml"
    rewards: dict[str, Any] = {"rewards": yaml.safe_load(file.read_text())["rewards"]}
    targets = "data.targets=folder"
    check_config(values_of("both", targets) | rewards)
    with pytest.raises(InputError) as refused:
        check_config(values_of("tokens", targets) | rewards)
    (error,) = refused.value.errors
    assert (error.place, error.value) == ("rewards.1.streams", "denoising")
