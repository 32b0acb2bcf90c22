"""Teacher-forced log-probs: one forward pass over prompt and stored tokens, logits only where a token is scored."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from grpo_core.logprobs import entropy_of, gather_logprobs, support_logprobs
from grpo_core.policies.glm_image.prompts import EncodedPrompts
from grpo_core.records import TokenLogprobs


def score_tokens(
    model: nn.Module,
    encoded: EncodedPrompts,
    token_ids: Int[Tensor, "samples time"],
    loss_mask: Bool[Tensor, "samples time"],
    *,
    support: int,
    temperature: float,
) -> TokenLogprobs:
    """Log-probs of stored tokens, with the positions, padding, support and temperature they were sampled with.

    Args:
        model: GlmImageForConditionalGeneration, bare or wrapped by peft.
        encoded: one row a sample.
        token_ids: both grids, preview first; a short grid is padded on the right, with any ids.
        loss_mask: False over the padding of a short grid.
        support: ids [0, support) could be sampled.
        temperature: divides the logits.
    """
    time = token_ids.shape[1]
    # The padding of a short grid may hold the end token, which is outside the support.
    token_ids = torch.where(loss_mask, token_ids, 0)
    ids = torch.cat([encoded.input_ids, token_ids[:, :-1]], 1)
    attention = torch.cat([encoded.attention_mask, loss_mask[:, :-1].to(encoded.attention_mask.dtype)], 1)
    kept = torch.arange(encoded.length - 1, encoded.length - 1 + time, device=ids.device)
    output = model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=encoded.position_ids[:, :, : ids.shape[1]],
        use_cache=False,
        logits_to_keep=kept,
    )
    distribution = support_logprobs(output.logits, support, temperature)
    logprobs = gather_logprobs(distribution, token_ids)
    entropy = entropy_of(distribution.detach())
    return TokenLogprobs(torch.where(loss_mask, logprobs, 0.0), torch.where(loss_mask, entropy, 0.0))
