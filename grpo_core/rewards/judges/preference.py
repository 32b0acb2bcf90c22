"""Which image people would prefer for a prompt: PickScore and HPSv2, through the imscore package in this process.

Kirstain, Polyak, Singer, Matiana, Penna and Levy, 2023, "Pick-a-Pic: An Open Dataset of User Preferences for
Text-to-Image Generation" (arXiv:2305.01569), equation 1. Wu, Hao, Sun, Chen, Zhu, Zhao and Li, 2023, "Human
Preference Score v2" (arXiv:2306.09341).

Both are a CLIP ViT-H/14 fine-tuned on people's choices between two images; the measure is the cosine of prompt and
image, PickScore's times CLIP's learned scale (near 100). Differences count, not levels: two images with the same
prompt compare, two prompts do not.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from grpo_core.errors import InputError
from grpo_core.rewards.devices import check_device_setting, find_device_problem
from grpo_core.rewards.embedding.clip_architecture import (
    ClipArchitecture,
    find_architecture,
    is_config_file,
)
from grpo_core.rewards.images import to_rgb, to_tensor
from grpo_core.rewards.judges.preference_scorers import PreferenceScorer, load_hpsv2, load_pickscore
from grpo_core.rewards.long_prompts import LONG_PROMPTS, check_prompts
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit, not_finite
from grpo_core.rewards.settings import check_choice, check_positive
from grpo_core.rewards.weights import (
    PublishedWeights,
    WeightFile,
    check_digest_setting,
    check_source_setting,
    find_model_problem,
    find_weights_problem,
    model_folder,
    model_sha256,
    resolve_weights,
)

_PICKSCORE_MODEL = "rewards.pickscore.model"
PICKSCORE = "yuvalkirstain/PickScore_v1"
HPSV2_NETWORK, HPSV2_RELEASE = "ViT-H-14", "laion2b_s32b_b79k"
HPSV2 = PublishedWeights(
    "HPS_v2.1_compressed.pt",
    "the authors of HPSv2 (Apache-2.0)",
    "https://huggingface.co/xswu/HPSv2",
    "hf://xswu/HPSv2/HPS_v2.1_compressed.pt",
    digest="",
    note="as .safetensors: hf://RE-N-Y/hpsv21/model.safetensors",
)
VERSION = "1+imscore-0.0.11"
"""The package's release is fixed by the project, and belongs to the scores."""


@dataclass(frozen=True)
class PickScoreReward(Reward):
    """Value clip(score / full_scale, 0, 1); raw PickScore, about 17 to 24.

    Attributes:
        model: folder of a CLIPModel and its tokenizer as transformers saves them, or ``owner/repo[@revision]`` on the
            Hub (``yuvalkirstain/PickScore_v1``).
        model_sha256: digest over the model's files that it must have, whole or its first 8 digits or more.
        full_scale: score at which the value ends; 26 is what Flow-GRPO (arXiv:2505.05470) divides by.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: str | None = None
    model_sha256: str | None = None
    full_scale: float = 26.0
    long_prompts: str = "cut"
    device: str = "cpu"

    name: ClassVar[str] = "pickscore"
    version: ClassVar[str] = VERSION

    def __post_init__(self) -> None:
        if self.model is not None and not (isinstance(self.model, str) and self.model.strip()):
            hint = f"Set a folder, or a name on the Hub such as {PICKSCORE}."
            raise InputError(_PICKSCORE_MODEL, self.model, hint)
        check_digest_setting(f"{_PICKSCORE_MODEL}_sha256", self.model_sha256)
        _check_shared(self.name, self.full_scale, self.long_prompts, self.device)

    def settings(self) -> Mapping[str, object]:
        """Scale; what happens to long prompts."""
        return {"full_scale": float(self.full_scale), "long_prompts": self.long_prompts}

    def weight_digests(self) -> Mapping[str, str]:
        """The model's, over its files."""
        return {"model": model_sha256(str(self._folder()), _PICKSCORE_MODEL)}

    def preflight(self) -> Sequence[str]:
        """A package that is not installed, a missing or wrong model, a device that is not there."""
        problems = (
            find_model_problem(_PICKSCORE_MODEL, self.model, self.model_sha256, PICKSCORE),
            find_device_problem("rewards.pickscore.device", self.device),
        )
        return _told(self.name, problems)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: imscore is not installed, missing or wrong weights, an image of an unknown mode, a long
                prompt that is to be refused.
        """
        _check_package(self.name)
        folder = str(self._folder())
        scorer = load_pickscore(_PICKSCORE_MODEL, folder, model_sha256(folder, _PICKSCORE_MODEL), self.device)
        return _score_all(self.name, scorer, batch, self.full_scale, self.long_prompts)

    def _folder(self) -> Path:
        return model_folder(_PICKSCORE_MODEL, self.model, self.model_sha256, PICKSCORE)


@dataclass(frozen=True)
class HpsV2Reward(Reward):
    """Value clip(score / full_scale, 0, 1); raw the score, a cosine, about 0.2 to 0.35.

    Attributes:
        weights: HPSv2's state dict: its path, or ``hf://owner/repo/file``; as its makers publish it, or imscore.
        weights_sha256: digest that the file must have, whole or its first 8 digits or more.
        model: the CLIP that it was fine-tuned from: ``ViT-H-14``, or the path of an open_clip_config.json.
        full_scale: score at which the value ends.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    weights: str | None = None
    weights_sha256: str | None = None
    model: str = HPSV2_NETWORK
    full_scale: float = 0.5
    long_prompts: str = "cut"
    device: str = "cpu"

    name: ClassVar[str] = "hpsv2"
    version: ClassVar[str] = VERSION

    def __post_init__(self) -> None:
        check_source_setting("rewards.hpsv2.weights", self.weights, HPSV2)
        check_digest_setting("rewards.hpsv2.weights_sha256", self.weights_sha256)
        if not isinstance(self.model, str) or not (self.model == HPSV2_NETWORK or is_config_file(self.model)):
            hint = (
                f"HPSv2 is fine-tuned from {HPSV2_NETWORK}: leave it out, or set the path of an open_clip_config.json."
            )
            raise InputError("rewards.hpsv2.model", self.model, hint)
        _check_shared(self.name, self.full_scale, self.long_prompts, self.device)

    def settings(self) -> Mapping[str, object]:
        """Network and scale; what happens to long prompts."""
        model = self._architecture().name if is_config_file(self.model) else self.model
        return {"model": model, "full_scale": float(self.full_scale), "long_prompts": self.long_prompts}

    def weight_digests(self) -> Mapping[str, str]:
        """The model's."""
        return {"model": self._weight_file().sha256}

    def preflight(self) -> Sequence[str]:
        """A package that is not installed, missing or wrong weights, a device that is not there."""
        problems = [
            find_weights_problem("rewards.hpsv2.weights", self.weights, self.weights_sha256, HPSV2),
            find_device_problem("rewards.hpsv2.device", self.device),
        ]
        try:
            self._architecture()
        except InputError as error:
            problems.append(error)
        return _told(self.name, problems)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: as for PickScore.
        """
        _check_package(self.name)
        scorer = load_hpsv2("rewards.hpsv2.weights", self._architecture(), self._weight_file(), self.device)
        return _score_all(self.name, scorer, batch, self.full_scale, self.long_prompts)

    def _architecture(self) -> ClipArchitecture:
        release = None if is_config_file(self.model) else HPSV2_RELEASE
        return find_architecture("rewards.hpsv2.model", self.model, release)

    def _weight_file(self) -> WeightFile:
        return resolve_weights("rewards.hpsv2.weights", self.weights, self.weights_sha256, HPSV2)


def _score_all(
    name: str, scorer: PreferenceScorer, batch: ScoringBatch, full_scale: float, long_prompts: str
) -> list[Score]:
    check_prompts(name, batch, scorer.count_tokens, scorer.context_length, long_prompts)
    scores = []
    # One at a time: a matrix product's last bits depend on the batch that it runs in, and a score must not.
    for sample_id, image, prompt in zip(batch.sample_ids, batch.images, batch.prompts, strict=True):
        raw = scorer.score(to_tensor(to_rgb(image, f"rewards.{name}, sample {sample_id}")), prompt)
        value = clamp_unit(raw / full_scale)
        scores.append(Score(value, raw) if math.isfinite(raw) else Score.failed(not_finite(raw)))
    return scores


def _check_shared(name: str, full_scale: float, long_prompts: str, device: str) -> None:
    check_positive(f"rewards.{name}.full_scale", full_scale, "the model's own unit")
    check_choice(f"rewards.{name}.long_prompts", long_prompts, LONG_PROMPTS)
    check_device_setting(f"rewards.{name}.device", device)


def _check_package(name: str) -> None:
    if importlib.util.find_spec("imscore") is None:
        hint = "It needs imscore, the extra preference (pip install imscore==0.0.11); or take another reward."
        raise InputError("rewards", name, hint)


def _told(name: str, problems: Sequence[InputError | None]) -> list[str]:
    found = [str(problem) for problem in problems if problem is not None]
    try:
        _check_package(name)
    except InputError as error:
        found.append(str(error))
    return found
