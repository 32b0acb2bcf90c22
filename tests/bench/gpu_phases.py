"""A policy on a GPU: what it samples and updates takes, beside the gate, doctor's estimate and the GPU's own limits."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from configs.schema import RunConfig
from flows.preflight.measured import PhaseCosts, measure_rollouts, measure_update, requests_of
from grpo_core.collect import join_groups
from grpo_core.policies.estimate import GIB, PHASES, MemoryEstimate
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import Phase, cached_values
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import RolloutGroup
from grpo_core.rollouts.streams import Stream
from grpo_core.update.step import UpdateResult
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.update.rows import parity_tolerance
from tests.bench.page import Row
from tests.bench.policy import SHAPE_PROMPTS

GROUP_SIZE, ROWS = 8, (8, 32, 64)
REPEATS = 5
_DIFFERENCE = "sampling/sampling_logp_difference"
_PRODUCTS, _READ = "its products at this GPU's speed", "weights and cache at this GPU's bandwidth"


@dataclass(frozen=True)
class Limits:
    """What this GPU reaches by a copy, and by a product of matrices in bfloat16; vendors state more."""

    bytes_per_second: float
    flop_per_second: float

    @classmethod
    def of_this_gpu(cls) -> "Limits":
        """Measure both, in less than a second."""
        source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        target, side = torch.empty_like(source), 8192
        left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
        copied, multiplied = _seconds_of(lambda: target.copy_(source)), _seconds_of(lambda: left @ left)
        return cls(2 * source.nbytes / copied, 2 * side**3 / multiplied)


def _seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of a call, the mean of some that are queued after one that does not count."""
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / REPEATS


class _Flop(TorchDispatchMode):
    """Counts operations of products; PyTorch's own mode tracks modules too, by hooks that keep activations alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


@dataclass(frozen=True)
class _Pass:
    """A call of the denoising model by its pipeline."""

    network: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def rows(self) -> int:
        """Number of images, twice with guidance."""
        return len(self.options["hidden_states"])


class Bench:
    """A loaded policy whose rollouts and updates are measured.

    Attributes:
        seconds: of what is no phase, in order; whoever loads the policy adds that.
        costs: of the phases.
    """

    def __init__(self, config: RunConfig, policy: Any, limits: Limits, memory: MemoryEstimate) -> None:
        self.config, self.policy, self.limits, self.memory = config, policy, limits, memory
        self.seconds, self.costs = dict[str, float](), PhaseCosts(torch.device("cuda"))
        self.tokens = getattr(policy, "tokens", policy.components.get("tokens"))
        self.denoiser = getattr(policy, "decoder", policy.components.get("denoising"))
        if self.denoiser is None:
            # Random weights would end each row at another place.
            policy.ends = ()

    @torch.no_grad()
    def draw_values(self) -> None:
        """Draw all matrices, adapters included, with a usual deviation; norms multiply by 1."""
        owner = self.denoiser or self.tokens
        parts = owner.pipeline.components.values() if self.denoiser else (owner.trained.model,)
        for network in (each for each in parts if isinstance(each, nn.Module)):
            for name, each in network.named_parameters():
                if each.ndim > 1:
                    each.copy_(torch.randn(each.shape, dtype=torch.bfloat16, device="cuda").mul_(0.02))
                else:
                    each.fill_(float(name.endswith("weight")))

    def rows(self, until: float) -> Iterator[Row]:
        """Yield parity, memory, seconds, and shares of the limits; what is not begun at a time is left out."""
        groups, largest = self._sampled()
        rates = []
        for stream in self.policy.components:
            *parity, rate = self._updated(stream, groups)
            yield from parity
            rates.append(rate)
        for phase, peak in self.costs.peaks.items():
            # The context is not in the allocator's figure.
            ours, estimated = (peak / GIB,), (self.memory.in_phase(phase) / GIB - 1,)
            what = f"most allocated: {PHASES[phase]}"
            yield Row(what=what, unit="GiB", ours=ours, peer="doctor's estimate", theirs=estimated, at_most=1.1)
        phases = {PHASES[phase]: seconds for phase, seconds in self.costs.seconds.items()}
        for stage, seconds in (self.seconds | phases).items():
            yield Row(what=stage, unit="s", ours=(seconds,))
        for rows in ROWS if self.tokens else ():
            what = f"tokens sampled, {rows} rows"
            late = time.perf_counter() > until
            yield Row(what=what, unit="", ours=(), left_out="no time was left") if late else self._tokens(what, rows)
        if largest is not None:
            yield self._pass(largest)
        yield from rates

    def _collected(self, prompts: int) -> list[RolloutGroup]:
        drawn = [DrawnPrompt("", Prompt(text, text, {}), None) for text in SHAPE_PROMPTS[:prompts]]
        modality = policy_family(self.config.policy.kind).modality
        return measure_rollouts(self.costs, self.policy, requests_of(self.config, drawn), modality)

    def _sampled(self) -> tuple[list[RolloutGroup], _Pass | None]:
        """Sample one prompt, then a batch that counts; return its groups, and a pass of the denoising model if any."""
        prompts, largest = self.config.rollout.prompts_per_batch, list[_Pass]()
        if self.denoiser is None:
            self._collected(1)
            return self._collected(prompts), None

        def keep(*call: Any) -> None:
            largest[:] = [max(*largest, _Pass(*call), key=lambda each: each.rows)] if largest else [_Pass(*call)]

        hook = self.denoiser.pipeline.transformer.register_forward_pre_hook(keep, with_kwargs=True)
        self._collected(1)
        hook.remove()
        return self._collected(prompts), largest[0]

    def _updated(self, stream: Stream, groups: Sequence[RolloutGroup]) -> Iterator[Row]:
        """Update twice on a minibatch: parity is that of the first, seconds and memory are those of the second."""
        component, settings = self.policy.components[stream], self.config.updates[stream]
        rows = join_groups(groups, torch.linspace(-1, 1, len(groups[0].outputs)).repeat(len(groups), 1), stream)
        rows = rows.select(range(min(len(rows), settings.rows_per_step(len(rows)))))
        flop = _Flop()

        def counted(update: Callable[[], UpdateResult]) -> UpdateResult:
            with flop:
                return update()

        result = measure_update(self.costs, component, rows, settings, first=counted)
        phase: Phase = "tokens update" if stream == "tokens" else "denoising update"
        parity: Any = settings.parity  # type: ignore[union-attr]
        allowed = parity_tolerance(component, RaggedRows.of(rows), parity, in_fp32=False)
        count = int(rows.actions.loss_mask.sum())
        noun, sizes = "token" if stream == "tokens" else "step", f"{len(rows)} rows of {count // len(rows)}"
        for name, limit in (("max", allowed.max_difference), ("mean", allowed.mean_difference)):
            what, ours = f"parity of {stream}, {name}, {sizes}", (result.before[f"{_DIFFERENCE}/{name}"],)
            yield Row(what=what, unit="nats", ours=ours, peer="the gate's tolerance", theirs=(limit,), at_most=1.0)
        ours, limits = (count / self.costs.seconds[phase],), (count / flop.total * self.limits.flop_per_second,)
        what = f"{PHASES[phase]}, {sizes}"
        yield Row(what=what, unit=f"{noun}s/s", ours=ours, peer=_PRODUCTS, theirs=limits)

    def _tokens(self, what: str, rows: int) -> Row:
        """Sample rows; a token has to read each weight of the blocks and of the head once, and the cache so far."""
        sample = self.tokens.sample if self.denoiser else self.policy.sample_tokens
        torch.cuda.synchronize()
        begun = time.perf_counter()
        sampled = sample(SHAPE_PROMPTS[: rows // GROUP_SIZE], GROUP_SIZE, range(rows))
        torch.cuda.synchronize()
        rate = int(sampled.actions.loss_mask.sum()) / (time.perf_counter() - begun)
        length = sampled.actions.loss_mask.shape[1]
        model = self.tokens.pipeline.vision_language_encoder if self.denoiser else self.tokens.trained.model
        read: list[Tensor] = [*model.get_decoder().layers.parameters(), model.get_output_embeddings().weight]
        positions = float(sampled.prompt_lengths.float().mean()) + length / 2
        cache = 2 * rows * positions * cached_values(model.config.get_text_config())
        limit = rows / (sum(each.nbytes for each in read) + cache) * self.limits.bytes_per_second
        return Row(what=f"{what} of {length}", unit="tokens/s", ours=(rate,), peer=_READ, theirs=(limit,))

    @torch.no_grad()
    def _pass(self, call: _Pass) -> Row:
        with self.denoiser.offload.using(*self.denoiser.parts):
            run = partial(call.network, *call.arguments, **call.options)
            with _Flop() as flop:
                run()
            ours, theirs = (_seconds_of(run),), (flop.total / self.limits.flop_per_second,)
        what = f"a pass of the denoising model, {call.rows} rows"
        return Row(what=what, unit="s", ours=ours, peer=_PRODUCTS, theirs=theirs)
