import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers import LlamaForSequenceClassification as Classifier
from trl.data_utils import apply_chat_template

from grpo_core.errors import InputError
from grpo_core.rewards.judges.reward_model import RewardModelReward, _sigmoid, load_scorer
from grpo_core.rewards.model_reward import Placed
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rewards.weights import Published, Weights
from grpo_core.rollouts.messages import write_messages
from tests.grpo_core.rewards.conftest import make_texts, refusal

TINY = Path(__file__).parents[3] / "data" / "models" / "tiny-text"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
PAIRS = [("cab", "abc"), ("cab", "bca"), ("zebra", "aberz"), ("q", ""), ("hello", "ehllo")]


def save(folder: Path, template: str | None = None, pad: bool = True, **more: Any) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    if not pad:
        tokenizer.pad_token = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = Classifier(LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **sizes, **more))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def batch(pairs: list[tuple[str, str]]) -> ScoringBatch:
    return make_texts(*(c for _, c in pairs), prompts=[p for p, _ in pairs])


def as_trl_scores(folder: Path, conversational: bool) -> list[float]:
    """What GRPOTrainer does with a reward model: one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Classifier.from_pretrained(folder, num_labels=1)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    texts = [prompt + completion for prompt, completion in PAIRS]
    if conversational:
        roles = ("user", "assistant")
        talks = [[{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)] for pair in PAIRS]
        texts = [apply_chat_template({"messages": talk}, tokenizer)["text"] for talk in talks]
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        logits: list[float] = model(**inputs).logits[:, 0].tolist()
    return logits


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_agrees_with_what_trl_computes(tmp_path: Path, template: str | None, pad: bool) -> None:
    folder = save(tmp_path / "model", template, pad)
    scores = RewardModelReward(model=str(folder)).score(batch(PAIRS))
    expected = as_trl_scores(folder, conversational=template is not None)
    assert max(expected) - min(expected) > 0.01
    assert [score.raw for score in scores] == pytest.approx(expected, abs=1e-6)
    assert [score.value for score in scores] == [score.raw for score in scores]


TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "cab", "name": None}],
    [{"role": "system", "content": "sort"}, {"role": "user", "content": " zebra\n"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Q"}],
]


def test_a_conversation_is_scored_as_trl_prints_it(tmp_path: Path) -> None:
    scorer = load_scorer(Weights("", str(save(tmp_path / "model", TEMPLATE)), None, Published("")), Placed())
    for talk in TALKS:
        printed = apply_chat_template({"messages": [*talk, {"role": "assistant", "content": "a"}]}, scorer.tokenizer)
        ids = scorer.tokenizer(printed["text"], add_special_tokens=False)["input_ids"]
        assert scorer.token_ids(write_messages(talk), "a") == ids


def test_a_conversation_needs_a_template(folder: Path) -> None:
    batch = make_texts("abc", prompts=[write_messages(TALKS[0])])
    reward = RewardModelReward(model=str(folder))
    assert refusal(reward.score, batch)[0] == "rewards.reward_model.model"
    reward.check_prompt({}, (), "cab")
    # Before anything is sampled.
    assert refusal(reward.check_prompt, {}, (), batch.prompts[0])[0] == "prompt"


def test_a_score_does_not_depend_on_the_batch_and_nothing_at_all_has_one(folder: Path) -> None:
    reward, pairs = RewardModelReward(model=str(folder)), [*PAIRS, ("", "")]
    together = reward.score(batch(pairs))
    assert all(math.isfinite(score.raw or 0.0) and score.raw is not None for score in together)
    assert [reward.score(batch([pair]))[0] for pair in pairs] == together
    assert reward.score(batch(pairs[::-1])) == together[::-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reward.score(batch(pairs)) == together


KINDS = {
    "llama": lambda **sizes: Classifier(LlamaConfig(**sizes)),
    "qwen3": lambda **sizes: Qwen3ForSequenceClassification(Qwen3Config(head_dim=8, num_key_value_heads=1, **sizes)),
    "bert": lambda **sizes: BertForSequenceClassification(BertConfig(**sizes)),
    "roberta": lambda **sizes: RobertaForSequenceClassification(RobertaConfig(**sizes)),
    "deberta": lambda **sizes: DebertaV2ForSequenceClassification(DebertaV2Config(**sizes)),
}


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_unlike_lengths_score_in_batches_as_alone(tmp_path: Path, kind: str, dtype: str, apart: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pad = tokenizer.pad_token_id
        KINDS[kind](vocab_size=len(tokenizer), num_labels=1, pad_token_id=pad, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    alone, together = (RewardModelReward(model=str(tmp_path), **own) for own in ({}, {"batch_size": 3, "dtype": dtype}))
    pairs = [*PAIRS, ("", ""), ("a long one", "of many letters")]
    expected = [score.raw for score in alone.score(batch(pairs))]
    assert [score.raw for score in together.score(batch(pairs))] == pytest.approx(expected, abs=apart)
    network = load_scorer(together.weight_sources()["model"], together.runs_on).network
    lengths: list[Any] = []
    with network.register_forward_hook(lambda _, args, given, __: lengths.append(given), with_kwargs=True):
        together.score(batch(pairs))
    # Of one length as far as possible: 7 texts in three passes.
    assert [len(given["input_ids"]) for given in lengths] == [3, 3, 1]
    read = [length for given in lengths for length in given["attention_mask"].sum(1).tolist()]
    assert read == sorted(read)


def test_a_model_that_reads_its_padding_is_refused_in_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = RewardModelReward(model=str(folder), batch_size=2)
    network = load_scorer(reward.weight_sources()["model"], reward.runs_on).network
    # It answers at the last token, whatever it is.
    monkeypatch.setattr(network.config, "pad_token_id", -1)
    assert refusal(reward.score, batch(PAIRS)) == ("rewards.reward_model.batch_size", 2)
    RewardModelReward(model=str(folder)).score(batch(PAIRS))


def test_sigmoid_of_large_and_small_logits(folder: Path) -> None:
    reward = RewardModelReward(model=str(folder), scale="sigmoid")
    for logit, value in ((0.0, 0.5), (math.log(3), 0.75), (-math.log(3), 0.25), (-2000.0, 0.0), (2000.0, 1.0)):
        assert _sigmoid(logit) == pytest.approx(value)
    (score,) = reward.score(batch(PAIRS[:1]))
    assert score.raw is not None
    assert score.value == pytest.approx(1 / (1 + math.exp(-score.raw)))


@pytest.mark.parametrize("bounded_by", ["setting", "positions"])
def test_of_a_long_text_the_end_is_judged(tmp_path: Path, bounded_by: str) -> None:
    folder = save(tmp_path / "model", max_position_embeddings=6 if bounded_by == "positions" else 64)
    reward = RewardModelReward(model=str(folder), max_length=6 if bounded_by == "setting" else None)
    long, end, other_end = reward.score(batch([("abcdefgh", "ijkl"), ("gh", "ijkl"), ("gh", "ijk")]))
    assert long == end
    assert long != other_end


def test_a_model_without_a_bound_of_positions_judges_the_whole_text(folder: Path) -> None:
    scorer = load_scorer(Weights("model", str(folder), None, Published("its makers")), Placed())
    assert replace(scorer, positions=None).logits(["cab"], ["abc"]) == scorer.logits(["cab"], ["abc"])


def test_loads_once_and_again_when_the_files_change(tmp_path: Path) -> None:
    folder = str(save(tmp_path / "model"))
    weights = Weights("model", folder, None, Published("its makers"))
    first = load_scorer(weights, Placed())
    assert load_scorer(weights, Placed()) is first
    before = RewardModelReward(model=folder).score(batch(PAIRS))
    model = Classifier.from_pretrained(folder)
    model.score.weight.data.mul_(2.0)
    model.save_pretrained(folder)
    after = RewardModelReward(model=folder).score(batch(PAIRS))
    assert [score.raw for score in after] == pytest.approx([2 * (score.raw or 0.0) for score in before], abs=1e-6)


def test_a_model_without_a_head_or_with_two_labels_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    headless, two = tmp_path / "headless", tmp_path / "two"
    LlamaForCausalLM.from_pretrained(TINY).save_pretrained(headless)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes)
    BertForSequenceClassification(config).save_pretrained(two)
    for folder in (headless, two):
        tokenizer.save_pretrained(folder)
        refused = refusal(RewardModelReward(model=str(folder)).score, batch(PAIRS))
        assert refused == ("rewards.reward_model.model", str(folder))


def test_a_template_that_refuses(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "{{ raise_exception('a system message is due') }}")
    with pytest.raises(InputError, match="a system message is due"):
        RewardModelReward(model=str(folder)).score(batch(PAIRS))
