"""Learned perceptual distance to the target picture.

Zhang, Isola, Efros, Shechtman and Wang, 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual
Metric", equation 1, version 0.1. The linear heads come with the lpips package, the trunk from a local file.
"""

import functools
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.backends import cudnn

from grpo_core.errors import InputError
from grpo_core.rewards.likeness.pairs import clamp_unit, score_pairs
from grpo_core.rewards.pictures import check_pair
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_choice
from grpo_core.rewards.weights import (
    PublishedWeights,
    check_digest_setting,
    file_sha256,
    find_weights_problem,
    load_state_dict,
)

_PLACE = "rewards.lpips.weights"
_DOWNLOADS = "https://download.pytorch.org/models"

TRUNKS: Mapping[str, PublishedWeights] = {
    net: PublishedWeights(file, "torchvision", f"{_DOWNLOADS}/{file}")
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
    """Value 1 - clip(LPIPS, 0, 1); raw the distance, 0 for identical pictures.

    Attributes:
        weights: path of the trunk's state dict as torchvision publishes it (.pth or .safetensors).
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
        if self.weights is not None and not isinstance(self.weights, str):
            raise InputError(_PLACE, self.weights, f"Set the path of {TRUNKS[self.net].file}.")
        check_digest_setting("rewards.lpips.weights_sha256", self.weights_sha256)
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(self.device)):
            raise InputError("rewards.lpips.device", self.device, "Set one of cpu, cuda, cuda:N.")

    @property
    def min_side(self) -> int:
        """Smallest side in pixels that a picture may have."""
        return MIN_SIDES[self.net]

    def settings(self) -> Mapping[str, object]:
        """The trunk."""
        return {"net": self.net}

    def weight_digests(self) -> Mapping[str, str]:
        """The trunk's."""
        return {"trunk": self._digest()}

    def preflight(self) -> Sequence[str]:
        """Missing or wrong weights, a device that is not there."""
        problem = find_weights_problem(_PLACE, self.weights, self.weights_sha256, TRUNKS[self.net])
        problems = [] if problem is None else [str(problem)]
        if self.device.startswith("cuda"):
            devices, index = torch.cuda.device_count(), torch.device(self.device).index or 0
            if index >= devices:
                problems.append(
                    f"rewards.lpips.device: got {self.device!r}. PyTorch sees {devices} CUDA device(s); set cpu."
                )
        return problems

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: missing or wrong weights, too small a picture, a target of another aspect ratio.
        """
        if all(target is None for target in batch.targets):
            return [NOT_APPLICABLE] * len(batch)
        network = load_network(self.net, str(self.weights), self._digest(), self.device)

        def measure(pictures: Tensor, targets: Tensor) -> Tensor:
            return perceptual_distance(network, pictures.to(self.device), targets.to(self.device))

        return score_pairs(batch, measure, lambda d: 1.0 - clamp_unit(d), name=self.name, min_side=self.min_side)

    def _digest(self) -> str:
        problem = find_weights_problem(_PLACE, self.weights, self.weights_sha256, TRUNKS[self.net])
        if problem is not None:
            raise problem
        return file_sha256(str(self.weights))


def perceptual_distance(
    network: nn.Module,
    pictures: Float32[Tensor, "batch 3 height width"],
    targets: Float32[Tensor, "batch 3 height width"],
) -> Float32[Tensor, " batch"]:
    """LPIPS of each pair, in full fp32.

    Args:
        network: from :func:`load_network`.
        pictures: in [0, 1], on the network's device; scaled here to the network's own range, [-1, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    check_pair(pictures, targets)
    with (
        # Flat patches have features near zero, which half precision divides into NaN; TF32 keeps 10 bits only.
        torch.autocast(pictures.device.type, enabled=False),
        cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        distance: Tensor = network(2.0 * pictures - 1.0, 2.0 * targets - 1.0)
    return distance.flatten()


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
    heads_file = Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"
    heads = torch.load(heads_file, map_location="cpu", weights_only=True)
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
        mend = f"In this file {published} {found}. Give {TRUNKS[net].file}, the trunk of net {net}."
        raise InputError(_PLACE, path, mend)
    return tensor.float()
