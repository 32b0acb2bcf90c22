"""Rows that share their prompts have the log-probs and gradients of each row alone, for every kind of attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.logprobs import gather_logprobs
from grpo_core.parity import ParityError
from grpo_core.policies import kv_cache
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.sampling_scoring import head_gives_logits, score_completions
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.causal_lm.shared_prompts import SharedPrompts
from grpo_core.policies.encoded_prompts import EncodedPrompt, pad_prompts
from grpo_core.policies.estimate import Workload, estimate_resources
from grpo_core.policies.microbatches import similar_lengths
from grpo_core.policies.trained.model import enable_recomputation, recompute_layers
from grpo_core.policies.trained.quantization import QuantizationSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.records import GroupRequest, TrainingRows
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import UpdateResult
from tests.grpo_core.policies.causal_lm.model_types import CONFIGS, HEAD_ROWS, make_model, small_model
from tests.grpo_core.policies.trained.tiny_models import disturb, values_of
from tests.grpo_core.policies.vision_lm.tiny_families import drawn, make_policy
from tests.tiny_policies import TEXT_LORA, TEXT_MODEL, TEXT_PROMPTS, build_text_policy

PROMPTS = [[7, 3, 200], [11, 4, 250, 9, 30, 42, 5], [17]]
# Siblings that are not neighbours, one of one token and one of none, and a prompt with one completion.
PROMPT_OF_ROW = [0, 1, 0, 1, 0, 1, 2, 1, 1, 1]
LENGTHS = [1, 6, 4, 6, 6, 2, 3, 1, 2, 0]
# Other kinds compute scores of padding, or experts, in fp32 alone.
IN_FP64 = {"llama", "gpt2"}
# What rounding leaves of a gradient that is zero, as of the keys' bias without rotary positions, beside the largest.
NOTHING = {torch.float64: 1e-6, torch.float32: 1e-4}


def completions() -> tuple[Tensor, Tensor]:
    time = max(LENGTHS)
    mask = torch.arange(time) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 250, mask.shape, generator=torch.Generator().manual_seed(3))
    return ids * mask, mask


def weighted(logprobs: Tensor) -> Tensor:
    """A loss in which each token has another weight."""
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64).view_as(logprobs)
    return (logprobs.double() * weights).sum()


def gradients(parameters: Mapping[str, Any], loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros(1) if each is None else each for name, each in zip(parameters, found, strict=True)}


def alone(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of one plain pass over each row: no cache, no padding, no mask and no positions."""
    found = torch.zeros(ids.shape)
    for row, prompt in enumerate(PROMPT_OF_ROW):
        own = ids[row][mask[row]]
        given = torch.cat([torch.tensor(PROMPTS[prompt]), own])
        logits = model(input_ids=given[None], use_cache=False).logits[0, len(PROMPTS[prompt]) - 1 : -1]
        found[row, : len(own)] = gather_logprobs(logits[:, :HEAD_ROWS].float().log_softmax(-1), own)
    return found


def refuse_differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], allowed: float) -> None:
    floor = max(NOTHING[each.dtype] * float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        difference = float((found[name] - each).abs().max())
        assert difference <= allowed * max(float(each.abs().max()), floor), name


# Rotary, windows and caps, absolute positions, slopes in place of positions, and experts.
KINDS = ("llama", "gemma2", "gpt2", "bloom", "mixtral")


@pytest.mark.parametrize(
    ("kind", "recompute"), [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS[:-1]]
)
def test_log_probs_and_gradients_are_those_of_each_row_alone(kind: str, recompute: bool) -> None:
    model = make_model(kind) if kind in CONFIGS else small_model(kind)
    atol, allowed = (1e-6, 1e-5) if kind in IN_FP64 else (1e-5, 1e-4)
    if kind in IN_FP64:
        model.double()
    ids, mask = completions()
    expected = alone(model, ids, mask)
    parameters = dict(model.named_parameters())
    of_rows = gradients(parameters, weighted(expected))
    enable_recomputation(model)
    recompute_layers(model, recompute)
    found = score_completions(
        model,
        pad_prompts([EncodedPrompt(each) for each in PROMPTS], torch.device("cpu")),
        ids,
        mask,
        vocabulary=HEAD_ROWS,
        temperature=1.0,
        support=None,
        entropy="none",
        whole_logits=not head_gives_logits(model),
        shared=SharedPrompts(torch.tensor(PROMPT_OF_ROW), similar_lengths(LENGTHS)),
    ).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    refuse_differing(of_rows, gradients(parameters, weighted(found)), allowed)


# Three positions a token, images that see one another, and tiles; with adapters, and with all weights.
@pytest.mark.parametrize(
    "choice",
    [TrainingChoice(LoraSettings(rank=2, alpha=4.0)), TrainingChoice(None, freeze_vision=False)],
    ids=["adapters", "all"],
)
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "internvl"])
def test_prompts_with_several_images(kind: str, choice: TrainingChoice) -> None:
    policy = make_policy(kind, choice=choice)
    actions = drawn(policy, kind, group_size=3).actions
    policy.prepare_for_update()
    parameters = policy.trainable_parameters()
    found = {}
    for shares in (False, True):
        policy.trained.shares_prompts = shares
        logprobs = policy.logprobs(actions).logprobs
        found[shares] = logprobs.detach(), gradients(parameters, weighted(logprobs))
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
    refuse_differing(found[False][1], found[True][1], 1e-3)


CHOICES = {
    "4 bits": TrainingChoice(TEXT_LORA, gradient_checkpointing=True, quantization=QuantizationSettings("nf4")),
    "all weights": TrainingChoice(None, gradient_checkpointing=True),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_recomputed_layers_of_each_kind_of_training(choice: TrainingChoice) -> None:
    policy = CausalLMPolicy.load(str(TEXT_MODEL), CausalLMSettings(max_completion_length=12), {"tokens": choice})
    parameters = policy.trainable_parameters()
    disturb(parameters, 0.05)
    rows = collected(policy)
    policy.prepare_for_update()
    found = {}
    for shares in (False, True):
        policy.trained.shares_prompts = shares
        logprobs = policy.logprobs(rows.actions).logprobs
        found[shares] = logprobs.detach(), gradients(parameters, weighted(logprobs))
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=2e-5)
    refuse_differing(found[False][1], found[True][1], 1e-3)


# --- a whole update


def collected(policy: CausalLMPolicy, prompts: Sequence[str] = TEXT_PROMPTS) -> TrainingRows:
    """Four prompts with six completions each, of several lengths."""
    names = [(prompt, [f"{prompt} {number}" for number in range(6)]) for prompt in prompts]
    requests = [GroupRequest(prompt, tuple(each), tuple(range(6)), (0,) * 6) for prompt, each in names]
    groups = list(collect_rollouts(policy, requests, prompts_per_batch=4))
    return join_groups(groups, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))


def updated(policy: CausalLMPolicy, rows: TrainingRows, **settings: Any) -> UpdateResult:
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(1e-3))
    return update_policy(policy, optimizer, rows, UpdateSettings(**settings), seed=3)


ONE_PASS: dict[str, Any] = {"micro_batch_size": 24}
IN_PARTS: dict[str, Any] = {"micro_batch_size": 4, "minibatch_size": 12, "kl_coef": 0.1}


@pytest.mark.parametrize("settings", [ONE_PASS, IN_PARTS], ids=["one pass", "groups in parts"])
def test_an_update_changes_the_weights_as_with_whole_rows(settings: dict[str, Any]) -> None:
    found, positions = {}, {}
    for shares in (False, True):
        policy = build_text_policy(choice=TrainingChoice(LoraSettings(rank=4, alpha=8.0)), disturbed=0.05)
        policy._model.double()
        rows = collected(policy)
        policy.trained.shares_prompts = shares
        computed: list[int] = []

        def count(module: Any, inputs: Any, given: dict[str, Any], computed: list[int] = computed) -> None:
            computed.append(given["input_ids"].numel())

        policy._model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        result = updated(policy, rows, old_logprobs="recompute", **settings)
        found[shares] = result.metrics(), values_of(policy.trainable_parameters())
        positions[shares] = sum(computed)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=0, atol=1e-5)
    for name, each in found[False][0].items():
        assert found[True][0][name] == pytest.approx(each, rel=1e-3, abs=1e-5), name
    assert positions[True] < 0.8 * positions[False]


def test_the_gate_sees_a_fault_that_sampling_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored log-probs are those of the fault, so the rows that are computed whole alone show it."""
    policy = build_text_policy(disturbed=0.05)
    rows = collected(policy)
    policy.trained.shares_prompts = True
    read = kv_cache._of_rows
    monkeypatch.setattr(kv_cache, "_of_rows", lambda values, rows: read(values.flip(2), rows))
    with torch.no_grad():
        stored = policy.logprobs(rows.actions).logprobs
    before = values_of(policy.trainable_parameters())
    with pytest.raises(ParityError, match=r"shared prompt - whole row.*micro_batch_size 1"):
        updated(policy, replace(rows, rollout_logprobs=stored), micro_batch_size=24)
    torch.testing.assert_close(values_of(policy.trainable_parameters()), before, rtol=0, atol=0)


# --- its memory


def kept_for_backward(policy: CausalLMPolicy, rows: TrainingRows) -> int:
    """Bytes that autograd keeps for a pass, parameters left out."""
    parameters = {each.untyped_storage().data_ptr() for each in policy.trained.model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = policy.logprobs(rows.actions, entropy="none")
    del scored
    return sum(each.untyped_storage().nbytes() for each in kept.values())


def test_the_estimate_of_shared_prompts_is_about_what_autograd_keeps() -> None:
    settings = CausalLMSettings(max_completion_length=8)
    policy = build_text_policy(settings)
    rows = collected(policy, [f"sort the letters of {'banana ' * 9}{number}" for number in range(4)])
    assert rows.prompt_lengths is not None
    longest, choices = int(rows.prompt_lengths.max()), {"tokens": TrainingChoice(TEXT_LORA)}
    kept, estimated = {}, {}
    for shares in (False, True):
        policy.trained.shares_prompts = shares
        kept[shares] = kept_for_backward(policy, rows)
        workload = Workload("float32", 6, 4, len(rows), eight_bit_optimizer=False, prompts=4 * shares)
        found = estimate_resources(
            "causal_lm", str(TEXT_MODEL), settings, choices, {"tokens": workload}, longest=longest
        )
        estimated[shares] = next(part.bytes for part in found.memory.parts if part.name == "tokens activations")
    assert 0.7 < estimated[True] / kept[True] < 2.5
    assert estimated[True] / estimated[False] == pytest.approx(kept[True] / kept[False], abs=0.15)
