"""Completions end where they should, and are rendered as people read them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.ends import StopTexts, end_tokens
from grpo_core.policies.causal_lm.family import FAMILY
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.prompts import prompt_ids
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.records import SampledTokens
from tests.grpo_core.policies.causal_lm.model_types import make_model, make_tokenizer
from tests.tiny_policies import TEXT_MODEL, TEXT_PROMPTS, build_text_policy

TOKENIZER = make_tokenizer()
STOPS = StopTexts(TOKENIZER, ("ab", "\n\n", "é!", " of the", "<|user|>", "b<|assistant|>!"))
CRITERIA = StopStringCriteria(TOKENIZER, list(STOPS.texts))
FEW = TOKENIZER.convert_tokens_to_ids(["a", "b", "<|user|>", "<|assistant|>"])
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


@pytest.mark.parametrize("stop", ["<|user|>", "a<|user|>", "<|user|>b", "a", "ab"])
def test_generate_stops_at_the_same_tokens(stop: str) -> None:
    """A model that writes nothing but two letters and two special tokens."""
    model = make_model("llama")
    others = [token for token in range(model.config.vocab_size) if token not in FEW]
    settings = CausalLMSettings(max_completion_length=16, temperature=1e-5, stop=(stop,))
    policy = build_text_policy(settings, model=model, tokenizer=TOKENIZER)
    policy.forbidden = torch.tensor([token for token in others if token < policy.vocabulary])
    lengths = []
    for prompt in (*TEXT_PROMPTS, "a", "b", "ba", "of"):
        encoded = policy.encode([prompt])
        expected = model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            do_sample=False,
            max_new_tokens=16,
            pad_token_id=0,
            suppress_tokens=others,
            stop_strings=[stop],
            tokenizer=TOKENIZER,
        )[0, encoded.length :].tolist()
        sampled = policy.sample_tokens([prompt], group_size=1, seeds=[0]).actions
        found = sampled.token_ids[0, sampled.loss_mask[0]].tolist()
        assert found == expected
        lengths.append(len(found))
        assert "<|" not in policy.decode(sampled)[0]
    assert min(lengths) < max(lengths)


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


def test_an_end_token_of_the_generation_configuration_ends_a_row_too() -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    model.generation_config.eos_token_id = [END, *range(60, 80)]
    policy = build_text_policy(CausalLMSettings(max_completion_length=24), model=model, tokenizer=tokenizer)
    sampled = drawn(policy)
    last = [
        row[mask][-1].item() for row, mask in zip(sampled.actions.token_ids, sampled.actions.loss_mask, strict=True)
    ]
    assert any(60 <= token < 80 for token in last)
    assert all(done == (token == END or 60 <= token < 80) for done, token in zip(sampled.finished, last, strict=True))


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


# --- the kind of policy


def test_prompts_are_refused_by_the_tokenizer_alone() -> None:
    FAMILY.refuse_prompts(str(TEXT_MODEL), CausalLMSettings(max_completion_length=460), TEXT_PROMPTS)
    with pytest.raises(InputError) as refused:
        FAMILY.refuse_prompts(str(TEXT_MODEL), CausalLMSettings(max_completion_length=460), [*TEXT_PROMPTS, "b" * 80])
    assert (refused.value.place, refused.value.value) == (f"prompt {len(TEXT_PROMPTS) + 1}", "b" * 80)
