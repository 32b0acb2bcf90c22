"""Combinations that cannot be, each with the field to change, and their neighbours that can."""

import re

import pytest

from grpo_core.errors import InputError
from tests.configs.test_streams import configured, expected, problems

HELD_OUT = "evaluate={prompts: q.txt, every: 1}"
OTHER = "reward: jpeg, name: other"
DEVICES = "placement.devices=[cpu, cpu]"
PREVIEWS = "rollout.previews={per_prompt: 48, steps: 4}"
COMMAND = "rollout.vllm={command: vllm serve}"
# One change of a row has a `!`: its key is refused with its value. Other rows name place and value.
REFUSED: dict[str, list[str | tuple[str, str, object]]] = {
    "tokens": [
        (PREVIEWS, "rollout.previews", {"per_prompt": 48, "steps": 4, "keep": None}),
        "!update.minibatch_size=37",
        "!update.minibatches=37",
        "update.minibatches=2; !update.minibatch_size=2",
        "policy.lora=null; policy.dtype=float32; !policy.quantization.kind=nf4",
        "!policy.quantization={kind: int8}",
        "policy.quantization.kind=nf4; !policy.lora.init_lora_weights=olora",
        "policy.quantization.kind=nf4; policy.dtype=float32; !policy.autocast=bfloat16",
        f"policy.quantization.kind=nf4; {DEVICES}; !placement.sharding=fsdp2",
        f"{DEVICES}; placement.sharding=fsdp2; !policy.offload=auto",
        "update.optimizer=adamw_8bit; !update.offload_optimizer=true",
        "policy.lora=null; policy.dtype=float32; !update.optimizer=muon",
        "update.optimizer=lion; !update.eps=0.1",
        ("update.optimizer=lion; update.optimizer_kwargs={momentum: 0.9}", "update.optimizer_kwargs.momentum", 0.9),
        "!data.prompt_column={user: q}",
        "update.reference.placement=none; !update.kl_coef=0.1",
        "!update.reference.refresh_every=2",
        "update.kl_coef=0.1; !update.reference.placement=cpu",
        "!update.mask_truncated=true",
        "!update.total_steps=9",
        "!update.warmup_steps=5",
        "run.iterations=5; update.lr_scheduler=linear; !update.warmup_steps=5",
        ("policy.lora=null", "policy.dtype", "bfloat16"),
        "!policy.freeze_vision=false",
        "!policy.frozen=.*embed.*",
        "!policy.autocast=bfloat16",
        "policy.adapter=a; !policy.frozen=.*",
        "!policy.lora.modules_to_save=[norm]",
        "policy.model=.; !policy.revision=v1",
        "!placement.devices=[0, 1, 0]",
        "!placement.devices=[0, cpu]",
        "!placement.devices=[auto, auto]",
        (
            "placement.devices=[0, 1]; rewards=[{reward: aesthetic, settings: {device: 'cuda:1'}}]",
            *("rewards.0.settings.device", "cuda:1"),
        ),
        "policy.dtype=float32; !policy.attn_implementation=flash_attention_2",
        "rollout.cache_implementation=static; !policy.attn_implementation=flex_attention",
        f"policy.lora.use_dora=true; {DEVICES}; !placement.sharding=fsdp2",
        "!placement.rollouts.shards=2",
        "placement.update.pool=p; !storage.root=memory://x",
        ("rewards.1={reward: jpeg}", "rewards", "jpeg"),
        "!rewards.0.reward=jepg",
        ("rewards.1={reward: psnr, settings: {scale: 1}}", "rewards.1.settings", "scale"),
        ("rewards.0={reward: edge_density, settings: {high: -1.0}}", "rewards.0.settings.high", -1.0),
        ("rewards.0.name=x.manifest.json", "rewards", "x.manifest.json"),
        (f"rewards.1={{{OTHER}, streams: [denoising]}}", "rewards.1.streams", "denoising"),
        ("rewards.0.streams=[decoder]", "rewards.0.streams.0", "decoder"),
        (f"rewards.1={{{OTHER}, streams: []}}", "rewards.1.streams", []),
        (
            f"{HELD_OUT}; guardrails.rewards=[{{reward: sharpness, streams: [tokens]}}]",
            *("guardrails.rewards.0.streams", ("tokens",)),
        ),
        "!rewards.0.reward=answer",
        "!rewards.0.reward=ssim",
        "!data.width=96",
        "!data.max_image_pixels=9",
        ("data={}", "data.prompts", None),
        "evaluate.datasets=[{name: a, prompts: a.txt}]; !evaluate.limit=3",
        (f"rewards.1={{{OTHER}, datasets: []}}", "rewards.1.datasets", []),
        (
            f"data={{datasets: [{{name: a, prompts: a.txt}}]}}; {HELD_OUT}; rewards.0.datasets=[a]",
            *("evaluate.prompts", "default"),
        ),
        (
            f"{HELD_OUT}; guardrails.rewards=[{{reward: sharpness, weight: 0.5}}]",
            *("guardrails.rewards.0.weight", 0.5),
        ),
        ("guardrails.rewards=[{reward: sharpness}]", "guardrails.rewards", ["sharpness"]),
        "!guardrails.on_fall=stop",
        "!policy.train=[denoising, denoising]",
        "!rollout.noise_level=0.5",
        "!rollout.sde_type=cps",
        "!rollout.images_per_sample=2",
        "!update.kl_estimator=exact",
        "!update.loss=grpo_guard",
        "!policy.denoising_lora={rank: 8}",
        ("update.denoising.clip_range=1e-4", "update.denoising", "denoising"),
        "!update.algorithm=nft",
    ],
    "sets": [
        "!data.streaming=true",
        ("data.datasets.2={name: c, prompts: p, height: 8}", "data.datasets.2.height", 8),
        "!data.height=64",
        "!data.image_column=source",
        "!data.targets=folder",
        ("data.datasets.2={name: a, prompts: a.txt}", "data.datasets", "a"),
        (f"rewards.1={{{OTHER}, datasets: [c]}}", "rewards.1.datasets", "c"),
        ("rewards.0.datasets=[a]", "data.datasets", "b"),
    ],
    "text": [
        (PREVIEWS, "rollout.previews", "previews"),
        "!policy.offload=components",
        "!data.prompt_column={}",
        "!rewards.0.reward=jpeg",
        f"{HELD_OUT}; !evaluate.height=64",
        "!policy.train=[denoising]",
        "!evaluate.num_inference_steps=4",
        "!evaluate.guidance_scale=0.0",
        ("update.denoising.clip_range=1e-4", "update.denoising", "denoising"),
        "!update.algorithm=nft",
    ],
    "engine": [
        "policy.dtype=float32; !policy.lora=null",
        "!policy.lora.use_dora=true",
        "policy.dtype=float32; !policy.lora.modules_to_save=[norm]",
        "!policy.lora.init_lora_weights=pissa",
        "!policy.lora.rank=513",
        "!policy.quantization={kind: nf4}",
        "policy.kind=vision_lm; !policy.freeze_vision=false",
        "!rollout.top_p=0.9",
        "!rollout.min_p=0.1",
        "!rollout.cache_implementation=static",
        "!rollout.vllm=null",
        ("rollout.vllm={}", "rollout.vllm.url", None),
        "!rollout.vllm.url=localhost:1",
        ("rollout.vllm.url=[http://a, http://a/v1/]", "rollout.vllm.url", ["http://a", "http://a"]),
        "!rollout.vllm.command=vllm serve",
        (f"{COMMAND}; {DEVICES}; advantages.kl_coef=0.1", "rollout.vllm.command", "vllm serve"),
        (f"{COMMAND}; placement.rollouts.timeout=60.0; run.staleness=1", "rollout.vllm.command", "vllm serve"),
        ("rollout.vllm.token_env=sk-1", "rollout.vllm.token_env", "not the name of a variable"),
    ],
    "decoder": [
        (PREVIEWS, "rollout.shared_noise", True),
        "!rollout.samples_with_images=3",
        "!rollout.noise_level=0.0",
        "!update.entropy_coef=0.1",
        "!update.clip_range=0.2",
        "!update.clip_range=0.011",
        ("update.tokens={}", "update.tokens", "tokens"),
        "!rollout.sde_window_size=0",
    ],
    "pipeline": [
        "!policy.train=[tokens]",
        "!policy.train=[tokens, denoising]",
        "!rollout.sde_window_range=[0, 10]",
        ("rollout.num_inference_steps=5", "rollout.sde_window_range", [0, 5]),
        "!rollout.sde_window_every=3",
        "!rollout.branch=true",
        "rollout.shared_noise=true; rollout.sde_window_range=[0, 2]; !rollout.branch=true",
        "rollout.guidance_scale=1.0; !rollout.negative_prompt=grain",
        ("rollout.top_p=0.9", "rollout.top_p", "top_p"),
        "!update.mask_truncated=true",
        "!update.delta=1.5",
        ("update.loss=cispo", "update.loss_settings.ratio_cap", 5.0),
        ("update.mismatch.mode=mask", "update.mismatch.cap", 3.0),
        "!rollout.sde_window_size=0",
    ],
    "both": [
        ("rewards.0.streams=[tokens]", "rewards.streams", []),
        (f"rewards.0.streams=[tokens]; rewards.1={{{OTHER}, weight: 0.0}}", "rewards.streams", ["other"]),
        "!rollout.images_per_sample=1",
        # Not its minibatches as well, which no row is left for.
        "update.denoising.minibatch_size=4; !rollout.images_per_sample=1",
        "!rollout.samples_with_images=13",
        ("rollout.sde_window_size=6", "rollout.sde_window_range", [0, 5]),
        "!update.tokens.kl_estimator=exact",
        "!update.tokens.loss=flow_dppo",
        "!update.denoising.entropy_quantile=0.2",
        "!update.tokens.mask_truncated=true",
        "!advantages.kl_coef=0.1",
        "!update.denoising.clip_range_high=0.1",
        "!update.denoising.minibatch_size=16",
        "!update.denoising.warmup_steps=2",
        "update.denoising.lr_scheduler=linear; !update.denoising.warmup_steps=9",
        "!update.denoising.reference.refresh_every=2",
        # Settings of both streams stand in neither.
        ("update.kl_coef=0.1", "update.kl_coef", "kl_coef"),
        "!rollout.sde_window_size=0",
    ],
    "pipeline nft": (
        of_images := [
            "rollout.previews={per_prompt: 48}; !rollout.previews.steps=10",
            "rollout.previews={per_prompt: 48}; !rollout.previews.steps=0",
            "rollout.previews={steps: 9}; !rollout.previews.per_prompt=11",
            "rollout.previews={steps: 9}; !rollout.previews.per_prompt=100001",
            f"{PREVIEWS}; !rollout.previews.keep={{best: 6, worst: 5}}",
            (f"{PREVIEWS}; rollout.previews.keep={{best: 12, worst: 0}}", "rollout.previews.keep.worst", 0),
            "!rollout.sde_window_size=2",
            "rollout.num_inference_steps=4; !rollout.sde_window_size=2",
            "!rollout.shared_noise=true",
            "!rollout.sde_type=cps",
            ("rollout.sde_window_range=[0, 3]", "rollout.sde_window_range", (0, 3)),
            "!update.timesteps_per_image=11",
            ("update.clip_range=1e-4", "update.clip_range", "clip_range"),
            ("update.mismatch.mode=mask", "update.mismatch", "mismatch"),
            "!advantages.kl_coef=0.1",
            ("update.algorithm=[nft]", "update.algorithm", ("nft",)),
        ]
    ),
    "decoder nft": of_images,
    "pipeline awm": [
        "!rollout.sde_window_size=2",
        "!rollout.noise_level=0.5",
        "!run.staleness=17",
        ("rollout.logprob_reduction=sum", "rollout.logprob_reduction", "sum"),
        ("update.nft_beta=1.0", "update.nft_beta", "nft_beta"),
        ("update.clip_range_high=1e-4", "update.clip_range_high", "clip_range_high"),
        "!update.clip_range=1.0",
        "!update.error_power=1.5",
    ],
    "pipeline ram": [
        ("update.clip_range=1e-4", "update.clip_range", "clip_range"),
        ("update.advantage_clip=1.0", "update.advantage_clip", "advantage_clip"),
        "!update.reward_multiplier=0.0",
        "!advantages.kl_coef=0.1",
    ],
    "both nft": [
        (PREVIEWS, "rollout.previews", {"per_prompt": 48, "steps": 4, "keep": None}),
        "!rollout.shared_noise=true",
        ("update.denoising.clip_range=1e-4", "update.denoising.clip_range", "clip_range"),
        "!update.tokens.algorithm=nft",
        ("update.denoising.algorithm=grpo", "rollout.sde_window_size", 0),
    ],
}
ALLOWED: dict[str, list[str]] = {
    "tokens": [
        "data.image_column=source; data.max_image_pixels=9",
        "update.minibatch_size=36",
        "policy.quantization={kind: nf4, double_quant: true}; policy.lora.use_dora=true",
        "policy.quantization.kind=nf4; policy.lora=null; policy.adapter=a",
        "update.kl_coef=0.1; update.reference={refresh_every: 2, mix: 0.5}",
        "update.warmup_steps=5; update.lr_scheduler=constant_with_warmup",
        "update={lr_scheduler: linear, warmup_steps: 5, total_steps: 6}",
        "update={lr_scheduler: linear, warmup_steps: 5}; run.iterations=6",
        "advantages.kl_coef=0.1",
        "policy={model: m, dtype: float32, lora: null, frozen: x}",
        "policy={model: m, dtype: float32, autocast: bfloat16}",
        "policy.adapter=a",
        "policy.revision=v1; policy.attn_implementation=flash_attention_2",
        f"rewards.1={{{OTHER}}}",
        "rewards.0.weight=-1.0",
        "data.width=96; data.height=64",
        f"{HELD_OUT}; guardrails={{rewards: [{{reward: sharpness}}], on_fall: stop}}",
        "rewards.0.streams=[tokens]",
        "rollout.num_inference_steps=1; rollout.sde_window_size=2",
    ],
    "sets": [
        "evaluate.datasets=[{name: a, prompts: a.txt}, {name: b, prompts: b.txt}]",
        f"rewards.0.datasets=[a]; rewards.1={{{OTHER}, datasets: [b]}}",
    ],
    "text": ["update.mask_truncated=true"],
    "engine": [f"{COMMAND}; {DEVICES}"],
    "decoder": ["update.clip_range=0.2; rollout.logprob_reduction=sum", "rollout.temperature=0.9"],
    "pipeline": [
        "rollout.shared_noise=true; rollout.sde_window_range=[0, 3]; rollout.branch=true",
        PREVIEWS,
        "rollout.sde_window=sliding; rollout.sde_window_every=3",
        "rollout.negative_prompt=grain; evaluate.guidance_scale=1.0",
        "update.clip_range=1e-2",
        "update.delta=1.005",
        "update={loss: cispo, loss_settings: {ratio_cap: 1.001}, clip_range: 0.2}",
        "update={kl_estimator: k3, kl_coef: 0.04}",
    ],
    "both": [
        f"rewards.0.streams=[tokens]; rewards.1={{{OTHER}, streams: [denoising]}}",
        f"rewards.1={{{OTHER}, weight: 0.0, streams: [denoising]}}",
        "rollout.sde_window_range=[0, 9]; rollout.sde_window_size=9; rollout.top_p=0.9",
        "policy.denoising_lora={rank: 8, targets: attn}",
    ],
    "pipeline nft": ["update.timesteps_per_image=10", f"{PREVIEWS}; rollout.previews.keep={{best: 11, worst: 1}}"],
    "decoder nft": [PREVIEWS],
    "pipeline awm": [PREVIEWS, "update.clip_range=1e-4; update.kl_coef=0.3; run.staleness=16"],
    "pipeline ram": [PREVIEWS, "update.kl_coef=0.0"],
    "both nft": ["update.denoising={algorithm: v_grpo, clip_range: 0.1}"],
}


@pytest.mark.parametrize(
    ("base", "changes", "place", "value"),
    [(base, *expected(row)) for base, rows in REFUSED.items() for row in rows],
)
def test_refused(base: str, changes: str, place: str, value: object) -> None:
    assert problems(base, changes) == [(place, value)]


@pytest.mark.parametrize(("base", "changes"), [(base, row) for base, rows in ALLOWED.items() for row in ("", *rows)])
def test_allowed(base: str, changes: str) -> None:
    assert problems(base, changes) == []


@pytest.mark.parametrize("kind", ["causal_lm", "vision_lm"])
def test_an_engine_of_files_in_use_is_refused_with_what_replaces_it(kind: str) -> None:
    with pytest.raises(InputError) as refused:
        configured("engine", f"policy.kind={kind}; rollout.vllm=null; rollout.engine=continuous_batching")
    (error,) = refused.value.errors
    assert (error.place, error.value) == ("rollout.engine", "continuous_batching")
    assert {"policy", "vllm", "rollout.vllm", "docs/operations.md"} <= set(re.findall(r"[\w./]+\w", error.hint))


@pytest.mark.parametrize("old", ["lost", "max_delay"])
def test_retries_by_kind_are_refused_with_what_to_write(old: str) -> None:
    with pytest.raises(InputError) as caught:
        configured("tokens", f"placement.retries={{{old}: 3, delay: 1.0}}")
    (error,) = caught.value.errors
    assert (error.place, error.value) == ("placement.retries", {old: 3, "delay": 1.0})
    assert "write {tries: 5, delay: 2}" in error.hint


def test_everything_is_reported_at_once() -> None:
    wrong = problems(
        "tokens",
        "rewards=[{reward: ssim, weight: 0.0, threshold: 1.0}]; update={minibatch_size: 37, warmup_steps: 5}; "
        "update.delta=1.1; update.mismatch={floor: 1.0, cap: 1.0}; "
        "advantages={aggregation: normalize_then_sum, kl_coef: 0.1}",
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
    of_both = problems(
        "both",
        "rollout.images_per_sample=1; rollout.noise_level=0.0; update.denoising.clip_range=0.2; "
        "update.tokens={kl_estimator: exact, minibatch_size: 37}",
    )
    assert [place for place, _ in of_both] == [
        "rollout.noise_level",
        "rollout.images_per_sample",
        "update.tokens.kl_estimator",
        "update.denoising.clip_range",
        "update.tokens.minibatch_size",
    ]


@pytest.mark.parametrize("train", ["[]", "[denoising, denoising]", "[denoising, decoder]"])
def test_what_cannot_be_trained_is_the_only_error(train: str) -> None:
    (place, _) = problems("tokens", f"policy.train={train}; update.denoising.clip_range=1e-4")[0]
    assert place.startswith("policy.train")


def test_a_mistyped_algorithm_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(InputError) as refused:
        configured("pipeline nft", "update={algorithm: nftt, nft_beta: -1.0}")
    other, algorithm = refused.value.errors
    assert (algorithm.place, algorithm.value) == ("update.algorithm", "nftt")
    assert "grpo, nft, awm, v_grpo or ram" in algorithm.hint
    # The other keys are read as those of the algorithm that was meant.
    assert other.place == "update.nft_beta"


@pytest.mark.parametrize(
    ("settings", "own"),
    [("", "targets: folder"), ("", "target_column: target"), (", settings: {against: source}", "image_column: image")],
)
def test_what_a_reward_compares_with_is_needed_in_both_sections(settings: str, own: str) -> None:
    reward, without = f"rewards=[{{reward: ssim{settings}}}]", "evaluate={prompts: q.txt}"
    missing, data = ("rewards.0.reward", "ssim"), f"data={{prompts: p.txt, {own}}}"
    assert problems("tokens", f"{reward}; {without}") == [missing, missing]
    assert problems("tokens", f"{reward}; {data}; {without}") == [missing]
    both = f"{data}; evaluate={{prompts: q.txt, {own}}}"
    assert problems("tokens", f"{reward}; {both}") == []
    if settings:
        assert problems("tokens", f"rewards=[{{reward: ssim}}]; {both}") == [missing, missing]
