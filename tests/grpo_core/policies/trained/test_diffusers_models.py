"""Every weight of a diffusers model: written as diffusers loads it, read again, and put into a pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

from grpo_core.policies.trained import LoraSettings, TrainedModel, TrainingChoice, save_whole, train_model
from tasks.models.files import weights_digest
from tests.grpo_core.policies.denoising.tiny_pipelines import DECODER_LINEARS, MAKE
from tests.grpo_core.policies.trained.tiny_models import disturb, same, values_of

FULL, ADAPTERS = TrainingChoice(None, reference="device"), TrainingChoice(LoraSettings(rank=4, alpha=8.0))


def trained(choice: TrainingChoice = FULL, name: str = "sd3") -> TrainedModel:
    pipeline, _ = MAKE[name]()
    return train_model(pipeline.transformer, choice, base_name=name, default_targets=DECODER_LINEARS)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_full_weights_come_back_to_the_bit_here_and_in_diffusers(tmp_path: Path) -> None:
    first, second = trained(), trained()
    start = values_of(second.trainable_parameters())
    disturb(first.trainable_parameters())
    first.save(tmp_path)
    assert (tmp_path / "diffusion_pytorch_model.safetensors").is_file()
    second.load(tmp_path)
    assert same(values_of(first.trainable_parameters()), values_of(second.trainable_parameters()))
    assert same(state(SD3Transformer2DModel.from_pretrained(tmp_path)), state(first.model))
    second.load(None)
    assert same(values_of(second.trainable_parameters()), start)


def test_weights_in_shards_are_read_and_counted(tmp_path: Path) -> None:
    first, second = trained(), trained()
    disturb(first.trainable_parameters())
    first.model.save_pretrained(tmp_path, max_shard_size="50KB")  # type: ignore[operator]
    shards = sorted(tmp_path.glob("diffusion_pytorch_model-*.safetensors"))
    assert len(shards) > 2
    second.load(tmp_path)
    assert same(values_of(first.trainable_parameters()), values_of(second.trainable_parameters()))
    before = weights_digest(tmp_path)
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(bytes(content))
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize("choice", [FULL, ADAPTERS], ids=["all weights", "adapters"])
def test_the_whole_model_is_loaded_by_diffusers(choice: TrainingChoice, tmp_path: Path) -> None:
    model = trained(choice, "flux")
    disturb(model.trainable_parameters())
    (tmp_path / "stored").mkdir()
    model.save(tmp_path / "stored")
    save_whole(tmp_path / "stored", tmp_path / "whole", lambda: MAKE["flux"]()[0].transformer)
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path / "whole")
    if choice is FULL:
        assert same(state(loaded), state(model.model))
        return
    merged = state(model.model.merge_and_unload(safe_merge=True))  # type: ignore[operator]
    assert merged.keys() == state(loaded).keys()
    assert all(torch.equal(value, merged[name]) for name, value in state(loaded).items())
    assert not same(merged, state(MAKE["flux"]()[0].transformer))
