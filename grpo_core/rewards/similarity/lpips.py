"""Learned perceptual distance to the target image, or to a source image.

Zhang, Isola, Efros, Shechtman and Wang, 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual
Metric", equation 1, version 0.1. The linear heads come with the lpips package, the trunk from a local file.
"""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float32
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.rewards.model_reward import (
    ModelReward,
    Placed,
    Sha256,
    exact_inference,
    find_tensor,
    load_once,
    load_state_dict,
)
from grpo_core.rewards.reward import STRICT
from grpo_core.rewards.scoring_batch import clamp_unit
from grpo_core.rewards.similarity.pairs import PairReward
from grpo_core.rewards.similarity.tensors import Images, check_pair
from grpo_core.rewards.weights import Published, Weights
from grpo_core.seeds import file_sha256
from grpo_core.uses import Uses

Trunk = Literal["alex", "vgg", "squeeze"]

_DOWNLOADS = "https://download.pytorch.org/models"
_KEPT = "torchvision keeps it in torch's hub/checkpoints folder"

TRUNKS: Mapping[str, Published] = {
    net: Published(
        "torchvision (BSD-3-Clause)", f"{file}-{sha256}.pth", f"{_DOWNLOADS}/{file}-{sha256}.pth", None, sha256, _KEPT
    )
    for net, file, sha256 in (
        ("alex", "alexnet-owt", "7be5be79"),
        ("vgg", "vgg16", "397923af"),
        ("squeeze", "squeezenet1_1", "b8a52dc0"),
    )
}
"""The ImageNet classifiers whose features the published heads were fitted to."""

MIN_SIDES: Mapping[str, int] = {"alex": 31, "vgg": 16, "squeeze": 17}
"""Smallest side in pixels that leaves something after each trunk's pooling."""


@dataclass(frozen=True, config=STRICT)
class LpipsReward(ModelReward, PairReward):
    """Value 1 - clip(LPIPS, 0, 1); raw the distance, 0 for identical images.

    Attributes:
        weights: the trunk's state dict as torchvision publishes it (.pth or .safetensors): its path, or
            ``hf://owner/repo/file`` for one on the Hugging Face Hub.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
        net: the trunk: ``alex``, ``vgg`` or ``squeeze``.
    """

    weights: Annotated[str | None, Uses.PLACE] = None
    weights_sha256: Sha256 | None = None
    net: Trunk = "alex"

    name: ClassVar[str] = "lpips"
    version: ClassVar[str] = "1"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_reference()

    @property
    def measured_at_once(self) -> int:
        """The network's batch."""
        return self.batch_size

    @property
    def min_side(self) -> int:  # type: ignore[override]
        """Smallest side in pixels that the trunk can pool."""
        return MIN_SIDES[self.net]

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the trunk's."""
        return {"trunk": Weights("rewards.lpips.weights", self.weights, self.weights_sha256, TRUNKS[self.net])}

    def weight_digests(self) -> Mapping[str, str]:
        """Return the digests of the trunk and of the heads."""
        return {**super().weight_digests(), "heads": file_sha256(str(heads_file(self.net)))}

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the distances."""
        placed = self.runs_on
        network = load_network(self.weight_sources()["trunk"], self.net, placed)
        return perceptual_distance(network, images.to(placed.device), targets.to(placed.device))

    def to_value(self, raw: float) -> float:
        """Return 1 for identical images."""
        return 1.0 - clamp_unit(raw)


def perceptual_distance(network: nn.Module, images: Images, targets: Images) -> Float32[Tensor, " batch"]:
    """Compute LPIPS of each pair in [0, 1], without TF32; ValueError as check_pair."""
    check_pair(images, targets)
    with exact_inference(str(images.device)):
        return features_apart(network, features_of(network, images), features_of(network, targets))


def features_of(network: Any, images: Images) -> list[Tensor]:
    """Return a trunk's features of images in [0, 1], layer by layer, of length 1 in fp32.

    The trunk alone may compute in 16 bits, whose smallest numbers flat patches would be divided by.
    """
    import lpips

    scaled = network.scaling_layer(2.0 * images - 1.0).to(next(network.net.parameters()).dtype)
    return [lpips.normalize_tensor(features.float()) for features in network.net(scaled)]


def features_apart(network: Any, first: Sequence[Tensor], second: Sequence[Tensor]) -> Float32[Tensor, " batch"]:
    """Return the distances of images by their features."""
    import lpips

    layers = zip(network.lins, first, second, strict=True)
    distance: Tensor = sum(lpips.spatial_average(head((a - b) ** 2)) for head, a, b in layers)
    return distance.flatten()


def heads_file(net: str) -> Path:
    """Return the file of a trunk's linear heads in the lpips package."""
    # Found without the import, which takes longer than reading a configuration.
    found = importlib.util.find_spec("lpips")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "weights" / "v0.1" / f"{net}.pth"


@load_once
def load_network(trunk: Weights, net: str, placed: Placed) -> nn.Module:
    """Load the LPIPS network, frozen, with a trunk of torchvision's names (``features.*``); or InputError.

    Only the trunk is in 16 bits where these are asked for.
    """
    # Imported where it is used: the import takes longer than reading a configuration, which only needs the names.
    import lpips

    with warnings.catch_warnings(), torch.device("meta"):
        # The lpips package calls torchvision with arguments that torchvision has renamed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torchvision\.models\._utils")
        # On the meta device, so that neither the trunk's nor the heads' initialisation draws random numbers.
        network: nn.Module = lpips.LPIPS(net=net, pretrained=False, pnet_rand=True, verbose=False)
    heads = torch.load(heads_file(net), map_location="cpu", weights_only=True)
    tensors = load_state_dict(trunk)
    state = {name: _find_tensor(name, like, heads, tensors, net, trunk) for name, like in network.state_dict().items()}
    network.load_state_dict(state, assign=True)
    network.net.to(placed.dtype)
    return network.requires_grad_(False).eval().to(placed.device)


def _find_tensor(
    name: str, like: Tensor, heads: Mapping[str, Tensor], tensors: Mapping[str, Tensor], net: str, trunk: Weights
) -> Tensor:
    """Find the tensor of a name of the network: ``net.sliceK.*``, ``linK.*``, ``lins.K.*`` or a constant buffer."""
    if name.startswith("scaling_layer."):
        return like
    if name.startswith("lin"):
        return heads[name.replace("lins.", "lin")]
    published, remedy = "features." + name.split(".", 2)[2], f"Set {TRUNKS[net].file}, the trunk of net {net}."
    return find_tensor(trunk, tensors, published, like.shape, remedy).float()
