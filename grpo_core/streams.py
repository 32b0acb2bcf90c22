"""The kinds of actions that a rollout can have, and which samples of a prompt are compared to train each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Stream = Literal["tokens", "denoising"]
"""`tokens`: sampled ids. `denoising`: the noisy steps of a flow-matching sampler."""

Unit = Literal["draft", "rendering"]
"""`draft`: one token sequence of a prompt. `rendering`: one image made of a draft.

A pipeline without tokens makes all images of a prompt from one draft, the prompt itself.
"""

COMPARED: Mapping[Stream, Unit] = MappingProxyType({"tokens": "draft", "denoising": "rendering"})
"""What advantages compare, by stream: the drafts of a prompt, or the renderings of a draft.

Renderings of different drafts are not compared: nearly all of their difference is the tokens', so that it tells nothing
about the denoising steps.
"""

STREAMS: tuple[Stream, ...] = tuple(COMPARED)

UNEQUAL_PASSES: frozenset[Stream] = frozenset({"denoising"})
"""Streams whose microbatches take unequal numbers of passes: one for each prompt or image size among their rows."""
