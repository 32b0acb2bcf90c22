"""The terms of the loss, each a small pure function.

settings          every option, and what each loss accepts
policy_loss       every loss: policy term (clipped, cispo, sapo, vespo), reduction; the user's own loss
ratios            importance ratio of a token, or of its sequence (GSPO); weights for a sampler that is not the policy
kl                k1, k2, k3 to the reference, times the importance ratio if requested
reductions        the tokens that count, and from one value per token to one number, each with its denominator
nft               DiffusionNFT, a regression without ratios
microbatch_loss   all of these composed into the loss of a microbatch, and its clip counts
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.losses.kl import estimate_kl as estimate_kl
    from grpo_core.losses.microbatch_loss import LossInputs as LossInputs
    from grpo_core.losses.microbatch_loss import TokenLoss as TokenLoss
    from grpo_core.losses.microbatch_loss import clipped_share_of_rows as clipped_share_of_rows
    from grpo_core.losses.microbatch_loss import compute_microbatch_loss as compute_microbatch_loss
    from grpo_core.losses.microbatch_loss import count_clipped as count_clipped
    from grpo_core.losses.nft import NoisedImages as NoisedImages
    from grpo_core.losses.nft import nft_terms as nft_terms
    from grpo_core.losses.policy_loss import PolicyTerm as PolicyTerm
    from grpo_core.losses.policy_loss import TermInputs as TermInputs
    from grpo_core.losses.policy_loss import find_loss as find_loss
    from grpo_core.losses.ratios import mismatch_metrics as mismatch_metrics
    from grpo_core.losses.ratios import mismatch_weights as mismatch_weights
    from grpo_core.losses.reductions import Denominators as Denominators
    from grpo_core.losses.reductions import entropy_threshold as entropy_threshold
    from grpo_core.losses.reductions import high_entropy_mask as high_entropy_mask
    from grpo_core.losses.reductions import on_policy_rows as on_policy_rows
    from grpo_core.losses.reductions import overlong_mask as overlong_mask
    from grpo_core.losses.settings import LOSSES as LOSSES
    from grpo_core.losses.settings import KlEstimator as KlEstimator
    from grpo_core.losses.settings import LossSettings as LossSettings
    from grpo_core.losses.settings import MismatchSettings as MismatchSettings

__getattr__ = import_on_use(__name__, __file__)
