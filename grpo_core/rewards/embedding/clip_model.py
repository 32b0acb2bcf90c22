"""CLIP in fp32: the embeddings of images and texts, each of length 1.

Radford et al., 2021, "Learning Transferable Visual Models From Natural Language Supervision" (arXiv:2103.00020).
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float32
from PIL import Image
from torch import Tensor, nn

from grpo_core.rewards.devices import exact_inference
from grpo_core.rewards.embedding.clip_architecture import ClipArchitecture
from grpo_core.rewards.weights import WeightFile, load_state_dict, load_weights

CACHED_EMBEDDINGS = 4096
"""How many embeddings a model keeps: those of the images that several rewards look at, of the prompts of a group."""

NO_DIRECTION = "the CLIP embedding has length 0 or is not finite, so it points nowhere"
"""The reason of a failure: an embedding that cannot be brought to length 1."""

_BESIDE_THE_WEIGHTS = ("input_resolution", "context_length", "vocab_size")


class ClipModel:
    """One network on one device. Several threads may ask at the same time; each image is computed once.

    Images and texts go through the network one at a time: a matrix product's last bits depend on the batch that it
    runs in, and a score must not.
    """

    def __init__(self, architecture: ClipArchitecture, network: Any, device: str) -> None:
        import open_clip
        from open_clip.transform import PreprocessCfg, image_transform_v2

        preparation = {"size": network.visual.image_size, **architecture.preparation}
        self.architecture = architecture
        self._network, self._device = network.to(device), device
        self._prepare: Callable[[Image.Image], Tensor] = image_transform_v2(
            PreprocessCfg(**preparation), is_train=False
        )
        tokenizer_settings = architecture.network["text_cfg"].get("tokenizer_kwargs", {})
        self._tokenizer = open_clip.SimpleTokenizer(context_length=architecture.context_length, **tokenizer_settings)
        self._lock = threading.Lock()
        self._embeddings: OrderedDict[str, Tensor] = OrderedDict()

    def image_embedding(self, image: Image.Image) -> Float32[Tensor, " width"]:
        """The RGB image's embedding on the CPU, of length 1; NaN where the network gives none that has a direction.

        Raises:
            ValueError: another mode than RGB.
        """
        if image.mode != "RGB":
            raise ValueError(f"expected an RGB image, got mode {image.mode}")
        digest = hashlib.sha256(image.tobytes()).hexdigest()

        def compute() -> Tensor:
            pixels = self._prepare(image).unsqueeze(0).to(self._device)
            embedding: Tensor = self._network.encode_image(pixels)
            return embedding

        return self._embed(f"image {image.width}x{image.height} {digest}", compute)

    def text_embedding(self, text: str) -> Float32[Tensor, " width"]:
        """The text's embedding on the CPU, of length 1, or NaN; of a long text only the first tokens are read."""

        def compute() -> Tensor:
            tokens = self._tokenizer([text]).to(self._device)
            embedding: Tensor = self._network.encode_text(tokens)
            return embedding

        return self._embed(f"text {hashlib.sha256(text.encode()).hexdigest()}", compute)

    def count_tokens(self, text: str) -> int:
        """How many tokens the text takes, its two end marks among them."""
        return len(self._tokenizer.encode(text)) + 2

    def _embed(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        # Held while computing, so that who asks for the same image waits for it.
        with self._lock:
            if key not in self._embeddings:
                with exact_inference(self._device):
                    embedding = compute().float().flatten().cpu()
                    self._embeddings[key] = embedding / embedding.norm()
                if len(self._embeddings) > CACHED_EMBEDDINGS:
                    self._embeddings.popitem(last=False)
            self._embeddings.move_to_end(key)
            return self._embeddings[key]


def load_clip(place: str, architecture: ClipArchitecture, weights: WeightFile, device: str) -> ClipModel:
    """The model, frozen, in fp32; built once a process for each architecture, release, digest and device.

    Args:
        place: of the setting that holds the weights, for messages.
        architecture: the network.
        weights: open_clip's own names, in .safetensors or as torch.save writes them.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        InputError: the file cannot be read, or holds another network.
    """
    device = "cuda:0" if device == "cuda" else device
    key = (architecture.name, architecture.release, weights.sha256, device)
    with _LOADING:
        if key not in _LOADED:
            network = build_network(architecture)
            tensors = {
                name.removeprefix("module."): tensor
                for name, tensor in load_state_dict(place, weights.path).items()
                if name not in _BESIDE_THE_WEIGHTS
            }
            load_weights(place, weights.path, network, tensors, f"open_clip's {architecture.name}")
            _LOADED[key] = ClipModel(architecture, network, device)
        return _LOADED[key]


_LOADING = threading.Lock()
_LOADED: dict[tuple[str, str | None, str, str], ClipModel] = {}


def build_network(architecture: ClipArchitecture) -> nn.Module:
    """open_clip's network without weights (on the meta device), frozen, in evaluation mode."""
    import open_clip

    # On the meta device, so that the initialisation draws no random numbers.
    with torch.device("meta"):
        network: nn.Module = open_clip.CLIP(**architecture.network)
    for name, buffer in list(network.named_buffers()):
        if name not in network.state_dict():
            assert name == "attn_mask", f"{name} comes from no weight file"
            causal = torch.full(tuple(buffer.shape), float("-inf")).triu(1)
            network.register_buffer(name, causal, persistent=False)
    return network.requires_grad_(False).eval()
