"""The kinds of actions that a rollout can have, and which samples of a prompt are compared to train each."""

from typing import Literal

Stream = Literal["tokens", "denoising"]
"""`tokens`: sampled ids. `denoising`: the noisy steps of a flow-matching sampler."""

STREAMS: tuple[Stream, ...] = ("tokens", "denoising")
"""Every stream, in the order in which they are listed and updated.

To train tokens, advantages compare the token samples of a prompt; to train denoising, the images of a token sample. A
pipeline without tokens makes all images of a prompt from one token sample, the prompt itself. Images of different token
samples are not compared: nearly all of their difference is the tokens', so it tells nothing about the denoising steps.
"""

UNEQUAL_PASSES: frozenset[Stream] = frozenset({"denoising"})
"""Streams whose microbatches take unequal numbers of passes: one for each prompt or image size among their rows."""
