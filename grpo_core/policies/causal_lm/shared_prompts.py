"""A prompt computed once for all of its completions, with gradients.

The distinct prompts of a microbatch run once; then their completions run, those of similar length together, and read
the prompts' keys and values. It is what sampling does, and its log-probs and gradients are those of whole rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.kv_cache import RecordingCache

Run = Callable[..., Tensor]
"""A number of positions and a model's arguments -> the states of this many last positions, [rows, positions, dim]."""


@dataclass(frozen=True)
class SharedPrompts:
    """The index of each row's prompt among the distinct ones, on the CPU, and the rows whose completions run together.

    The longest row of a part is its first.
    """

    prompt_of_row: Int[Tensor, " rows"]
    parts: list[list[int]]


def shared_states(
    run: Run,
    encoded: EncodedPrompts,
    shared: SharedPrompts,
    token_ids: Int[Tensor, "rows time"],
    loss_mask: Bool[Tensor, "rows time"],
    lengths: Sequence[int],
) -> Float[Tensor, "rows time dim"]:
    """Compute the states that predict each row's tokens, of any value where a row has ended.

    Args:
        run: the model; it is given a cache.
        encoded: the distinct prompts.
        token_ids: on the device, as is loss_mask.
        lengths: of the rows, as of `completion_lengths`.
    """
    device, time = token_ids.device, token_ids.shape[1]
    recorded = RecordingCache()
    prompts = run(
        1,
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids,
        past_key_values=recorded,
        **encoded.arguments(),
    )
    rows, parts = shared.prompt_of_row, shared.parts
    # Where the state before each token is among those of the prompts' ends and then of the parts.
    places = torch.zeros(len(rows), time, dtype=torch.long)
    places[:, 0] = rows
    order = torch.tensor([row for part in parts for row in part])
    known = torch.stack([order, rows[order]]).to(device, non_blocking=True)
    states, count = [prompts[:, -1]], len(prompts)
    following = encoded.positions(max(time - 1, 1))
    for part, chosen in zip(parts, known.split([len(part) for part in parts], 1), strict=True):
        fed = lengths[part[0]] - 1
        if fed < 1:
            continue
        places[part, 1 : fed + 1] = count + torch.arange(len(part) * fed).view(-1, fed)
        count += len(part) * fed
        own, prompt = chosen
        mask = loss_mask[own, :fed]
        tails = run(
            fed,
            input_ids=torch.where(mask, token_ids[own, :fed], 0),
            attention_mask=torch.cat([encoded.attention_mask[prompt], mask.to(encoded.attention_mask.dtype)], 1),
            position_ids=torch.where(mask, following[..., prompt, :fed], 0),
            past_key_values=recorded.read_by(prompt),
        )
        states.append(tails.flatten(0, 1))
    found = torch.cat(states).index_select(0, places.flatten().to(device, non_blocking=True))
    return found.view(len(rows), time, -1)
