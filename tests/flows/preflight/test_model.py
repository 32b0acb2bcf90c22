"""Pipelines whose steps cannot be trained, and settings that one has no use for, are refused by their files."""

import json
from pathlib import Path

import pytest

from configs.loader import read_config
from flows.preflight.doctor import examine
from flows.preflight.inputs import check_inputs
from tests.flows.conftest import TINY_SD3_NFT
from tests.flows.preflight.test_inputs import only, refused
from tests.grpo_core.policies.diffusers.tiny_pipelines import save

PIPELINE_FILES = {
    "model_index.json": {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
    "transformer/config.json": {"patch_size": 1, "guidance_embeds": True},
    "vae/config.json": {"block_out_channels": [8, 8, 8, 8], "latent_channels": 16},
}


def pipeline_run(folder: Path, file: str = "", **changes: object) -> str:
    """Write the configuration of a run, and the files of its pipeline with empty weights, one of them changed."""
    for name, content in PIPELINE_FILES.items():
        path = folder / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**content, **(changes if name == file else {})}))
    for part in ("transformer", "vae"):
        (folder / "model" / part / "diffusion_pytorch_model.safetensors").touch()
    (folder / "prompts.txt").write_text("a red circle\n")
    config = {
        "run": {"name": "x", "iterations": 1},
        "policy": {"kind": "diffusers", "model": str(folder / "model")},
        "data": {"prompts": str(folder / "prompts.txt")},
        "rollout": {"height": 64, "width": 64, "num_inference_steps": 6, "guidance_scale": 3.5},
        "rewards": [{"reward": "jpeg"}],
        "evaluate": {"prompts": str(folder / "prompts.txt"), "num_inference_steps": 28},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return str(folder / "config.yaml")


@pytest.mark.parametrize(
    ("changes", "cautions"),
    [
        ((), 1),
        (("update.kl_coef=0.1",), 0),
        (("update.algorithm=ram", "~update.nft_beta"), 1),
        (("update.algorithm=ram", "~update.nft_beta", "update.kl_coef=0"), 2),
    ],
)
def test_a_start_cautions_as_doctor_does(tmp_path: Path, changes: tuple[str, ...], cautions: int) -> None:
    config = read_config(TINY_SD3_NFT, [f"storage.root={tmp_path}/runs", *changes])
    (work,) = (each.notes for each in examine(config).findings if each.subject == "work")
    assert len(work) == cautions
    assert {*work} == {each for each in check_inputs(config).notes if each.startswith("update.")}


class TestPipelines:
    @pytest.mark.parametrize(
        ("file", "changes"),
        [
            ("model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]}),
            ("model_index.json", {"_class_name": "WanPipeline"}),
            ("model_index.json", {"_class_name": "MinePipeline"}),
            ("scheduler/scheduler_config.json", {"stochastic_sampling": True}),
        ],
    )
    def test_one_whose_steps_cannot_be_trained(self, tmp_path: Path, file: str, changes: dict[str, object]) -> None:
        config = pipeline_run(tmp_path, file, **changes)
        only(refused(tmp_path, config=config), "policy.model", tmp_path / "model")

    @pytest.mark.parametrize(
        ("override", "place", "value"),
        [
            ("rollout.negative_prompt=blurred", "rollout.negative_prompt", "blurred"),
            ("rollout.width=72", "rollout.", "72x64"),
            ("rollout.sde_window_range=[0, 6]", "rollout.sde_window_range", "[0, 6]"),
        ],
    )
    def test_settings_that_one_has_no_use_for(self, tmp_path: Path, override: str, place: str, value: str) -> None:
        only(refused(tmp_path, override, config=pipeline_run(tmp_path)), place, value)

    def test_embedded_guidance_is_matched_with_a_pull_alone(self, tmp_path: Path) -> None:
        config = pipeline_run(tmp_path)
        save("flux", tmp_path / "model")
        matching = ("rollout.sde_window_size=0", "rollout.shared_noise=false", "update.kl_coef=0")
        only(refused(tmp_path, *matching, "update.algorithm=ram", config=config), "rollout.guidance_scale", 3.5)
        pulled = (*matching[:2], "update.algorithm=awm", "update.kl_coef=0.1")
        check_inputs(read_config(config, [f"storage.root={tmp_path}/runs", *pulled]))
        plain = (*matching, "update.algorithm=awm", "rollout.guidance_scale=1.0")
        check_inputs(read_config(config, [f"storage.root={tmp_path}/runs", *plain]))

    def test_guidance_that_only_held_out_images_have(self, tmp_path: Path) -> None:
        schnell = pipeline_run(tmp_path)
        # Training needs no guidance there, so all of the pipeline is looked at.
        settings = save("flux", tmp_path / "model") / "transformer" / "config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "guidance_embeds": False}))
        guided = ("rollout.guidance_scale=1.0", "evaluate.guidance_scale=3.5")
        only(refused(tmp_path, *guided, config=schnell), "evaluate.guidance_scale", 3.5)
