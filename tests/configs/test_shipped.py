"""Shipped configurations are valid, and fit the GPU that they are for."""

import functools
import json
from pathlib import Path

import pytest
import yaml

import configs
from configs.loader import as_config, read_config, read_rewards_file
from flows.preflight.model import estimate_model
from grpo_core.policies.estimate import MemoryEstimate
from grpo_core.policies.glm_image.loading import RELEASED_MODEL
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rewards.ocr.text_match import quoted_texts
from grpo_core.rewards.registry import build_reward

ROOT = Path(configs.__file__).parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
GIGABYTE = 10**9
# The file and the memory of the GPU that it is for, in bytes.
GPUS = {
    "glm_image_80gb": 80 * GIGABYTE,
    "glm_image_both": 80 * GIGABYTE,
    "glm_image_edit": 80 * GIGABYTE,
    "glm_image_141gb": 141 * GIGABYTE,
}
MIX = {"lpips": 0.4, "ssim": 0.2, "text_accuracy": 0.3, "aesthetic": 0.1}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_whole(path: Path) -> None:
    config = read_config(path)
    # As a script passes it on: built in Python, it is the same configuration.
    assert as_config(config) == as_config(yaml.safe_load(path.read_text())) == config
    for dataset in (*config.data.sets, *config.evaluate.sets):
        assert (ROOT / dataset.prompts).is_file()
    for stream, update in config.updates.items():
        rows = config.rows_of(stream)
        minibatch = update.minibatch_size or rows
        # A last minibatch or microbatch of a few rows would weigh as much as a whole one.
        assert rows % minibatch == 0
        assert minibatch % update.micro_batch_size == 0
    # A batch may be larger than an iteration's prompts: held-out prompts fill it.
    batch = min(config.rollout.prompts_per_batch, config.rollout.prompts_per_iteration)
    assert config.rollout.prompts_per_iteration % batch == 0


def test_the_mix_is_the_same_for_a_run_and_for_a_rescoring() -> None:
    run = read_config(ROOT / "configs" / "glm_image_mix.yaml").rewards
    file = read_rewards_file(ROOT / "configs" / "rewards" / "mix.yaml", "FILE").rewards
    for rewards in (run, file):
        assert {section.label: section.weight for section in rewards} == MIX
    for one, other in zip(run, file, strict=True):
        for section in (one, other):
            build_reward(section.reward, section.settings)
        assert {**one.settings, "device": "cpu"} == {**other.settings, "device": "cpu"}


def test_every_prompt_of_the_signs_quotes_the_text_beside_it() -> None:
    for name in ("signs_train", "signs_heldout"):
        lines = (ROOT / "data" / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert [quoted_texts(row["prompt"]) for row in rows] == [(row["text"],) for row in rows]


def test_every_file_of_a_gpu_is_there() -> None:
    assert {path.stem for path in SHIPPED} >= {"tiny", "glm_image_mix", *GPUS}


@functools.cache
def estimate_of(name: str, *overrides: str) -> MemoryEstimate:
    config = read_config(ROOT / "configs" / f"{name}.yaml", overrides)
    policy = config.policy
    choices = {
        stream: TrainingChoice(
            policy.lora, policy.frozen, reference, policy.gradient_checkpointing, quantization=policy.quantization
        )
        for stream, reference in config.references.items()
    }
    return estimate_model(config, choices).memory


def test_the_update_that_needs_more_decides_where_two_run_in_turn() -> None:
    small, large = estimate_of("tiny_both"), estimate_of("tiny_both", "update.denoising.micro_batch_size=24")
    others = ("sampling", "decoding", "tokens update")
    assert [large.in_phase(each) for each in others] == [small.in_phase(each) for each in others]
    few, many = ({part.name: part.bytes for part in each.parts} for each in (small, large))
    assert few["denoising adapters"] == many["denoising adapters"] > 0
    assert few["tokens activations"] == many["tokens activations"]
    assert many["denoising activations"] > few["denoising activations"]


# The others are the same model at another size, or with images in prompts.
QUICK = ("glm_image_80gb", "glm_image_both")


@pytest.mark.parametrize(
    ("name", "memory"),
    [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.slow) for each in GPUS.items()],
)
def test_it_fits_the_gpu_it_is_for_and_states_the_estimate(name: str, memory: int) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    stated = int(path.read_text(encoding="utf-8").split("about ")[1].split(" GiB")[0])
    assert read_config(path).policy.model == RELEASED_MODEL
    needed = estimate_of(name).needed
    assert needed <= memory
    assert needed / 1024**3 == pytest.approx(stated, abs=1)


@pytest.mark.slow
def test_gpus_hold_what_the_page_says_with_its_settings() -> None:
    page = (ROOT / "docs" / "first_gpu.md").read_text(encoding="utf-8")
    nf4 = "policy.quantization={kind: nf4, double_quant: true}"
    variants: dict[int, tuple[str, ...]] = {
        80: (),
        40: ("policy.offload=components",),
        24: ("policy.offload=components", nf4),
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    heads = next(row for row in rows if row[0] == "configuration")
    row = next(row for row in rows if row[0].startswith("`glm_image_80gb.yaml`"))
    for gigabytes, overrides in variants.items():
        stated = float(row[heads.index(f"{gigabytes} GB")].split()[-1])
        for name, more in (("glm_image_80gb", 0.0), ("glm_image_both", 0.3)):
            needed = estimate_of(name, *overrides).needed
            assert needed <= gigabytes * GIGABYTE
            assert needed / 1024**3 == pytest.approx(stated + more, abs=0.1)
    needed = estimate_of("glm_image_141gb").needed
    assert needed <= 141 * GIGABYTE
    assert f"`glm_image_141gb.yaml` (1024 x 1024) {needed / 1024**3:.1f}." in page


def test_the_mix_is_sampled_and_trained_as_the_file_with_one_reward() -> None:
    """So its memory is the same, apart from its rewards."""
    one, mix = (read_config(ROOT / "configs" / f"{name}.yaml") for name in ("glm_image_80gb", "glm_image_mix"))
    assert (mix.policy, mix.rollout, mix.updates) == (one.policy, one.rollout, one.updates)


@pytest.mark.slow
def test_without_recomputation_the_80_gb_sizes_would_not_fit() -> None:
    estimate = estimate_of("glm_image_80gb", "policy.gradient_checkpointing=false")
    assert estimate.needed > GPUS["glm_image_80gb"]
