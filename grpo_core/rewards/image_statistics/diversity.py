"""How unlike one another the images of a group are: falls when a policy draws the same image for every seed.

The mean distance of an image to its siblings: by LPIPS as in Zhu et al., 2017, "Toward Multimodal Image-to-Image
Translation" (arXiv:1711.11586); by the cosine of CLIP embeddings; or by the pixels themselves.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rewards.devices import find_device_problem
from grpo_core.rewards.embedding.clip_settings import DEFAULT_MODEL, ClipSettings, library_version
from grpo_core.rewards.image_statistics.distances import Distance, clip_distance, lpips_distance, pixel_distance
from grpo_core.rewards.images import fit_to, shown_size, to_rgb
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit, not_finite
from grpo_core.rewards.settings import check_choice
from grpo_core.rewards.similarity.lpips import MIN_SIDES, TRUNKS, heads_file, load_network
from grpo_core.rewards.weights import (
    WeightFile,
    check_source_setting,
    file_sha256,
    find_weights_problem,
    resolve_weights,
)

MEASURES = ("pixels", "lpips", "clip")

_PLACE = "rewards.diversity"


@dataclass(frozen=True)
class DiversityReward(Reward):
    """Value clip(raw, 0, 1); raw the mean distance of the image to each of its siblings.

    An image without siblings, and one of a batch that names no groups, has no score.

    Attributes:
        measure: ``pixels``, the root mean square difference over levels in [0, 1], needs no weights but takes a shift
            for a difference; ``lpips``, which does less so; ``clip``, 1 - the cosine of the embeddings, which sees what
            the images show and hardly how.
        weights: for ``lpips`` the trunk's state dict, for ``clip`` open_clip's: a path or ``hf://owner/repo/file``.
        weights_sha256: digest that the file must have, whole or its first 8 digits or more.
        net: the trunk of ``lpips``: ``alex``, ``vgg`` or ``squeeze``.
        model: the network of ``clip``: open_clip's tag, or the path of an open_clip_config.json.
        pretrained: open_clip's name of the release that the weights of ``clip`` are; by default ``openai``.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``; pixels are compared on the CPU.
    """

    measure: str = "pixels"
    weights: str | None = None
    weights_sha256: str | None = None
    net: str = "alex"
    model: str = DEFAULT_MODEL
    pretrained: str | None = None
    device: str = "cpu"

    name: ClassVar[str] = "diversity"
    needs_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(f"{_PLACE}.measure", self.measure, MEASURES)
        check_choice(f"{_PLACE}.net", self.net, tuple(TRUNKS))
        self._clip().check()
        if self.measure == "lpips":
            check_source_setting(f"{_PLACE}.weights", self.weights, TRUNKS[self.net])
        if self.measure == "pixels" and self.weights is not None:
            hint = "The measure pixels needs no weights: set measure to lpips or clip, or leave them out."
            raise InputError(f"{_PLACE}.weights", self.weights, hint)

    @property
    def version(self) -> str:
        """With ``clip``, the library that prepares the images belongs to it."""
        return f"1+{library_version()}" if self.measure == "clip" else "1"

    @property
    def min_side(self) -> int:
        """Smallest side in pixels that an image may have."""
        return MIN_SIDES[self.net] if self.measure == "lpips" else 1

    def settings(self) -> Mapping[str, object]:
        """The measure and its network."""
        network: Mapping[str, object] = {}
        if self.measure == "lpips":
            network = {"net": self.net}
        elif self.measure == "clip":
            network = self._clip().settings()
        return {"measure": self.measure, **network}

    def weight_digests(self) -> Mapping[str, str]:
        """The network's."""
        if self.measure == "pixels":
            return {}
        if self.measure == "clip":
            return {"clip": self._clip().weight_file().sha256}
        return {"trunk": self._trunk().sha256, "heads": file_sha256(str(heads_file(self.net)))}

    def preflight(self) -> Sequence[str]:
        """Missing or wrong weights, a device that is not there."""
        if self.measure == "pixels":
            return []
        if self.measure == "clip":
            return [str(problem) for problem in self._clip().problems()]
        problems = (
            find_weights_problem(f"{_PLACE}.weights", self.weights, self.weights_sha256, TRUNKS[self.net]),
            find_device_problem(f"{_PLACE}.device", self.device),
        )
        return [str(problem) for problem in problems if problem is not None]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; a failure where a distance is no finite number.

        Raises:
            InputError: missing or wrong weights, an image that is too small, siblings of another aspect ratio.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for row, group_id in enumerate(batch.group_ids):
            groups[group_id].append(row)
        with_siblings = [rows for rows in groups.values() if len(rows) > 1]
        scores = [NOT_APPLICABLE] * len(batch)
        distance = self._distance() if with_siblings else None
        for rows in with_siblings:
            assert distance is not None
            for row, mean in zip(rows, distance.means(self._images(batch, rows)), strict=True):
                # A NaN would come out of the clamp as a value.
                finite = math.isfinite(mean)
                scores[row] = Score(clamp_unit(mean), mean) if finite else Score.failed(not_finite(mean))
        return scores

    def _images(self, batch: ScoringBatch, rows: Sequence[int]) -> list[Image.Image]:
        """Those of one group in RGB, all at the size of the smallest."""
        images = []
        for row in rows:
            place = f"{_PLACE}, sample {batch.sample_ids[row]}"
            images.append(to_rgb(batch.images[row], place))
            if min(images[-1].size) < self.min_side:
                hint = f"The measure {self.measure} needs sides of at least {self.min_side} pixels."
                raise InputError(place, f"image of {shown_size(images[-1])} pixels", hint)
        size = min((image.size for image in images), key=lambda size: (math.prod(size), size))
        place = f"{_PLACE}, siblings of sample {batch.sample_ids[rows[0]]}"
        return [fit_to(image, size, place) for image in images]

    def _distance(self) -> Distance[Any]:
        if self.measure == "pixels":
            return pixel_distance()
        if self.measure == "clip":
            return clip_distance(self._clip().load())
        trunk = self._trunk()
        return lpips_distance(load_network(self.net, trunk.path, trunk.sha256, self.device), self.device)

    def _trunk(self) -> WeightFile:
        return resolve_weights(f"{_PLACE}.weights", self.weights, self.weights_sha256, TRUNKS[self.net])

    def _clip(self) -> ClipSettings:
        # Weights of another measure's network are none of CLIP's.
        weights = self.weights if self.measure == "clip" else None
        return ClipSettings(self.name, self.model, self.pretrained, weights, self.weights_sha256, self.device)
