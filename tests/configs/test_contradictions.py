"""Combinations that cannot be, each with the field to change, and their neighbours that can."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from configs.loader import check_config, read_config
from configs.schema import changed_settings, run_identity
from configs.scoring import RewardSection
from grpo_core.errors import InputError

JPEG = {"reward": "jpeg", "settings": {"direction": "compressible"}}
OTHER = {**JPEG, "name": "other"}
SSIM = {"reward": "ssim"}
ANSWER = {"reward": "answer"}
LINEAR = {"lr_scheduler": "linear", "warmup_steps": 5}
TEXT = {"policy": {"kind": "causal_lm", "model": "m"}, "rollout": {"max_completion_length": 8}}
GDPO = {"aggregation": "normalize_then_sum"}
SIZE = {"height": 64, "width": 64, "prompts_per_iteration": 2, "group_size": 4}
TWO = [{"name": "a", "prompts": "a.txt"}, {"name": "b", "prompts": "b.txt"}]
JOINT = {
    "policy": {"model": "m", "train": ["tokens", "denoising"]},
    "rollout": {**SIZE, "images_per_sample": 2, "num_inference_steps": 10},
}
GUARD = {"reward": "sharpness"}
HELD_OUT = {"prompts": "q.txt", "every": 1}


VALUES: dict[str, Any] = {
    "run": {"name": "x", "iterations": 1},
    "policy": {"model": "somewhere"},
    "data": {"prompts": "prompts.txt"},
    "rollout": SIZE,
    "rewards": [JPEG],
}


def quantized(kind: str = "nf4", **changes: Any) -> dict[str, Any]:
    """A policy over a quantized base; changes of the quantization, or of the policy."""
    own = {name: changes.pop(name) for name in ("double_quant",) if name in changes}
    return {"policy": {"model": "m", "quantization": {"kind": kind, **own}, **changes}}


def engine(rollout: dict[str, Any] | None = None, **policy: Any) -> dict[str, Any]:
    """A text policy whose rollouts a vLLM server samples, with changes of the rollout and the policy."""
    served = {"max_completion_length": 8, "engine": "vllm", "vllm": {"url": "http://localhost:1"}}
    return {
        "policy": {"kind": "causal_lm", "model": "m", **policy},
        "rollout": {**served, **(rollout or {})},
        "rewards": [ANSWER],
    }


def found(**sections: Any) -> list[tuple[str, object]]:
    try:
        check_config(VALUES | sections)
    except InputError as errors:
        return [(error.place, error.value) for error in errors.errors]
    return []


@pytest.mark.parametrize("kind", ["causal_lm", "vision_lm"])
def test_an_engine_of_files_in_use_is_refused_with_what_replaces_it(kind: str) -> None:
    sections = engine({"engine": "continuous_batching", "vllm": None}, kind=kind)
    with pytest.raises(InputError) as refused:
        check_config({"run": {"name": "x", "iterations": 1}, "data": {"prompts": "p"}, **sections})
    (error,) = refused.value.errors
    assert (error.place, error.value) == ("rollout.engine", "continuous_batching")
    assert {"policy", "vllm", "rollout.vllm", "docs/operations.md"} <= set(re.findall(r"[\w./]+\w", error.hint))


@pytest.mark.parametrize("old", ["lost", "max_delay"])
def test_retries_by_kind_are_refused_with_what_to_write(old: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(VALUES | {"placement": {"retries": {old: 3, "delay": 1.0}}})
    (error,) = caught.value.errors
    assert (error.place, error.value) == ("placement.retries", {old: 3, "delay": 1.0})
    assert "write {tries: 5, delay: 2}" in error.hint


def test_everything_is_reported_at_once() -> None:
    wrong = found(
        rewards=[{**SSIM, "weight": 0.0, "threshold": 1.0}],
        update={"minibatch_size": 9, "warmup_steps": 5, "delta": 1.1, "mismatch": {"floor": 1.0, "cap": 1.0}},
        advantages={**GDPO, "kl_coef": 0.1},
    )
    assert [place for place, _ in wrong] == [
        "rewards.0.threshold",
        "advantages.kl_coef",
        "update.mismatch.floor",
        "update.delta",
        "update.warmup_steps",
        "rewards",
        "rewards.0.reward",
        "update.minibatch_size",
    ]


@pytest.mark.parametrize(
    ("sections", "place", "value"),
    [
        ({"update": {"minibatch_size": 9}}, "update.minibatch_size", 9),
        ({"update": {"minibatches": 9}}, "update.minibatches", 9),
        ({"update": {"minibatches": 2, "minibatch_size": 2}}, "update.minibatch_size", 2),
        (quantized(lora=None, dtype="float32"), "policy.quantization.kind", "nf4"),
        (quantized(kind="int8"), "policy.quantization", {"kind": "int8"}),
        (quantized(lora={"init_lora_weights": "olora"}), "policy.lora.init_lora_weights", "olora"),
        (quantized(dtype="float32", autocast="bfloat16"), "policy.autocast", "bfloat16"),
        ({**quantized(), "placement": {"devices": ["cpu", "cpu"], "sharding": "fsdp2"}}, "placement.sharding", "fsdp2"),
        (engine(lora=None, dtype="float32"), "policy.lora", None),
        (engine(lora={"use_dora": True}), "policy.lora.use_dora", True),
        (engine(lora={"modules_to_save": ["norm"]}, dtype="float32"), "policy.lora.modules_to_save", ["norm"]),
        (engine(lora={"init_lora_weights": "pissa"}), "policy.lora.init_lora_weights", "pissa"),
        (engine(lora={"rank": 513}), "policy.lora.rank", 513),
        (engine(quantization={"kind": "nf4"}), "policy.quantization", {"kind": "nf4"}),
        (engine(kind="vision_lm", freeze_vision=False), "policy.freeze_vision", False),
        (engine({"top_p": 0.9}), "rollout.top_p", 0.9),
        (engine({"min_p": 0.1}), "rollout.min_p", 0.1),
        (engine({"vllm": None}), "rollout.vllm", None),
        (engine({"vllm": {}}), "rollout.vllm.url", None),
        (engine({"vllm": {"url": "localhost:1"}}), "rollout.vllm.url", "localhost:1"),
        (engine({"vllm": {"url": ["http://a", "http://a/v1/"]}}), "rollout.vllm.url", ["http://a", "http://a"]),
        (engine({"vllm": {"url": "http://a", "command": "vllm serve"}}), "rollout.vllm.command", "vllm serve"),
        (
            {
                **engine({"vllm": {"command": "vllm serve"}}),
                "placement": {"devices": ["cpu", "cpu"]},
                "advantages": {"kl_coef": 0.1},
            },
            "rollout.vllm.command",
            "vllm serve",
        ),
        (
            {
                **engine({"vllm": {"command": "vllm serve"}}),
                "placement": {"rollouts": {"timeout": 60.0}},
                "run": {"name": "x", "iterations": 1, "staleness": 1},
            },
            "rollout.vllm.command",
            "vllm serve",
        ),
        (
            engine({"vllm": {"url": "http://a", "token_env": "sk-1"}}),
            "rollout.vllm.token_env",
            "not the name of a variable",
        ),
        (
            {"policy": {"model": "m", "offload": "auto"}, "placement": {"devices": ["cpu"] * 2, "sharding": "fsdp2"}},
            "policy.offload",
            "auto",
        ),
        (
            {**TEXT, "policy": {**TEXT["policy"], "offload": "components"}, "rewards": [ANSWER]},
            "policy.offload",
            "components",
        ),
        ({"update": {"offload_optimizer": True, "optimizer": "adamw_8bit"}}, "update.offload_optimizer", True),
        ({"data": {"prompts": "p", "prompt_column": {"user": "q"}}}, "data.prompt_column", {"user": "q"}),
        ({**TEXT, "rewards": [ANSWER], "data": {"prompts": "p", "prompt_column": {}}}, "data.prompt_column", {}),
        ({"data": {"datasets": TWO, "streaming": True}}, "data.streaming", True),
        ({"update": {"kl_coef": 0.1, "reference": {"placement": "none"}}}, "update.kl_coef", 0.1),
        ({"update": {"reference": {"refresh_every": 2}}}, "update.reference.refresh_every", 2),
        ({"update": {"kl_coef": 0.1, "reference": {"placement": "cpu"}}}, "update.reference.placement", "cpu"),
        ({"update": {"mask_truncated": True}}, "update.mask_truncated", True),
        ({"update": {"total_steps": 9}}, "update.total_steps", 9),
        ({"update": {"warmup_steps": 5}}, "update.warmup_steps", 5),
        ({"update": LINEAR, "run": {"name": "x", "iterations": 5}}, "update.warmup_steps", 5),
        ({"policy": {"model": "m", "lora": None}}, "policy.dtype", "bfloat16"),
        ({"policy": {"model": "m", "freeze_vision": False}}, "policy.freeze_vision", False),
        ({"policy": {"model": "m", "frozen": ".*embed.*"}}, "policy.frozen", ".*embed.*"),
        ({"policy": {"model": "m", "autocast": "bfloat16"}}, "policy.autocast", "bfloat16"),
        ({"policy": {"model": "m", "adapter": "a", "frozen": ".*"}}, "policy.frozen", ".*"),
        (
            {"policy": {"model": "m", "lora": {"modules_to_save": ["norm"]}}},
            "policy.lora.modules_to_save",
            ["norm"],
        ),
        ({"policy": {"model": ".", "revision": "v1"}}, "policy.revision", "v1"),
        ({"placement": {"devices": [0, 1, 0]}}, "placement.devices", [0, 1, 0]),
        ({"placement": {"devices": [0, "cpu"]}}, "placement.devices", [0, "cpu"]),
        ({"placement": {"devices": ["auto", "auto"]}}, "placement.devices", ["auto", "auto"]),
        (
            {
                "placement": {"devices": [0, 1]},
                "rewards": [{"reward": "aesthetic", "settings": {"device": "cuda:1"}}],
            },
            "rewards.0.settings.device",
            "cuda:1",
        ),
        (
            {"policy": {"model": "m", "dtype": "float32", "attn_implementation": "flash_attention_2"}},
            "policy.attn_implementation",
            "flash_attention_2",
        ),
        (
            {
                "policy": {"model": "m", "lora": {"use_dora": True}},
                "placement": {"devices": ["cpu", "cpu"], "sharding": "fsdp2"},
            },
            "placement.sharding",
            "fsdp2",
        ),
        ({"placement": {"rollouts": {"shards": 2}}}, "placement.rollouts.shards", 2),
        ({"placement": {"update": {"pool": "p"}}, "storage": {"root": "memory://x"}}, "storage.root", "memory://x"),
        ({"rewards": [JPEG, JPEG]}, "rewards", "jpeg"),
        ({"rewards": [{"reward": "jepg"}]}, "rewards.0.reward", "jepg"),
        ({"rewards": [JPEG, {"reward": "psnr", "settings": {"scale": 1}}]}, "rewards.1.settings", "scale"),
        ({"rewards": [{"reward": "edge_density", "settings": {"high": -1.0}}]}, "rewards.0.settings.high", -1.0),
        ({"rewards": [{**JPEG, "name": "x.manifest.json"}]}, "rewards", "x.manifest.json"),
        ({"rewards": [JPEG, {**OTHER, "streams": ["denoising"]}]}, "rewards.1.streams", "denoising"),
        ({"rewards": [{**JPEG, "streams": ["decoder"]}]}, "rewards.0.streams.0", "decoder"),
        ({"rewards": [JPEG, {**OTHER, "streams": []}]}, "rewards.1.streams", []),
        ({**JOINT, "rewards": [{**JPEG, "streams": ["tokens"]}]}, "rewards.streams", []),
        (
            {**JOINT, "rewards": [{**JPEG, "streams": ["tokens"]}, {**OTHER, "weight": 0.0}]},
            "rewards.streams",
            ["other"],
        ),
        (
            {"guardrails": {"rewards": [{**GUARD, "streams": ["tokens"]}]}, "evaluate": HELD_OUT},
            "guardrails.rewards.0.streams",
            ("tokens",),
        ),
        ({"rewards": [{"reward": "answer"}]}, "rewards.0.reward", "answer"),
        (TEXT, "rewards.0.reward", "jpeg"),
        ({"rewards": [SSIM]}, "rewards.0.reward", "ssim"),
        ({"data": {"prompts": "p", "width": 96}}, "data.width", 96),
        ({"data": {"datasets": [*TWO, {"name": "c", "prompts": "p", "height": 8}]}}, "data.datasets.2.height", 8),
        ({"data": {"datasets": TWO, "height": 64}}, "data.height", 64),
        (
            {**TEXT, "rewards": [{"reward": "answer"}], "evaluate": {**HELD_OUT, "height": 64}},
            "evaluate.height",
            64,
        ),
        ({"data": {"prompts": "p", "max_image_pixels": 9}}, "data.max_image_pixels", 9),
        ({"data": {"datasets": TWO, "image_column": "source"}}, "data.image_column", "source"),
        ({"data": {}}, "data.prompts", None),
        ({"data": {"datasets": TWO, "targets": "folder"}}, "data.targets", "folder"),
        ({"evaluate": {"datasets": TWO, "limit": 3}}, "evaluate.limit", 3),
        ({"data": {"datasets": [*TWO, TWO[0]]}}, "data.datasets", "a"),
        ({"data": {"datasets": TWO}, "rewards": [JPEG, {**OTHER, "datasets": ["c"]}]}, "rewards.1.datasets", "c"),
        ({"rewards": [JPEG, {**OTHER, "datasets": []}]}, "rewards.1.datasets", []),
        ({"data": {"datasets": TWO}, "rewards": [{**JPEG, "datasets": ["a"]}]}, "data.datasets", "b"),
        (
            {"data": {"datasets": TWO[:1]}, "evaluate": HELD_OUT, "rewards": [{**JPEG, "datasets": ["a"]}]},
            "evaluate.prompts",
            "default",
        ),
        (
            {"evaluate": HELD_OUT, "guardrails": {"rewards": [{**GUARD, "weight": 0.5}]}},
            "guardrails.rewards.0.weight",
            0.5,
        ),
        ({"guardrails": {"rewards": [GUARD]}}, "guardrails.rewards", ["sharpness"]),
        ({"guardrails": {"on_fall": "stop"}}, "guardrails.on_fall", "stop"),
    ],
)
def test_refused(sections: dict[str, Any], place: str, value: object) -> None:
    assert found(**sections) == [(place, value)]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"data": {"prompts": "p", "image_column": "source", "max_image_pixels": 9}},
        {"update": {"minibatch_size": 8}},
        quantized(double_quant=True, lora={"use_dora": True}),
        quantized(lora=None, adapter="a"),
        {"update": {"kl_coef": 0.1, "reference": {"refresh_every": 2, "mix": 0.5}}},
        {"update": {"warmup_steps": 5, "lr_scheduler": "constant_with_warmup"}},
        {"update": {**LINEAR, "total_steps": 6}},
        {"update": LINEAR, "run": {"name": "x", "iterations": 6}},
        {"advantages": {"kl_coef": 0.1}},
        {"policy": {"model": "m", "dtype": "float32", "lora": None, "frozen": "x"}},
        {"policy": {"model": "m", "dtype": "float32", "autocast": "bfloat16"}},
        {"policy": {"model": "m", "adapter": "a"}},
        {"policy": {"model": "m", "revision": "v1", "attn_implementation": "flash_attention_2"}},
        {**TEXT, "rewards": [{"reward": "answer"}], "update": {"mask_truncated": True}},
        {"rewards": [JPEG, OTHER]},
        {"rewards": [{**JPEG, "weight": -1.0}]},
        {"data": {"prompts": "p", "width": 96, "height": 64}},
        {"data": {"datasets": TWO}, "evaluate": {"datasets": TWO}},
        {"data": {"datasets": TWO}, "rewards": [{**JPEG, "datasets": ["a"]}, {**OTHER, "datasets": ["b"]}]},
        {"evaluate": HELD_OUT, "guardrails": {"rewards": [GUARD], "on_fall": "stop"}},
        {**JOINT, "rewards": [{**JPEG, "streams": ["tokens"]}, {**OTHER, "streams": ["denoising"]}]},
        {**JOINT, "rewards": [JPEG, {**OTHER, "weight": 0.0, "streams": ["denoising"]}]},
        {"rewards": [{**JPEG, "streams": ["tokens"]}]},
        {**engine({"vllm": {"command": "vllm serve"}}), "placement": {"devices": ["cpu", "cpu"]}},
    ],
)
def test_allowed(sections: dict[str, Any]) -> None:
    assert found(**sections) == []


@pytest.mark.parametrize("targets", [{"targets": "folder"}, {"target_column": "target"}])
def test_a_reward_that_compares_needs_targets_in_both_sections(targets: dict[str, str]) -> None:
    data, evaluate = {"prompts": "p.txt"}, {"prompts": "q.txt"}
    missing = ("rewards.0.reward", "ssim")
    assert found(rewards=[SSIM], data=data, evaluate=evaluate) == [missing, missing]
    assert found(rewards=[SSIM], data=data | targets, evaluate=evaluate) == [missing]
    assert found(rewards=[SSIM], data=data | targets, evaluate=evaluate | targets) == []


def test_a_reward_that_compares_with_a_source_needs_images_in_prompts() -> None:
    data, evaluate = {"prompts": "p.txt"}, {"prompts": "q.txt"}
    missing, images = ("rewards.0.reward", "ssim"), {"image_column": "image"}
    reward = {**SSIM, "settings": {"against": "source"}}
    assert found(rewards=[reward], data=data, evaluate=evaluate) == [missing, missing]
    assert found(rewards=[reward], data=data | images, evaluate=evaluate) == [missing]
    assert found(rewards=[reward], data=data | images, evaluate=evaluate | images) == []
    assert found(rewards=[SSIM], data=data | images, evaluate=evaluate | images) == [missing, missing]


def test_the_shipped_rewards_by_stream_need_both() -> None:
    file = Path(configs.__file__).parent / "rewards" / "by_stream.yaml"
    rewards = yaml.safe_load(file.read_text())["rewards"]
    data = {"data": {"prompts": "p", "targets": "folder"}}
    assert found(**JOINT, **data, rewards=rewards) == []
    assert found(**data, rewards=rewards) == [("rewards.1.streams", "denoising")]


def test_a_function_gives_its_name_to_its_metrics() -> None:
    def function(reference: str, **fields: Any) -> dict[str, Any]:
        return {"reward": "function", "settings": {"function": reference}, **fields}

    references = ["mine.py:is_short", "pack.mod:Judge.score", "m:_private", "m:größe"]
    labels = [RewardSection(**function(each)).label for each in references]
    assert labels == ["is_short", "Judge.score", "private", "function"]
    assert RewardSection(**function("m:f", name="own")).label == "own"
    assert found(rewards=[function("a.py:f"), function("b.py:f")]) == [("rewards", "f")]


TINY = Path(configs.__file__).parent / "tiny.yaml"
TINY_TEXT = TINY.with_name("tiny_text.yaml")


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
