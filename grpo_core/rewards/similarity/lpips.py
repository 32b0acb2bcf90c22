"""Learned perceptual distance to the target image.

Zhang, Isola, Efros, Shechtman and Wang, 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual
Metric", equation 1, version 0.1. The linear heads come with the lpips package, the trunk from a local file.
"""

import functools
import importlib.util
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.devices import check_device_setting, exact_inference, find_device_problem
from grpo_core.rewards.images import check_pair
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.settings import check_choice
from grpo_core.rewards.similarity.pairs import score_pairs
from grpo_core.rewards.weights import (
    PublishedWeights,
    WeightFile,
    check_digest_setting,
    check_source_setting,
    file_sha256,
    find_weights_problem,
    load_state_dict,
    resolve_weights,
)

_PLACE = "rewards.lpips.weights"
_DOWNLOADS = "https://download.pytorch.org/models"
_KEPT = "torchvision keeps it in torch's hub/checkpoints folder"

TRUNKS: Mapping[str, PublishedWeights] = {
    net: PublishedWeights(file, "torchvision", f"{_DOWNLOADS}/{file}", note=_KEPT)
    for net, file in (
        ("alex", "alexnet-owt-7be5be79.pth"),
        ("vgg", "vgg16-397923af.pth"),
        ("squeeze", "squeezenet1_1-b8a52dc0.pth"),
    )
}
"""The ImageNet classifiers whose features the published heads were fitted to."""

MIN_SIDES: Mapping[str, int] = {"alex": 31, "vgg": 16, "squeeze": 17}
"""Smallest side in pixels that leaves something after each trunk's pooling."""


@dataclass(frozen=True)
class LpipsReward(Reward):
    """Value 1 - clip(LPIPS, 0, 1); raw the distance, 0 for identical images.

    Attributes:
        weights: the trunk's state dict as torchvision publishes it (.pth or .safetensors): its path, or
            ``hf://owner/repo/file`` for one on the Hugging Face Hub.
        weights_sha256: digest that the file must have, whole or its first 8 digits or more.
        net: the trunk: ``alex``, ``vgg`` or ``squeeze``.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    weights: str | None = None
    weights_sha256: str | None = None
    net: str = "alex"
    device: str = "cpu"

    name: ClassVar[str] = "lpips"
    version: ClassVar[str] = "1"
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("rewards.lpips.net", self.net, tuple(TRUNKS))
        check_source_setting(_PLACE, self.weights, TRUNKS[self.net])
        check_digest_setting("rewards.lpips.weights_sha256", self.weights_sha256)
        check_device_setting("rewards.lpips.device", self.device)

    @property
    def min_side(self) -> int:
        """Smallest side in pixels that an image may have."""
        return MIN_SIDES[self.net]

    def settings(self) -> Mapping[str, object]:
        """The trunk."""
        return {"net": self.net}

    def weight_digests(self) -> Mapping[str, str]:
        """The trunk's and that of the heads, which come with the lpips package."""
        return {"trunk": self._trunk().sha256, "heads": file_sha256(str(heads_file(self.net)))}

    def preflight(self) -> Sequence[str]:
        """Missing or wrong weights, a device that is not there."""
        problems = (
            find_weights_problem(_PLACE, self.weights, self.weights_sha256, TRUNKS[self.net]),
            find_device_problem("rewards.lpips.device", self.device),
        )
        return [str(problem) for problem in problems if problem is not None]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: missing or wrong weights, too small an image, a target of another aspect ratio.
        """
        if all(target is None for target in batch.targets):
            return [NOT_APPLICABLE] * len(batch)
        trunk = self._trunk()
        network = load_network(self.net, trunk.path, trunk.sha256, self.device)

        def measure(images: Tensor, targets: Tensor) -> Tensor:
            return perceptual_distance(network, images.to(self.device), targets.to(self.device))

        return score_pairs(batch, measure, lambda d: 1.0 - clamp_unit(d), name=self.name, min_side=self.min_side)

    def _trunk(self) -> WeightFile:
        return resolve_weights(_PLACE, self.weights, self.weights_sha256, TRUNKS[self.net])


def perceptual_distance(
    network: nn.Module,
    images: Float32[Tensor, "batch 3 height width"],
    targets: Float32[Tensor, "batch 3 height width"],
) -> Float32[Tensor, " batch"]:
    """LPIPS of each pair, in full fp32.

    Args:
        network: from :func:`load_network`.
        images: in [0, 1], on the network's device; scaled here to the network's own range, [-1, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    check_pair(images, targets)
    with exact_inference(str(images.device)):
        distance: Tensor = network(2.0 * images - 1.0, 2.0 * targets - 1.0)
    return distance.flatten()


def heads_file(net: str) -> Path:
    """Where the lpips package keeps the linear heads of a trunk."""
    # Found without the import, which takes longer than reading a configuration.
    found = importlib.util.find_spec("lpips")
    assert found is not None, "lpips is a dependency"
    assert found.origin is not None, "lpips is a package with a file"
    return Path(found.origin).parent / "weights" / "v0.1" / f"{net}.pth"


def load_network(net: str, path: str, sha256: str, device: str) -> nn.Module:
    """The LPIPS network with its trunk from `path`, frozen, in fp32; built once a process for each digest and device.

    Args:
        net: a key of TRUNKS.
        path: of the trunk's state dict, with torchvision's names (``features.*``; the classifier is ignored).
        sha256: of the file, so that a changed file is loaded anew.
        device: where the network goes.

    Raises:
        InputError: the file holds something else than this trunk.
    """
    with _LOADING:
        return _load_network(net, path, sha256, device)


_LOADING = threading.Lock()


@functools.lru_cache(maxsize=4)
def _load_network(net: str, path: str, sha256: str, device: str) -> nn.Module:
    # Imported where it is used: the import takes longer than reading a configuration, which only needs the names.
    import lpips

    with warnings.catch_warnings(), torch.device("meta"):
        # The lpips package calls torchvision with arguments that torchvision has renamed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torchvision\.models\._utils")
        # On the meta device, so that neither the trunk's nor the heads' initialisation draws random numbers.
        network: nn.Module = lpips.LPIPS(net=net, pretrained=False, pnet_rand=True, verbose=False)
    heads = torch.load(heads_file(net), map_location="cpu", weights_only=True)
    trunk = load_state_dict(_PLACE, path)
    state = {name: _find_tensor(name, like, heads, trunk, net, path) for name, like in network.state_dict().items()}
    network.load_state_dict(state, assign=True)
    return network.requires_grad_(False).eval().to(device)


def _find_tensor(
    name: str, like: Tensor, heads: Mapping[str, Tensor], trunk: Mapping[str, Tensor], net: str, path: str
) -> Tensor:
    """The tensor of one of the network's names: ``net.sliceK.*``, ``linK.*``, ``lins.K.*`` or a constant buffer."""
    if name.startswith("scaling_layer."):
        return like
    if name.startswith("lin"):
        return heads[name.replace("lins.", "lin")]
    published = "features." + name.split(".", 2)[2]
    tensor = trunk.get(published)
    if tensor is None or tensor.shape != like.shape:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(like.shape)}"
        hint = f"In this file {published} {found}. Give {TRUNKS[net].file}, the trunk of net {net}."
        raise InputError(_PLACE, path, hint)
    return tensor.float()
