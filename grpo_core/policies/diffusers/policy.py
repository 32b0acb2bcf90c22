"""A text-to-image pipeline behind the Policy protocol; each prompt is encoded once."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.diffusers.loading import (
    load_pipeline,
    read_initial_state,
    require_saved_pipeline,
    train_transformer,
    use_attention,
)
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings, SavedPipeline, call_settings, refuse_size
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.records import BrokenImage, GroupRequest, Output, RolloutGroup, TokenBatch
from grpo_core.streams import ImageSize, Stream

MAX_BYTES = 512 * 1024**2
"""Embeddings that are kept at most, on the device of the text encoders; the oldest are dropped first."""


_PROBES = ("a", "a cat")


class PromptCache:
    """A pipeline's own `encode_prompt`, with what it returned before.

    It takes that method's place: a pipeline's call encodes its prompts in its own way, negative ones included, and
    nothing here knows what the results mean. Each prompt is encoded alone, so that the embeddings of a row
    do not depend on the other rows.
    """

    def __init__(self, pipeline: Any, max_bytes: int = MAX_BYTES) -> None:
        """Take the method's place in the pipeline."""
        self._encode: Callable[..., Any] = pipeline.encode_prompt
        self._signature = inspect.signature(self._encode)
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, Any] = OrderedDict()
        self._growths: dict[str, Any] = {}
        pipeline.encode_prompt = self

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the pipeline's method returns for these prompts.

        Raises:
            ValueError: prompts whose embeddings have several lengths.
        """
        given = self._signature.bind(*args, **kwargs).arguments
        lists = {name: value for name, value in given.items() if isinstance(value, list)}
        rows = list(zip(*lists.values(), strict=True)) or [()]
        singles = {row: {**given, **{name: [value] for name, value in zip(lists, row, strict=True)}} for row in rows}
        found = {row: self._encoded(single) for row, single in singles.items()}
        growth = self._growth(singles[rows[0]], found[rows[0]])
        return _joined([found[row] for row in rows], growth)

    @cached_property
    def pads_to_one_length(self) -> bool:
        """Whether embeddings have one length, whatever the prompt: then rows of several prompts can share a call."""
        # Stable Diffusion 3 has no default for its second and third prompt.
        needed = {name: None for name, each in self._signature.parameters.items() if each.default is each.empty}
        with torch.no_grad():
            short, long = (self._encode_rows({**needed, "prompt": [text]}, 1) for text in _PROBES)
        return bool(_shapes(short) == _shapes(long))

    def _encoded(self, single: dict[str, Any]) -> Any:
        """Return the embeddings of one row, as they were computed for it before."""
        key = repr(sorted(single.items()))
        if key in self._results:
            self._results.move_to_end(key)
        else:
            self._results[key] = self._encode_rows(single, 1)
            self._forget()
        return self._results[key]

    def _growth(self, single: dict[str, Any], result: Any) -> Any:
        """Return which dimensions of a result belong to the rows; others, such as those of position ids, do not."""
        kind = repr(sorted((name, list if isinstance(value, list) else value) for name, value in single.items()))
        if kind not in self._growths:
            self._growths[kind] = _growing(result, self._encode_rows(single, 2))
        return self._growths[kind]

    def _encode_rows(self, single: dict[str, Any], rows: int) -> Any:
        # Z-Image writes its templates into the list that it is given.
        return self._encode(
            **{name: value * rows if isinstance(value, list) else value for name, value in single.items()}
        )

    def _forget(self) -> None:
        while sum(map(_bytes, self._results.values())) > self._max_bytes and len(self._results) > 1:
            self._results.popitem(last=False)


def _growing(one: Any, two: Any) -> Any:
    """Return, in a result's structure, the dimension along which it grows with the rows; None where it does not."""
    if isinstance(one, Tensor):
        grown = [place for place, (old, new) in enumerate(zip(one.shape, two.shape, strict=True)) if old != new]
        assert len(grown) <= 1, "one dimension of rows"
        return grown[0] if grown else None
    if isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(two):
            return True
        return [_growing(each, other) for each, other in zip(one, two, strict=True)]
    return None


def _joined(results: Sequence[Any], grows: Any) -> Any:
    """Return the results of several rows as one: parts that grow with the rows one after another, others as they are.

    Raises:
        ValueError: the results have several lengths.
    """
    first = results[0]
    if grows is None:
        return first
    if isinstance(first, Tensor):
        if len({each.shape for each in results}) > 1:
            raise ValueError("the prompts of one call have embeddings of one length")
        return torch.cat(list(results), grows)
    if grows is True:
        return [each for result in results for each in result]
    return type(first)(_joined(parts, own) for parts, own in zip(zip(*results, strict=True), grows, strict=True))


def _shapes(result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape)
    return [_shapes(each) for each in result] if isinstance(result, Sequence) and not isinstance(result, str) else None


def _bytes(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(_bytes(each) for each in result) if isinstance(result, Sequence) and not isinstance(result, str) else 0


CPU = torch.device("cpu")


class DiffusersDenoising(DenoisingComponent):
    """The transformer of a pipeline, which makes all denoising steps."""

    settings: DiffusersSettings

    def __init__(
        self,
        pipeline: Any,
        saved: SavedPipeline,
        settings: DiffusersSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Combine the parts; `DiffusersPolicy.load` is the usual way.

        Args:
            saved: what the pipeline's configuration files say.
        """
        super().__init__(pipeline, settings, trained, autocast=autocast)
        self.saved = saved
        self.prompts = PromptCache(pipeline)

    @property
    def one_prompt_per_call(self) -> bool:
        """Whether embeddings of several prompts would have to be padded, so that a row would depend on the others."""
        return not self.prompts.pads_to_one_length

    def call_arguments(self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize) -> Mapping[str, Any]:
        """Return the arguments of the pipeline's call for these rows."""
        given = call_settings(self.saved, self.settings)
        # Some pipelines want as many negative prompts as prompts.
        by_row = {name: [value] * len(prompts) for name, value in given.items() if isinstance(value, str)}
        return {**given, **by_row, "prompt": list(prompts), "height": size.height, "width": size.width}


class DiffusersPolicy:
    """A pipeline that makes images from prompts alone."""

    def __init__(self, denoising: DiffusersDenoising) -> None:
        """Wrap the component; `load` is the usual way."""
        self.denoising = denoising
        self.settings = denoising.settings

    @property
    def components(self) -> Mapping[Stream, PolicyComponent]:
        """The trained component by its stream."""
        return {"denoising": self.denoising}

    def sample_with(self, settings: DiffusersSettings) -> None:
        """Use these settings for sampling and scoring from this call on.

        Raises:
            InputError: a size or a guidance that the pipeline does not have.
        """
        refuse_size(self.denoising.saved, settings.size)
        call_settings(self.denoising.saved, settings)
        self.settings = self.denoising.settings = settings

    @classmethod
    def load(
        cls,
        model: str,
        settings: DiffusersSettings,
        choices: Mapping[Stream, TrainingChoice],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        autocast: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> "DiffusersPolicy":
        """Load by folder or hub name.

        Raises:
            InputError: no such model, settings that it cannot sample with, or adapter targets that match nothing.
        """
        pipeline = load_pipeline(model, dtype=dtype, device=device)
        use_attention(pipeline.transformer, attn_implementation)
        trained = train_transformer(
            pipeline.transformer, choices["denoising"], model, initial_state=lambda: read_initial_state(model, dtype)
        )
        denoising = DiffusersDenoising(pipeline, require_saved_pipeline(model), settings, trained, autocast=autocast)
        policy = cls(denoising)
        policy.sample_with(settings)
        return policy

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the images of all groups, `decode_batch_size` at once."""
        size = requests[0].size or self.settings.size
        groups = self.denoising.sample(requests, None, size=size, rows_per_call=self.settings.decode_batch_size)
        for request, group in zip(requests, groups, strict=True):
            _require_size(group.images, size)
            yield RolloutGroup(request, {} if group.sampled is None else {"denoising": group.sampled}, group.images)


def _require_size(images: Sequence[Output], size: ImageSize) -> None:
    """Refuse images of another size than was requested: some pipelines round it, and say so only in a log."""
    for each in images:
        image = each.image if isinstance(each, BrokenImage) else each
        assert not isinstance(image, str)
        if image.size != tuple(size):
            made = ImageSize(*image.size)
            raise InputError("rollout.width and height", str(size), f"This model makes it {made}; set this size.")
