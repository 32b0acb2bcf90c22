"""Rewards called with loose outputs, as in a script: the same scores as in a run, and what is missing is named."""

from collections.abc import Callable

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise

SSIM, ANSWER = build_reward("ssim"), build_reward("answer")
IMAGE, OTHER = noise(0, 32, 32), flat(0, 32, 32)


def test_outputs_score_as_in_a_run() -> None:
    scores = SSIM([IMAGE, OTHER, IMAGE], targets=[IMAGE, IMAGE, None])
    assert scores == list(SSIM.score(make_batch([IMAGE, OTHER, IMAGE], targets=[IMAGE, IMAGE, None])))
    assert scores[0].value == pytest.approx(1.0)
    assert [score.value for score in ANSWER(["4", "5"], answer=["4", "4"])] == [1.0, 0.0]


def test_siblings_are_all_outputs_unless_groups_are_given() -> None:
    diversity = build_reward("diversity")
    together, apart = diversity([IMAGE, OTHER]), diversity([IMAGE, OTHER], group_ids=["a", "b"])
    assert [score.value for score in together] != [score.value for score in apart]


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: SSIM([IMAGE]), "rewards.ssim, targets"),
        (lambda: SSIM([IMAGE], targets=[IMAGE, IMAGE]), "rewards.ssim, targets"),
        (lambda: SSIM(IMAGE, targets=[IMAGE]), "rewards.ssim"),
        (lambda: SSIM(["text"], targets=[IMAGE]), "rewards.ssim"),
        (lambda: SSIM([IMAGE, "text"], targets=[IMAGE, IMAGE]), "rewards.ssim"),
        (lambda: ANSWER(["4"]), "rewards.answer, answer"),
    ],
)
def test_what_a_call_lacks_is_named(call: Callable[[], list[Score]], place: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.place == place
