"""transformers' continuous batching as an engine: rows join and leave one running batch, in this process.

It draws all rows from one generator, so a row's tokens depend on the rows beside it: the same rows with the same seeds
give the same tokens, and any other selection gives others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from grpo_core.actions import Sources
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.policies.causal_lm.sampling_scoring import SamplingRule
from grpo_core.policies.engines.engine import Completion, as_sampled_tokens, prompt_ids_of
from grpo_core.policies.engines.settings import EngineRecord, Progress
from grpo_core.records import SampledTokens
from grpo_core.seeds import derive_seed

_CPU_MEMORY_PERCENT = 0.02
"""Of free memory, for keys and values; a machine's memory is not a process's own, as a GPU's is."""
_SEEDS = 2**31


@contextmanager
def sampling(policy: CausalLMPolicy, dtype: str, on_progress: Progress) -> Iterator[EngineRecord]:
    """Let the policy sample through this engine inside the context.

    Args:
        dtype: that the policy computes in.
        on_progress: called with the number of rows that are sampled.
    """
    policy.engine = ContinuousBatchingEngine(policy.language_model, on_progress)
    try:
        yield EngineRecord("continuous_batching", transformers.__version__, dtype)
    finally:
        policy.engine = None


@dataclass
class ContinuousBatchingEngine:
    """An Engine over a model of this process.

    Attributes:
        model: a causal language model of transformers, with its adapters in its layers.
        on_progress: called with the number of rows that are sampled.
    """

    model: Any
    on_progress: Progress = lambda rows: None

    @torch.no_grad()
    def __call__(
        self,
        encoded: EncodedPrompts,
        prompts: tuple[str, ...],
        rows: Int[Tensor, " rows"],
        rule: SamplingRule,
        seeds: Sequence[int],
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample one completion per row, all rows as one batch.

        Raises:
            RuntimeError: the batch ended without an answer to some rows.
        """
        ids = prompt_ids_of(encoded)
        outputs = self.model.generate_batch(
            inputs=[ids[row] for row in rows.tolist()],
            generation_config=_generation(rule),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True,
                seed=derive_seed(0, *seeds) % _SEEDS,
                # The update's passes compute attention as policy.attn_implementation says, and so do these.
                auto_switch_to_flash=False,
                max_memory_percent=_CPU_MEMORY_PERCENT if encoded.input_ids.device.type == "cpu" else None,
            ),
            warmup=False,
        )
        found = list(outputs.values())
        errors = [each.error for each in found if each.error is not None]
        if len(found) < len(rows) or errors:
            why = errors[0] if errors else "its thread ended"
            raise RuntimeError(
                f"continuous batching: {len(rows) - len(found) + len(errors)} rows have no answer; {why}"
            )
        self.on_progress(len(rows))
        completions = [Completion(tuple(each.generated_tokens), tuple(each.logprobs)) for each in found]
        return as_sampled_tokens(completions, prompts, encoded.lengths[rows], rule, sources)


def _generation(rule: SamplingRule) -> GenerationConfig:
    """Return the rule as transformers' settings; nothing is left to those of the model."""
    return GenerationConfig(
        do_sample=True,
        max_new_tokens=rule.max_tokens,
        eos_token_id=list(rule.ends) or -1,
        pad_token_id=0,
        temperature=rule.temperature,
        top_k=0,
        top_p=1.0,
        suppress_tokens=list(rule.never_sampled) or None,
    )
