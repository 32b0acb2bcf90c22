"""Completions end where they should and are rendered as people read them; what follows the head of a model is found."""

import copy
import string
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.decode_steps import unread_padding
from grpo_core.policies.causal_lm.ends import StopTexts, end_tokens
from grpo_core.policies.causal_lm.family import FAMILY
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.prompts import prompt_ids
from grpo_core.policies.causal_lm.sampling_scoring import head_gives_logits, sample_completions
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.records import SampledTokens
from tests.grpo_core.policies.causal_lm.model_types import (
    AFTER_HEAD,
    CONFIGS,
    change_inputs,
    make_model,
    make_tokenizer,
)
from tests.grpo_core.policies.samplers import make_text_policy
from tests.tiny_policies import TEXT_LORA, TEXT_MODEL, TEXT_PROMPTS, build_text_policy

TOKENIZER = make_tokenizer()
STOPS = StopTexts(TOKENIZER, ("ab", "\n\n", "é!", " of the", "<|user|>", "b<|assistant|>!"))
CRITERIA = StopStringCriteria(TOKENIZER, list(STOPS.texts))
SPECIAL = [TOKENIZER.convert_tokens_to_ids(mark) for mark in ("<|user|>", "<|assistant|>")]


@example(" of the", {})
@example("a of the", {2: SPECIAL[0]})
@given(st.text(alphabet="ab\né! ofthe", max_size=24), st.dictionaries(st.integers(0, 30), st.sampled_from(SPECIAL)))
def test_a_row_stops_where_generate_stops_it(text: str, marks: dict[int, int]) -> None:
    ids = TOKENIZER(text)["input_ids"]
    for place in sorted(marks):
        ids.insert(min(place, len(ids)), marks[place])
    read = [torch.tensor([ids[: end + 1]]) for end in range(len(ids))]
    ends = [bool(CRITERIA(each, torch.empty(0))) for each in read]
    first = ends.index(True) if True in ends else len(ids)
    assert [STOPS.completed(ids[: end + 1]) for end in range(first + 1) if end < len(ids)] == ends[: first + 1]


def test_a_long_stop_beside_a_short_one_is_found() -> None:
    stops = StopTexts(TOKENIZER, ("x", "twelve words"))
    ids = TOKENIZER("these twelve words")["input_ids"]
    assert [end for end in range(1, len(ids) + 1) if stops.completed(ids[:end])] == [len(ids)]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("xaby", "x"),
        ("x\n\nab", "x"),
        ("abab", ""),
        ("aé b", "aé b"),
        ("sort of the ab", "sort"),
        ("x<|user|>", "x"),
        ("<|user|>x", ""),
        ("a<|assistant|>b", "ab"),
        ("x<|assistant|>yb<|assistant|>!", "xy"),
    ],
)
def test_a_text_is_cut_before_its_first_stop(text: str, kept: str) -> None:
    assert STOPS.visible(TOKENIZER(text)["input_ids"]) == kept


def test_a_stop_text_that_begins_inside_a_token_leaves_its_beginning() -> None:
    """Byte-level pairs: one token for "one" and one for two letters of three bytes and a part of a third."""
    tokens = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab={**tokens, "on": 256, "one": 257}, merges=[("o", "n"), ("on", "e")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    ids = tokenizer("猫one猫")["input_ids"]
    assert ids.count(257) == 1
    assert StopTexts(tokenizer, ("ne猫",)).visible(ids) == "猫o"
    assert StopTexts(tokenizer, ("ne",)).visible([*ids[:2], tokenizer.eos_token_id, *ids[2:]]).endswith("o")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 3], 3, (3, 7, 268)), (None, 5, (5, 268)), (9, None, (9, 268)), (None, None, (268,)), ("no", "no", (268,))],
)
def test_every_end_token_counts(generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    """A model may have no generation configuration, and its own no such field ("no")."""
    model = SimpleNamespace(config=SimpleNamespace(**({} if config == "no" else {"eos_token_id": config})))
    if generation != "no":
        model.generation_config = SimpleNamespace(eos_token_id=generation)
    assert end_tokens(model, TOKENIZER) == expected


END = 268


def drawn(policy: CausalLMPolicy, group_size: int = 8) -> SampledTokens:
    return policy.sample_tokens(TEXT_PROMPTS, group_size=group_size, seeds=range(len(TEXT_PROMPTS) * group_size))


def test_a_row_ends_with_its_end_token_or_is_cut() -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=6))
    sampled = drawn(policy)
    tokens = sampled.actions
    lengths = tokens.loss_mask.sum(-1).tolist()
    assert min(lengths) < max(lengths)
    read = [len(prompt_ids(policy.tokenizer, policy.settings, prompt)) for prompt in tokens.prompts]
    assert sampled.prompt_lengths.tolist() == read
    assert {True, False} == set(sampled.finished.tolist())
    for row, length in enumerate(lengths):
        ids = tokens.token_ids[row].tolist()
        assert tokens.loss_mask[row].tolist() == [True] * length + [False] * (len(ids) - length)
        assert END not in ids[: length - 1]
        assert bool(sampled.finished[row]) == (ids[length - 1] == END)
        assert length == 6 or sampled.finished[row]
        assert not any(ids[length:])
        assert not sampled.rollout_logprobs[row, length:].any()


def test_the_loop_ends_when_every_row_has() -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=200))
    tokens = policy.sample_tokens(TEXT_PROMPTS[:1], group_size=4, seeds=range(4)).actions
    assert tokens.token_ids.shape[1] == int(tokens.loss_mask.sum(-1).max()) < 30


def test_a_stop_text_ends_a_row_and_is_not_rendered() -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=12, stop=("n", "t")))
    free = build_text_policy(CausalLMSettings(max_completion_length=12))
    stopped, whole = drawn(policy), drawn(free)
    texts = free.decode(whole.actions)
    assert policy.decode(stopped.actions) == [
        text[: min((text + "nt").index("n"), (text + "nt").index("t"))] for text in texts
    ]
    for row, text in enumerate(texts):
        if "n" in text or "t" in text:
            ids = stopped.actions.token_ids[row, stopped.actions.loss_mask[row]]
            assert policy.tokenizer.decode(ids)[-1] in "nt"
            assert stopped.finished[row]
    assert any("n" in text or "t" in text for text in texts)


def test_rendered_text_has_no_special_tokens_and_keeps_all_else() -> None:
    policy = build_text_policy()
    tokenizer = policy.tokenizer
    ids = tokenizer(" a  b<|user|>é .")["input_ids"] + [END]
    sampled = drawn(policy, group_size=1).actions.select([0])
    row = replace(sampled, token_ids=torch.tensor([ids]), loss_mask=torch.ones(1, len(ids), dtype=torch.bool))
    assert policy.decode(row) == [" a  bé ."]


def test_16_bit_arithmetic_over_32_bit_weights_changes_little_and_is_the_same_on_both_sides() -> None:
    exact, rounded = build_text_policy(), build_text_policy(autocast=torch.bfloat16)
    sampled = drawn(rounded)
    with torch.no_grad():
        again, reference = rounded.logprobs(sampled.actions).logprobs, exact.logprobs(sampled.actions).logprobs
    off = float((reference - sampled.rollout_logprobs).abs().max())
    assert 1e-4 < off < 0.5
    assert float((again - sampled.rollout_logprobs).abs().mean()) < 0.02


@pytest.mark.parametrize("stop", [(), ("n", "t")])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_what_is_sampled_does_not_depend_on_how_often_the_host_looks(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], top_p: float
) -> None:
    """Rows that ended since are sampled on, and what they have after their end is dropped."""
    policy = build_text_policy(CausalLMSettings(max_completion_length=20, stop=stop, top_p=top_p))
    found = []
    for every in (1, 3, 64):
        looking = partial(sample_completions, tokens_per_look=every)
        monkeypatch.setattr("grpo_core.policies.causal_lm.policy.sample_completions", looking)
        found.append(drawn(policy))
    first = found[0]
    assert 1 < first.actions.token_ids.shape[1] < 20 or not stop
    for other in found[1:]:
        for name in ("token_ids", "loss_mask"):
            assert torch.equal(getattr(first.actions, name), getattr(other.actions, name))
        assert torch.equal(first.finished, other.finished)
        # Where rows leave at other times, products are of other sizes.
        torch.testing.assert_close(first.rollout_logprobs, other.rollout_logprobs, rtol=0, atol=1e-5)
        for one, two in zip(_support(first), _support(other), strict=True):
            assert torch.equal(one, two)


def _support(sampled: SampledTokens) -> tuple[Tensor, ...]:
    support = sampled.actions.support
    return () if support is None else (support.ids, support.counts)


class _Reads(TorchDispatchMode):
    """How many values the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "padded"), [("llama", True), ("qwen2", True), ("cohere", True), ("cohere", False)])
def test_a_mask_is_made_without_a_look_at_the_padding(kind: str, padded: bool) -> None:
    model, ids = make_model(kind), torch.arange(12).view(2, 6) + 3
    attention = torch.ones_like(ids)
    if padded:
        attention[0, :2] = 0
    with torch.no_grad():
        cache = model(ids[:, :5], attention_mask=attention[:, :5], use_cache=True).past_key_values
        given = {"input_ids": ids[:, 5:], "attention_mask": attention, "position_ids": torch.full((2, 1), 5)}
        expected = model(**given, past_key_values=copy.deepcopy(cache)).logits
        with _Reads() as looked:
            model(**given, past_key_values=copy.deepcopy(cache))
        with unread_padding(torch.device("cuda"), padded=padded), _Reads() as unread:
            found = model(**given, past_key_values=cache).logits
    assert torch.equal(found, expected)
    assert (looked.count, unread.count) == (1, 0)


# --- the kind of policy


def test_prompts_are_refused_by_the_tokenizer_alone() -> None:
    FAMILY.refuse_prompts(str(TEXT_MODEL), CausalLMSettings(max_completion_length=460), TEXT_PROMPTS)
    with pytest.raises(InputError) as refused:
        FAMILY.refuse_prompts(str(TEXT_MODEL), CausalLMSettings(max_completion_length=460), [*TEXT_PROMPTS, "b" * 80])
    assert (refused.value.place, refused.value.value) == (f"prompt {len(TEXT_PROMPTS) + 1}", "b" * 80)


def test_rows_that_have_ended_leave_the_batch() -> None:
    """And the rows that stay, some of them more than once moved, are sampled as alone."""
    policy = make_text_policy("llama", CausalLMSettings(max_completion_length=24, stop=tuple(string.ascii_lowercase)))
    fed: list[int] = []
    change_inputs(policy._model, lambda given: fed.append(len(given["input_ids"])))
    tokens = drawn(policy, group_size=3).actions
    assert fed[0] == len(TEXT_PROMPTS)
    assert fed[1:] == sorted(fed[1:], reverse=True)
    assert len(set(fed[1:])) > 2
    for row in range(len(tokens)):
        alone = policy.sample_tokens([tokens.prompts[row]], group_size=1, seeds=[row]).actions
        assert alone.token_ids[0, alone.loss_mask[0]].tolist() == tokens.token_ids[row, tokens.loss_mask[row]].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_follows_the_head_is_found(kind: str) -> None:
    assert head_gives_logits(make_model(kind)) == (kind not in AFTER_HEAD)


def test_a_cap_on_tiny_logits_is_found() -> None:
    model = make_model("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    assert not head_gives_logits(model)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_head_and_whole_logits_give_the_same_gradients(kind: str) -> None:
    gradients = []
    for whole in (False, True):
        policy = make_text_policy(kind, CausalLMSettings(max_completion_length=10, top_k=5), TrainingChoice(lora=None))
        tokens = drawn(policy, group_size=3).actions
        policy.whole_logits = whole
        scored = policy.logprobs(tokens, entropy="differentiable")
        (scored.logprobs.sum() + 0.1 * scored.entropy.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in policy.trainable_parameters().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_adapters_go_into_every_linear_layer_but_the_head(kind: str) -> None:
    policy = make_text_policy(kind, CausalLMSettings(), TrainingChoice(lora=TEXT_LORA))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable_parameters()}
    assert adapted == {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    }.get(kind, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


def test_float16_is_refused_before_a_model_is_read() -> None:
    with pytest.raises(InputError) as refused:
        CausalLMPolicy.load("nowhere", CausalLMSettings(), {"tokens": TrainingChoice(None)}, dtype=torch.float16)
    assert (refused.value.place, refused.value.value) == ("policy.dtype", "float16")
