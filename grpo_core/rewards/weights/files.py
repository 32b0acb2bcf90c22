"""One weight file: where it is published, whether it is the right one, what it contains, and which network it fits."""

import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.weights.source import HubName, Source

HUB_PREFIX = "hf://"

_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError),
)
"""What torch.load and safetensors raise for a file with bytes that are missing or wrong; torch checks few of them."""

_NAME = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")


@dataclass(frozen=True)
class PublishedWeights:
    """Where a weight file is published.

    Attributes:
        file: its published name.
        project: who publishes it.
        url: where.
        hub: its name on the Hub (``hf://owner/repo/file``), if it is there.
        digest: first digits of its sha256; by default those at the end of its name (``net-1a2b3c4d.pth``). Empty where
            they are not known.
        note: another place where it may already be, for the message.
        licence: as its publisher states it; empty where its page on the Hub does.
    """

    file: str
    project: str
    url: str
    hub: str | None = None
    digest: str | None = None
    note: str = ""
    licence: str = ""

    @property
    def sha256_start(self) -> str:
        """First digits of the sha256."""
        return Path(self.file).stem.rsplit("-", 1)[-1] if self.digest is None else self.digest


@dataclass(frozen=True)
class WeightFile:
    """A file that exists and has the right digest; equal to any other file with the same bytes.

    Attributes:
        place: of the setting that named it, for messages.
        path: on this machine.
        sha256: of its bytes.
    """

    place: str = field(compare=False)
    path: str = field(compare=False)
    sha256: str


@dataclass(frozen=True)
class WeightSource(Source):
    """The settings that name a weight file: a path, or ``hf://owner/repo/file``.

    Attributes:
        published: where the file comes from. Without `sha256`, a file with the published name must have the published
            digest.

    Raises:
        InputError: the source is blank, or a malformed name on the Hub.
    """

    published: PublishedWeights

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            other = f", or {self.published.hub}" if self.published.hub else ""
            raise self._error(f"Set the path of {self.published.file}{other}.")
        if self.source is not None:
            self._locate(self.source)

    def resolve(self) -> WeightFile:
        """Return the file with its digest checked; it is downloaded unless it is here."""
        found = self.path()
        return WeightFile(self.place, found, file_sha256(found))

    def digest(self) -> str:
        """Return the sha256 of the file; raises as :meth:`resolve`."""
        return self.resolve().sha256

    def as_published(self, folder: Path) -> "WeightSource":
        """Return the same with the published file where none is set: on the Hub, or else in a folder."""
        return self if self.source else replace(self, source=self.published.hub or str(folder / self.published.file))

    def _hub_bytes(self, name: HubName) -> int | None:
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(name.repo, name.file, revision=name.revision)
        return huggingface_hub.get_hf_file_metadata(url).size

    def _not_set(self) -> InputError:
        return self._error(f"This reward needs weights that its package does not contain. {self._obtaining()}")

    def _locate(self, source: str) -> str | HubName:
        if not source.startswith(HUB_PREFIX):
            return source
        match = _NAME.fullmatch(source)
        if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
            hint = "Name one file as hf://owner/repo/path/in/repo, and add @revision for another branch, tag or commit."
            raise self._error(hint)
        return HubName(match["repo"], match["first"] or match["last"], match["file"])

    def _cached(self, name: HubName) -> str | None:
        return name.cached()

    def _download(self, name: HubName) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_download(name.repo, name.file, revision=name.revision)

    def _check(self, found: str) -> None:
        if not Path(found).expanduser().is_file():
            raise self._error(f"There is no such file. {self._obtaining()}")
        try:
            digest = file_sha256(found)
        except OSError as error:
            hint = f"The file cannot be read ({error.strerror}). Make it readable."
            raise InputError(self.place, found, hint) from error
        known = self.published.sha256_start if Path(found).name == self.published.file else ""
        expected = (self.sha256 or known).lower()
        if not digest.startswith(expected):
            hint = f"The sha256 of {found} is {digest}. Download it again ({self.published.url}), or set its digest."
            raise InputError(f"{self.place}_sha256", expected, hint)

    def _obtaining(self) -> str:
        """Say how to get the file."""
        published, setting = self.published, self.place.rsplit(".", 1)[-1]
        note = f" ({published.note})" if published.note else ""
        local = (
            f"Download {published.file}, published by {published.project} at {published.url}{note}, "
            f"and set `{setting}` in the reward's settings to its path"
        )
        return f"{local}, or to {published.hub}." if published.hub else f"{local}."


@dataclass(frozen=True)
class PackagedFile:
    """A weight file that an installed Python package contains."""

    path: Path

    def find_problem(self) -> None:
        """Return None: the package is installed with it."""

    def digest(self) -> str:
        """Return the sha256 of the file."""
        return file_sha256(str(self.path))


def load_state_dict(weights: WeightFile) -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file, or of a PyTorch file without running code from it; on the CPU.

    A checkpoint with the tensors under ``state_dict`` is accepted.

    Raises:
        InputError: another kind of file, or one with other content than named tensors.
    """
    file = Path(weights.path).expanduser()
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = f"It cannot be read as a state dict ({reason}). Set a complete .safetensors file or torch.save file."
        raise InputError(weights.place, weights.path, hint) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        hint = "It does not contain named tensors. Set a file with the state dict."
        raise InputError(weights.place, weights.path, hint)
    return loaded


def load_weights(weights: WeightFile, network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load these tensors in fp32 into the network: all of its tensors, and no other.

    The network may be on the meta device: its parameters are replaced, not filled. `weights` and `what`, the network in
    words, are for messages.

    Raises:
        InputError: a tensor is missing, left over or of another shape.
    """
    wanted = network.state_dict()
    for name, like in wanted.items():
        tensor = tensors.get(name)
        # A scale is a number to some writers and a vector of one to others.
        if tensor is None or (tensor.shape != like.shape and not (tensor.numel() == like.numel() == 1)):
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(like.shape)}"
            raise InputError(weights.place, weights.path, f"In this file {name} {found}. Set the weights of {what}.")
    left_over = sorted(tensors.keys() - wanted.keys())
    if left_over:
        hint = f"This file has {left_over[0]}, which {what} has not. Set the weights of {what}."
        raise InputError(weights.place, weights.path, hint)
    state = {name: tensors[name].reshape(like.shape).to(like.dtype) for name, like in wanted.items()}
    network.load_state_dict(state, assign=True)
