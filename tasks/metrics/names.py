"""Names and prefixes of metrics that more than one module uses."""

from collections.abc import Sequence

from grpo_core.streams import STREAMS, Stream

HELDOUT, STEP_TIME, WALL_TIME = "heldout_reward", "step_time", "wall_time"
"""Mean held-out reward of the policy that an iteration made; seconds of all its stages; seconds between its report and
the one before, in the start that finished it first."""

SAMPLES_PER_SECOND, TOKENS_PER_SECOND, GPU_MEMORY = "samples_per_second", "tokens_per_second", "gpu_memory/"
"""Samples and sampled tokens per second of collecting rollouts; prefix of a stage's peak of GPU memory, in GiB."""

SECONDS, GUARDRAILS = "seconds/", "guardrails/"
"""Prefixes: seconds by stage; mean of a guardrail over the held-out samples, by label."""

TOKENS, ALL_TOKENS = "tokens", "num_tokens"
"""Tokens of an iteration's rollouts, prompts included, and of all iterations so far."""

COMPLETION_LENGTH, DRAFTS = "completions/mean_length", "completions/token_samples"
"""Mean number of tokens of a token sample; number of token samples, where some have several images."""

RUNNING = "running/"
"""Prefix of a reward's moments over all iterations so far, kept with the advantages and not shown to people."""


def is_measured(name: str) -> bool:
    """Whether a metric is a time, a speed or an amount of memory, which differs from one start to the next."""
    exact = (STEP_TIME, WALL_TIME, SAMPLES_PER_SECOND, TOKENS_PER_SECOND)
    return name in exact or name.startswith((SECONDS, GPU_MEMORY))


def stream_prefix(stream: Stream, trained: Sequence[Stream]) -> str:
    """Return the prefix of a stream's metrics: none for the first stream that a run trains, `denoising/` for another.

    Args:
        trained: the streams that the run trains, in the order of STREAMS.
    """
    return "" if stream == trained[0] else f"{stream}/"


def split_stream(name: str) -> tuple[Stream | None, str]:
    """Return the stream of a metric with a stream's prefix and its name without it; None without a prefix."""
    for stream in STREAMS:
        if name.startswith(f"{stream}/") and name != f"{stream}/":
            return stream, name.removeprefix(f"{stream}/")
    return None, name
