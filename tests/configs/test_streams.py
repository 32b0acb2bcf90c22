"""What a run trains, by stream: groups, rows, windows and updates; and combinations that no stream has a use for."""

import json
from typing import Any

import pytest

from configs.loader import check_config
from configs.schema import ReplaySection, RunConfig, as_replay, run_identity
from configs.training import DenoisingUpdateSection, NftUpdateSection, ParitySection, UpdateSection
from grpo_core.errors import InputError
from grpo_core.parity import ParityTolerance
from grpo_core.seeds import derive_seed

JPEG = {"reward": "jpeg", "settings": {"direction": "compressible"}}
SIZE = {"height": 64, "width": 64, "prompts_per_iteration": 3, "group_size": 12, "num_inference_steps": 10}
JOINT: dict[str, Any] = {"policy": {"train": ["tokens", "denoising"]}, "rollout": {"images_per_sample": 5}}
DECODER: dict[str, Any] = {"policy": {"train": ["denoising"]}}
PIPELINE: dict[str, Any] = {"policy": {"kind": "diffusers"}, "rollout": {"guidance_scale": 4.5}}
TEXT: dict[str, Any] = {
    "policy": {"kind": "causal_lm"},
    "rollout": dict.fromkeys(("height", "width", "num_inference_steps")),
    "rewards": [{"reward": "answer"}],
}


def configured(*changes: dict[str, Any]) -> RunConfig:
    """The configuration with the sections of each change merged into it in turn; None removes a key."""
    values: dict[str, Any] = {
        "run": {"name": "x", "iterations": 4, "seed": 7},
        "policy": {"model": "somewhere/model"},
        "data": {"prompts": "prompts.txt"},
        "rollout": SIZE,
        "rewards": [JPEG],
        "update": {},
    }
    for change in changes:
        for section, given in change.items():
            merged = {**values.get(section, {}), **given} if isinstance(given, dict) else given
            values[section] = (
                {name: value for name, value in merged.items() if value is not None}
                if isinstance(merged, dict)
                else merged
            )
    return check_config(values)


def found(*changes: dict[str, Any]) -> list[tuple[str, object]]:
    try:
        configured(*changes)
    except InputError as errors:
        return [(error.place, error.value) for error in errors.errors]
    return []


class TestStreams:
    @pytest.mark.parametrize(
        ("change", "streams", "renderings", "rows", "samples"),
        [
            ({}, ("tokens",), (1,) * 12, {"tokens": 36}, 36),
            (TEXT, ("tokens",), (1,) * 12, {"tokens": 36}, 36),
            (DECODER, ("denoising",), (12,), {"denoising": 36}, 36),
            (PIPELINE, ("denoising",), (12,), {"denoising": 36}, 36),
            # 12 drafts, one of them 5 times: 16 images of a prompt.
            (JOINT, ("tokens", "denoising"), (5,) + (1,) * 11, {"tokens": 36, "denoising": 15}, 48),
            (
                {**JOINT, "rollout": {"images_per_sample": 2, "samples_with_images": 12}},
                ("tokens", "denoising"),
                (2,) * 12,
                {"tokens": 36, "denoising": 72},
                72,
            ),
        ],
    )
    def test_groups_and_rows(
        self,
        change: dict[str, Any],
        streams: tuple[str, ...],
        renderings: tuple[int, ...],
        rows: dict[Any, int],
        samples: int,
    ) -> None:
        config = configured(change)
        assert config.streams == streams
        assert config.images_of_samples == renderings
        assert {stream: config.rows_of(stream) for stream in config.streams} == rows
        assert config.samples_per_iteration == samples

    def test_the_order_of_the_parts_does_not_matter(self) -> None:
        turned = configured({**JOINT, "policy": {"train": ["denoising", "tokens"]}})
        assert turned.streams == ("tokens", "denoising")
        assert turned == configured(JOINT)
        assert run_identity(turned)["policy"]["train"] == ["tokens", "denoising"]

    def test_each_component_has_an_update_of_its_own(self) -> None:
        own = {"update": {"tokens": {"learning_rate": 1e-4, "minibatch_size": 12}, "denoising": {"clip_range": 2e-5}}}
        updates = configured(JOINT, own).updates
        assert list(updates) == ["tokens", "denoising"]
        assert (updates["tokens"].learning_rate, updates["tokens"].clip_range) == (1e-4, 0.2)
        assert (updates["denoising"].learning_rate, updates["denoising"].clip_range) == (3e-4, 2e-5)
        assert (updates["tokens"].minibatch_size, updates["denoising"].minibatch_size) == (12, None)

    @pytest.mark.parametrize("change", [DECODER, PIPELINE])
    def test_denoising_alone_is_updated_by_its_own_defaults(self, change: dict[str, Any]) -> None:
        config = configured(change)
        update = config.updates["denoising"]
        assert update is config.update
        assert isinstance(update, DenoisingUpdateSection)
        assert (update.clip_range, update.learning_rate, update.kl_estimator) == (1e-4, 3e-4, "exact")
        assert UpdateSection.model_validate(update.model_dump()).model_dump() == update.model_dump()

    def test_a_schedule_has_the_length_of_its_own_stream(self) -> None:
        linear = {"lr_scheduler": "linear", "epochs": 2}
        config = configured(JOINT, {"update": {"tokens": {**linear, "minibatch_size": 12}, "denoising": linear}})
        # 4 iterations x 2 epochs x (36 rows in minibatches of 12, 15 rows at once).
        steps = {stream: update.total_steps for stream, update in config.scheduled_updates.items()}
        assert steps == {"tokens": 24, "denoising": 8}
        assert run_identity(config)["run"]["iterations"] == 4

    def test_the_reference_is_kept_where_a_component_uses_it(self) -> None:
        config = configured(JOINT, {"update": {"denoising": {"kl_coef": 0.1}}})
        assert config.references == {"tokens": "none", "denoising": "device"}

    def test_one_window_for_an_iteration(self) -> None:
        assert configured().window_start(1) is None
        assert configured(TEXT).window_start(1) is None
        noise = {"rollout": {"sde_window": "random", "sde_window_range": [1, 6], "sde_window_size": 2}}
        drawn = [configured(JOINT, noise).window_start(iteration) for iteration in range(1, 5)]
        assert drawn == [1 + derive_seed(7, "window", iteration) % 4 for iteration in range(1, 5)]

    def test_the_tolerance_is_by_stream_and_precision(self) -> None:
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

    @pytest.mark.parametrize("change", [{}, DECODER, JOINT, PIPELINE, TEXT])
    def test_what_was_stored_is_the_same_configuration(self, change: dict[str, Any]) -> None:
        config = configured(change)
        stored = json.loads(json.dumps(config.model_dump(mode="json")))
        assert check_config(stored) == config
        replay = as_replay(config, ReplaySection(source="y", iterations=(1,), max_staleness=0))
        assert isinstance(replay, type(config))
        assert replay.updates == config.updates
        assert replay.model_dump(exclude={"replay"}) == config.model_dump()


class TestEvaluation:
    def test_steps_and_guidance_of_held_out_images(self) -> None:
        config = configured({"evaluate": {"num_inference_steps": 40, "guidance_scale": 7.0}})
        assert (config.rollout.num_inference_steps, config.evaluation_rollout.num_inference_steps) == (10, 40)
        assert config.evaluation_rollout.guidance_scale == 7.0
        assert configured(TEXT).evaluation_rollout == configured(TEXT).rollout

    def test_images_of_a_pipeline_differ_by_their_first_noise(self) -> None:
        shared = configured(PIPELINE, {"rollout": {"shared_noise": True}})
        assert (shared.rollout.shared_noise, shared.evaluation_rollout.shared_noise) == (True, False)
        assert configured(DECODER).evaluation_rollout.shared_noise


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "place", "value"),
        [
            ([{"policy": {"train": ["denoising", "denoising"]}}], "policy.train", ["denoising", "denoising"]),
            ([TEXT, DECODER], "policy.train", ["denoising"]),
            ([PIPELINE, {"policy": {"train": ["tokens"]}}], "policy.train", ["tokens"]),
            ([PIPELINE, JOINT, {"rollout": {"images_per_sample": None}}], "policy.train", ["tokens", "denoising"]),
            ([{"rollout": {"noise_level": 0.5}}], "rollout.noise_level", 0.5),
            ([{"rollout": {"sde_type": "cps"}}], "rollout.sde_type", "cps"),
            ([{"rollout": {"images_per_sample": 2}}], "rollout.images_per_sample", 2),
            ([DECODER, {"rollout": {"samples_with_images": 3}}], "rollout.samples_with_images", 3),
            ([JOINT, {"rollout": {"images_per_sample": 1}}], "rollout.images_per_sample", 1),
            # Not its minibatches as well, which no row is left for.
            (
                [JOINT, {"rollout": {"images_per_sample": 1}, "update": {"denoising": {"minibatch_size": 4}}}],
                "rollout.images_per_sample",
                1,
            ),
            ([JOINT, {"rollout": {"samples_with_images": 13}}], "rollout.samples_with_images", 13),
            ([DECODER, {"rollout": {"noise_level": 0.0}}], "rollout.noise_level", 0.0),
            ([PIPELINE, {"rollout": {"sde_window_range": [0, 10]}}], "rollout.sde_window_range", [0, 10]),
            ([JOINT, {"rollout": {"sde_window_size": 6}}], "rollout.sde_window_range", [0, 5]),
            ([PIPELINE, {"rollout": {"num_inference_steps": 5}}], "rollout.sde_window_range", [0, 5]),
            ([PIPELINE, {"rollout": {"sde_window_every": 3}}], "rollout.sde_window_every", 3),
            (
                [PIPELINE, {"rollout": {"guidance_scale": 1.0, "negative_prompt": "grain"}}],
                "rollout.negative_prompt",
                "grain",
            ),
            ([PIPELINE, {"rollout": {"top_p": 0.9}}], "rollout.top_p", "top_p"),
            ([TEXT, {"evaluate": {"num_inference_steps": 4}}], "evaluate.num_inference_steps", 4),
            ([TEXT, {"evaluate": {"guidance_scale": 0.0}}], "evaluate.guidance_scale", 0.0),
            ([{"update": {"kl_estimator": "exact"}}], "update.kl_estimator", "exact"),
            ([JOINT, {"update": {"tokens": {"kl_estimator": "exact"}}}], "update.tokens.kl_estimator", "exact"),
            ([{"update": {"loss": "grpo_guard"}}], "update.loss", "grpo_guard"),
            ([JOINT, {"update": {"tokens": {"loss": "flow_dppo"}}}], "update.tokens.loss", "flow_dppo"),
            ([DECODER, {"update": {"entropy_coef": 0.1}}], "update.entropy_coef", 0.1),
            ([{"policy": {"denoising_lora": {"rank": 8}}}], "policy.denoising_lora", {"rank": 8}),
            ([JOINT, {"update": {"denoising": {"entropy_quantile": 0.2}}}], "update.denoising.entropy_quantile", 0.2),
            ([PIPELINE, {"update": {"mask_truncated": True}}], "update.mask_truncated", True),
            ([JOINT, {"update": {"tokens": {"mask_truncated": True}}}], "update.tokens.mask_truncated", True),
            ([JOINT, {"advantages": {"kl_coef": 0.1}}], "advantages.kl_coef", 0.1),
            ([DECODER, {"update": {"clip_range": 0.2}}], "update.clip_range", 0.2),
            ([DECODER, {"update": {"clip_range": 0.011}}], "update.clip_range", 0.011),
            ([JOINT, {"update": {"denoising": {"clip_range_high": 0.1}}}], "update.denoising.clip_range_high", 0.1),
            ([PIPELINE, {"update": {"delta": 1.5}}], "update.delta", 1.5),
            ([PIPELINE, {"update": {"loss": "cispo"}}], "update.loss_settings.ratio_cap", 5.0),
            ([PIPELINE, {"update": {"mismatch": {"mode": "mask"}}}], "update.mismatch.cap", 3.0),
            ([JOINT, {"update": {"denoising": {"minibatch_size": 16}}}], "update.denoising.minibatch_size", 16),
            ([JOINT, {"update": {"denoising": {"warmup_steps": 2}}}], "update.denoising.warmup_steps", 2),
            (
                [JOINT, {"update": {"denoising": {"lr_scheduler": "linear", "warmup_steps": 9}}}],
                "update.denoising.warmup_steps",
                9,
            ),
            (
                [JOINT, {"update": {"denoising": {"reference": {"refresh_every": 2}}}}],
                "update.denoising.reference.refresh_every",
                2,
            ),
        ],
    )
    def test_refused(self, changes: list[dict[str, Any]], place: str, value: object) -> None:
        assert found(*changes) == [(place, value)]

    @pytest.mark.parametrize(
        "changes",
        [
            [DECODER, {"update": {"clip_range": 0.2}, "rollout": {"logprob_reduction": "sum"}}],
            [PIPELINE, {"rollout": {"sde_window": "sliding", "sde_window_every": 3}}],
            [PIPELINE, {"rollout": {"negative_prompt": "grain"}, "evaluate": {"guidance_scale": 1.0}}],
            [PIPELINE, {"update": {"clip_range": 1e-2}}],
            [PIPELINE, {"update": {"delta": 1.005}}],
            [PIPELINE, {"update": {"loss": "cispo", "loss_settings": {"ratio_cap": 1.001}, "clip_range": 0.2}}],
            [PIPELINE, {"update": {"kl_estimator": "k3", "kl_coef": 0.04}}],
            [JOINT, {"rollout": {"sde_window_range": [0, 9], "sde_window_size": 9, "top_p": 0.9}}],
            [DECODER, {"rollout": {"temperature": 0.9}}],
            [JOINT, {"policy": {"denoising_lora": {"rank": 8, "targets": "attn"}}}],
            [{"rollout": {"num_inference_steps": 1, "sde_window_size": 2}}],
        ],
    )
    def test_allowed(self, changes: list[dict[str, Any]]) -> None:
        assert found(*changes) == []

    def test_an_update_of_a_stream_that_is_not_trained(self) -> None:
        change = {"update": {"denoising": {"clip_range": 1e-4}}}
        assert found(change) == [("update.denoising", "denoising")]
        assert found(TEXT, change) == [("update.denoising", "denoising")]
        assert found(DECODER, {"update": {"tokens": {}}}) == [("update.tokens", "tokens")]

    def test_settings_of_both_streams_stand_in_neither(self) -> None:
        assert found(JOINT, {"update": {"kl_coef": 0.1}}) == [("update.kl_coef", "kl_coef")]

    @pytest.mark.parametrize("train", [[], ["denoising", "denoising"], ["denoising", "decoder"]])
    def test_what_cannot_be_trained_is_the_only_error(self, train: list[str]) -> None:
        (place, _) = found({"policy": {"train": train}, "update": {"denoising": {"clip_range": 1e-4}}})[0]
        assert place.startswith("policy.train")

    @pytest.mark.parametrize(("change", "stream"), [({}, "tokens"), (TEXT, "tokens"), (PIPELINE, "denoising")])
    def test_the_only_stream_may_be_named(self, change: dict[str, Any], stream: str) -> None:
        named = configured(change, {"update": {stream: {"kl_coef": 0.1}}})
        assert named == configured(change, {"update": {"kl_coef": 0.1}})
        assert named.model_dump()["update"]["kl_coef"] == 0.1
        assert found(change, {"update": {stream: {"kl_coef": -0.1}}}) == [(f"update.{stream}.kl_coef", -0.1)]

    def test_both_streams_are_reported_together(self) -> None:
        wrong = found(
            JOINT,
            {
                "rollout": {"images_per_sample": 1, "noise_level": 0.0},
                "update": {
                    "tokens": {"kl_estimator": "exact", "minibatch_size": 37},
                    "denoising": {"clip_range": 0.2},
                },
            },
        )
        assert [place for place, _ in wrong] == [
            "rollout.noise_level",
            "rollout.images_per_sample",
            "update.tokens.kl_estimator",
            "update.denoising.clip_range",
            "update.tokens.minibatch_size",
        ]


NFT: dict[str, Any] = {
    "rollout": {"sde_window_size": 0, "shared_noise": False},
    "update": {"algorithm": "nft"},
}

NFT_BY_STREAM = {"denoising": NFT["update"]}

JOINT_NFT: dict[str, Any] = {
    **JOINT,
    "rollout": {**JOINT["rollout"], **NFT["rollout"]},
    "update": NFT_BY_STREAM,
}


class TestDiffusionNft:
    @pytest.mark.parametrize("policy", [PIPELINE, DECODER])
    def test_it_records_finished_images_alone(self, policy: dict[str, Any]) -> None:
        config = configured(policy, NFT)
        assert [config.window_start(iteration) for iteration in (1, 2)] == [10, 10]
        assert isinstance(config.update, NftUpdateSection)
        assert config.update.learning_rate == 3e-4
        assert config.updates["denoising"].corrected(ReplaySection.model_fields["correction"].default) == config.update

    def test_a_replay_keeps_the_algorithm(self) -> None:
        replay = ReplaySection(source="x", iterations=(1,), max_staleness=2)
        assert isinstance(as_replay(configured(PIPELINE, NFT), replay).update, NftUpdateSection)

    @pytest.mark.parametrize("policy", [PIPELINE, DECODER])
    @pytest.mark.parametrize(
        ("change", "place", "value"),
        [
            ({"rollout": {"sde_window_size": 2}}, "rollout.sde_window_size", 2),
            ({"rollout": {"sde_window_size": 2, "num_inference_steps": 4}}, "rollout.sde_window_size", 2),
            ({"rollout": {"shared_noise": True}}, "rollout.shared_noise", True),
            ({"rollout": {"sde_type": "cps"}}, "rollout.sde_type", "cps"),
            ({"rollout": {"sde_window_range": [0, 3]}}, "rollout.sde_window_range", (0, 3)),
            ({"update": {"timesteps_per_image": 11}}, "update.timesteps_per_image", 11),
            ({"update": {"clip_range": 1e-4}}, "update.clip_range", "clip_range"),
            ({"update": {"mismatch": {"mode": "mask"}}}, "update.mismatch", "mismatch"),
            ({"advantages": {"kl_coef": 0.1}}, "advantages.kl_coef", 0.1),
        ],
    )
    def test_refused(self, policy: dict[str, Any], change: dict[str, Any], place: str, value: object) -> None:
        assert found(policy, NFT, change) == [(place, value)]

    def test_of_both_parts_the_decoder_can_be_trained_by_it(self) -> None:
        config = configured(JOINT_NFT)
        assert {stream: update.objective for stream, update in config.updates.items()} == {
            "tokens": "grpo",
            "denoising": "nft",
        }
        assert [config.window_start(iteration) for iteration in (1, 2)] == [10, 10]
        assert check_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config
        assert run_identity(config)["update"]["denoising"]["algorithm"] == "nft"

    @pytest.mark.parametrize(
        ("change", "place", "value"),
        [
            ({"rollout": {"shared_noise": True}}, "rollout.shared_noise", True),
            (
                {"update": {"denoising": {"algorithm": "nft", "clip_range": 1e-4}}},
                "update.denoising.clip_range",
                "clip_range",
            ),
            ({"update": {**NFT_BY_STREAM, "tokens": NFT["update"]}}, "update.tokens.algorithm", "nft"),
            ({"update": {"denoising": {"algorithm": "grpo"}}}, "rollout.sde_window_size", 0),
        ],
    )
    def test_refused_of_both_parts(self, change: dict[str, Any], place: str, value: object) -> None:
        assert found(JOINT_NFT, change) == [(place, value)]

    @pytest.mark.parametrize("policy", [PIPELINE, DECODER, JOINT])
    def test_ratios_need_noisy_steps(self, policy: dict[str, Any]) -> None:
        assert found(policy, {"rollout": {"sde_window_size": 0}}) == [("rollout.sde_window_size", 0)]

    @pytest.mark.parametrize("policy", [{}, TEXT])
    def test_tokens_have_no_such_algorithm(self, policy: dict[str, Any]) -> None:
        assert found(policy, {"update": {"algorithm": "nft"}}) == [("update.algorithm", "nft")]

    def test_a_mistyped_algorithm_is_answered_with_those_that_there_are(self) -> None:
        with pytest.raises(InputError) as refused:
            configured(PIPELINE, NFT, {"update": {"algorithm": "nftt", "nft_beta": -1.0}})
        other, algorithm = refused.value.errors
        assert (algorithm.place, algorithm.value) == ("update.algorithm", "nftt")
        assert "grpo or nft" in algorithm.hint
        # The other keys are read as those of the algorithm that was meant.
        assert other.place == "update.nft_beta"
        assert found(PIPELINE, NFT, {"update": {"algorithm": ["nft"]}}) == [("update.algorithm", ("nft",))]

    def test_it_is_named_in_the_identity(self) -> None:
        assert run_identity(configured(PIPELINE, NFT))["update"]["algorithm"] == "nft"
        assert configured(PIPELINE, {"update": {"algorithm": "grpo"}}) == configured(PIPELINE)
