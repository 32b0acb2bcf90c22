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

from grpo_core.rewards.embedding.clip import ClipArchitecture, ClipReward
from grpo_core.rewards.model_reward import exact_inference, load_once
from grpo_core.rewards.weights.load import load_state_dict, load_weights
from grpo_core.rewards.weights.source import Weights

CACHED_EMBEDDINGS = 4096
"""How many embeddings a model keeps, for images that several rewards look at and for the prompts of a group."""

NO_DIRECTION = "the CLIP embedding has length 0 or is not finite, so it points nowhere"
"""The reason of a failure: an embedding that cannot be scaled to length 1."""

_BESIDE_THE_WEIGHTS = ("input_resolution", "context_length", "vocab_size")


class ClipModel:
    """A network on one device. Threads may share it; each image is computed once.

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
        """Return the RGB image's embedding on the CPU, of length 1; NaN where the network's has no direction."""
        if image.mode != "RGB":
            raise ValueError(f"expected an RGB image, got mode {image.mode}")
        digest = hashlib.sha256(image.tobytes()).hexdigest()

        def compute() -> Tensor:
            pixels = self._prepare(image).unsqueeze(0).to(self._device)
            embedding: Tensor = self._network.encode_image(pixels)
            return embedding

        return self._embed(f"image {image.width}x{image.height} {digest}", compute)

    def text_embedding(self, text: str) -> Float32[Tensor, " width"]:
        """Return the text's embedding on the CPU, of length 1, or NaN; only the first tokens of a long text count."""

        def compute() -> Tensor:
            tokens = self._tokenizer([text]).to(self._device)
            embedding: Tensor = self._network.encode_text(tokens)
            return embedding

        return self._embed(f"text {hashlib.sha256(text.encode()).hexdigest()}", compute)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of the text, including the start and end marks."""
        return len(self._tokenizer.encode(text)) + 2

    def _embed(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        # Locked while computing, so that another thread waits for the same image.
        with self._lock:
            if key not in self._embeddings:
                with exact_inference(self._device):
                    embedding = compute().float().flatten().cpu()
                    self._embeddings[key] = embedding / embedding.norm()
                if len(self._embeddings) > CACHED_EMBEDDINGS:
                    self._embeddings.popitem(last=False)
            self._embeddings.move_to_end(key)
            return self._embeddings[key]


def load_clip(reward: ClipReward) -> ClipModel:
    """Load a reward's model, frozen, in fp32; a process has one for each network, digest and device.

    Raises:
        InputError: the weights are missing, cannot be read, or are of another network.
    """
    device = "cuda:0" if reward.device == "cuda" else reward.device
    return _load_clip(reward.clip_weights(), reward.architecture(), device)


@load_once
def _load_clip(weights: Weights, architecture: ClipArchitecture, device: str) -> ClipModel:
    network = build_network(architecture)
    tensors = {
        name.removeprefix("module."): tensor
        for name, tensor in load_state_dict(weights).items()
        if name not in _BESIDE_THE_WEIGHTS
    }
    load_weights(weights, network, tensors, f"open_clip's {architecture.name}")
    return ClipModel(architecture, network, device)


def build_network(architecture: ClipArchitecture) -> nn.Module:
    """Build open_clip's network without weights (on the meta device), frozen, in evaluation mode."""
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
