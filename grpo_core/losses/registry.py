"""Every loss as one object: its policy term, its reduction and the importance levels that it is defined for.

A new loss is one function in `surrogates` (or in any module that :func:`find_loss` can import) and one entry in LOSSES.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses import surrogates
from grpo_core.losses.ratios import ImportanceLevel
from grpo_core.losses.reductions import (
    Reduction,
    constant_length_mean,
    mean_of_expected_tokens,
    mean_of_row_means,
    mean_of_row_sums,
    mean_of_tokens,
)
from grpo_core.losses.surrogates import PolicyTerm, TermInputs
from grpo_core.user_functions import REFERENCE, UserFunction, load_function

if TYPE_CHECKING:
    from grpo_core.losses.settings import LossSettings


@dataclass(frozen=True)
class Loss:
    """What distinguishes one loss from another.

    Attributes:
        term: gives the policy term of each token, [batch, time], or its reduced value as a scalar.
        reduction: from one value per token to the minibatch's loss; a KL is reduced the same way.
        importance_levels: that the loss is defined for; the first is the default.
        clips: whether the ratio is clipped, so that `delta` has a meaning.
        uses_mismatch_weights: the term contains the mismatch weights; otherwise it is multiplied by them.
    """

    term: Callable[[TermInputs, "LossSettings"], PolicyTerm | Tensor]
    reduction: Reduction = mean_of_row_means
    importance_levels: tuple[ImportanceLevel, ...] = ("token", "sequence")
    clips: bool = False
    uses_mismatch_weights: bool = False


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "grpo": Loss(surrogates.clipped, clips=True),
        "bnpo": Loss(surrogates.clipped, mean_of_tokens, clips=True),
        "dr_grpo": Loss(surrogates.clipped, constant_length_mean, clips=True),
        "dapo": Loss(surrogates.clipped, mean_of_expected_tokens, clips=True),
        "gspo": Loss(surrogates.clipped, importance_levels=("sequence",), clips=True),
        "luspo": Loss(surrogates.clipped, mean_of_row_sums, ("sequence",), clips=True),
        "cispo": Loss(surrogates.cispo, mean_of_expected_tokens, ("token",)),
        "sapo": Loss(surrogates.sapo),
        "vespo": Loss(surrogates.vespo, mean_of_expected_tokens, ("token",), uses_mismatch_weights=True),
    }
)
"""By the name in `update.loss`."""


def find_loss(name: str) -> Loss:
    """Return a loss of LOSSES, or a user's function as a loss.

    Args:
        name: a key of LOSSES, or `package.module:function` or `path/to/file.py:function`. The function takes
            (TermInputs, LossSettings) and returns the policy term of each token, [batch, time], which is masked,
            multiplied by the mismatch weights and averaged as in grpo; or a scalar, which is used unchanged as the
            microbatch's share of the minibatch's policy loss.

    Raises:
        InputError: there is no such loss or function, or its module cannot be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    return Loss(cast(Any, _load_custom(name).call))


def custom_loss_digest(name: str) -> str | None:
    """Return the sha256 of a custom loss's source file; None for a loss of LOSSES."""
    return None if name in LOSSES else _load_custom(name).sha256


def _load_custom(name: str) -> UserFunction:
    if not REFERENCE.fullmatch(name):
        close = difflib.get_close_matches(name, LOSSES, n=1)
        suggestion = f"Did you mean {close[0]}? " if close else ""
        hint = f"{suggestion}Choose one of {', '.join(LOSSES)}, or name your own function as package.module:function."
        raise InputError("update.loss", name, hint)
    return load_function("update.loss", name)
