"""What a user's function is called with, and what it may answer."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from grpo_core.rewards.functions.reward import FunctionReward
from grpo_core.rewards.reward import score_samples
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score
from grpo_core.rollouts.messages import write_messages
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refusal
from tests.grpo_core.rewards.functions.conftest import SPY, TEXTS, TOKENS, spied, texts


def test_keywords_of_a_call_on_texts(write: Callable[[str], str]) -> None:
    path = write(SPY)
    batch = texts(2, columns={"answer": ["a", None], "prompt": ["x", "y"], "completion_ids": [1, 2]})
    scores = FunctionReward(function=f"{path}:score").score(batch)
    assert scores == [Score(float(len(t)), float(len(t))) for t in TEXTS[:2]]
    ((prompts, completions, ids, more),) = spied(path)
    assert (prompts, completions, ids) == (["prompt 0", "prompt 1"], TEXTS[:2], TOKENS[:2])
    assert set(more) == {"answer", "trainer_state", "log_extra", "log_metric"}
    assert more["answer"] == ["a", None]
    assert more["trainer_state"] is None


ASKED = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1?", "name": None}]


@pytest.mark.parametrize("annotation", ["", ": list[list[dict[str, str]]]"])
@pytest.mark.parametrize(
    ("prompt", "setting", "given"),
    [
        ("1+1?", None, "1+1?"),
        ("1+1?", False, "1+1?"),
        ("1+1?", True, [{"role": "user", "content": "1+1?"}]),
        (write_messages(ASKED), None, ASKED),
        (write_messages(ASKED), True, ASKED),
        (write_messages(ASKED), False, "1+1?"),
    ],
)
def test_samples_are_messages_where_their_prompts_are(
    write: Callable[..., str], prompt: str, setting: bool | None, given: object, annotation: str
) -> None:
    path = write(SPY.replace("completions,", f"completions{annotation},", 1))
    FunctionReward(function=f"{path}:score", conversational=setting).score(replace(texts(1), prompts=[prompt]))
    ((prompts, completions, _, _),) = spied(path)
    assert prompts == [given]
    assert completions == ([TEXTS[0]] if isinstance(given, str) else [[{"role": "assistant", "content": TEXTS[0]}]])


@pytest.mark.parametrize("name", ["images", "targets", "source_images", "completions", "trainer_state"])
def test_a_function_of_what_calls_pass_is_no_factory(write: Callable[..., str], name: str) -> None:
    path = write(f"def score({name}): raise AssertionError('called')\n")
    refused_by_python = refusal(FunctionReward(function=f"{path}:score").score, texts(1))[1]
    assert str(refused_by_python).startswith("TypeError: score() got an unexpected keyword argument")
    made = write(f"def make({name}): return lambda **kwargs: [1.0]\n", "factory.py")
    reward = FunctionReward(function=f"{made}:make", factory=True, arguments={name: 1})
    assert reward.score(texts(1)) == [Score(1.0, 1.0)]


def test_images_come_as_rgb_copies_under_both_names(write: Callable[..., str]) -> None:
    path = write(
        "def score(completions, images, **kwargs):\n"
        "    assert completions == images and kwargs['completion_ids'] is None\n"
        "    values = [image.getpixel((0, 0))[0] / 255 for image in images]\n"
        "    for image in images: image.paste((9, 9, 9), (0, 0, 4, 4))\n"
        "    return values\n"
    )
    reward = FunctionReward(function=f"{path}:score")
    images = [flat(51), Image.new("L", (8, 8), 255), noise(0, 8, 8)]
    first = reward.score(make_batch(images))
    assert [score.value for score in first[:2]] == [0.2, 1.0]
    assert reward.score(make_batch(images)) == first
    path = write(SPY.replace("completion_ids,", "completion_ids=None,", 1), "spy.py")
    # Only its length is asked of a list of messages.
    assert FunctionReward(function=f"{path}:score", conversational=True).score(make_batch([flat(51)])) == [Score(1, 1)]
    ((_, completions, _, _),) = spied(path)
    (part,) = completions[0][0]["content"]
    assert part["type"] == "image"
    assert part["image"].getpixel((0, 0)) == (51, 51, 51)


def test_targets_come_where_they_are_asked_for(write: Callable[[str], str]) -> None:
    path = write(
        "def score(images, targets=None, **kwargs):\n"
        "    if targets is None: return [0] * len(images)\n"
        "    return [2 + (0 if target is None else target.getpixel((0, 0))[2]) for target in targets]\n"
    )
    reward = FunctionReward(function=f"{path}:score", with_targets=True)
    assert reward.needs.target
    batch = make_batch([flat(1), flat(2)], [Image.new("RGBA", (4, 4), (0, 0, 51, 255)), None])
    assert [score.value for score in reward.score(batch)] == [53.0, 2.0]
    assert not FunctionReward(function=f"{path}:score").needs.target
    assert FunctionReward(function=f"{path}:score").score(batch.select([0])) == [Score(0.0, 0.0)]


ASYNC = """
import asyncio
import functools

LOOPS = []

async def score(completions, **kwargs):
    LOOPS.append(asyncio.get_running_loop())
    async def one(text):
        await asyncio.sleep(0.001 * (10 - len(text) % 10))
        return float(len(text))
    return await asyncio.gather(*[one(text) for text in completions])

class Judge:
    def __init__(self, scale=1.0):
        self.scale = scale
    async def __call__(self, completions, **kwargs):
        return [self.scale * value for value in await score(completions)]

async def scaled(completions, scale, **kwargs):
    return [scale * value for value in await score(completions)]
halved = functools.partial(scaled, scale=0.5)
"""


@pytest.mark.parametrize(
    ("name", "arguments", "scale"),
    [("score", None, 1), ("Judge", {"scale": 3.0}, 3), ("scaled", {"scale": 2}, 2), ("halved", None, 0.5)],
)
def test_coroutines_with_and_without_a_running_loop(
    write: Callable[[str], str], name: str, arguments: dict[str, Any] | None, scale: float
) -> None:
    reward = FunctionReward(function=f"{write(ASYNC)}:{name}", arguments=arguments)
    expected = [scale * len(text) for text in TEXTS]

    async def inside() -> list[float | None]:
        return [score.value for score in reward.score(texts())]

    assert [score.value for score in reward.score(texts())] == expected
    assert asyncio.run(inside()) == expected


def test_a_coroutine_that_waits_for_another_reward_is_refused_instead_of_waiting_for_itself(
    write: Callable[..., str],
) -> None:
    inner = FunctionReward(function=f"{write(ASYNC)}:score")
    outer = write("async def score(completions, reward, **kwargs):\n    return reward[0](completions)\n", "outer.py")
    batch = texts(1, columns={"reward": [inner]})
    # Where temporary folders have long names, the cause stands behind what is shown.
    assert str(refusal(FunctionReward(function=f"{outer}:score").score, batch)[1]).startswith("InputError: the reward")


def test_one_loop_serves_all_calls(write: Callable[[str], str]) -> None:
    path = write(ASYNC)
    reward = FunctionReward(function=f"{path}:score")
    threads = [threading.Thread(target=reward.score, args=(texts(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (module,) = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path]
    assert len(module.LOOPS) == 4
    assert len(set(module.LOOPS)) == 1


def test_by_group_gives_one_whole_group_a_call(write: Callable[[str], str]) -> None:
    path = write(SPY.replace("[float(len(c)) for c in completions]", "[len(set(completions))] * len(completions)"))
    reward = FunctionReward(function=f"{path}:score", by_group=True)
    assert reward.needs.group
    scores = reward.score(texts(group_ids=["a", "a", "a", "b"]))
    assert [score.value for score in scores] == [3, 3, 3, 1]
    assert [len(call[1]) for call in spied(path)] == [3, 1]
    assert refusal(reward.score, texts()) == ("rewards.function.by_group", True)


def test_what_a_call_does_to_its_arguments_ends_with_it(write: Callable[[str], str]) -> None:
    path = write(
        "def score(completions, seen, **kwargs):\n"
        "    seen['all'] += completions\n"
        "    return [float(len(seen['all']))] * len(completions)\n"
    )
    reward = FunctionReward(function=f"{path}:score", arguments={"seen": {"all": []}})
    assert [reward.score(texts(2))[0].value for _ in range(3)] == [2.0, 2.0, 2.0]


def test_a_column_with_the_name_of_an_argument(write: Callable[[str], str]) -> None:
    reward = FunctionReward(function="trl.rewards:think_format_reward")
    place, value = refusal(reward.score, texts(1, columns={"completions": ["x"]}))
    assert "completions" in f"{place} {value}"


@pytest.mark.parametrize(
    ("body", "sample", "value"),
    [
        ("[1.0, 2.0]", "", "2 rewards"),
        ("[]", "", "0 rewards"),
        ("0.5", "", "float 0.5"),
        ("None", "", "NoneType None"),
        ("'good'", "", "str 'good'"),
        ("{'a': 1, 'b': 2, 'c': 3, 'd': 4}", "", "dict {'a': 1, 'b': 2, 'c': 3, 'd': 4}"),
        ("[1, 'good', 2, 3]", ", sample s1", "good"),
        ("[1, 2, 3, [4]]", ", sample s3", [4]),
        ("[1, 2, 3, 1j]", ", sample s3", 1j),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", None])
def test_wrong_answers_are_named_with_file_and_line(
    write: Callable[[str], str], body: str, sample: str, value: object, on_error: str | None
) -> None:
    path = write(f"\ndef score(completions, **kwargs):\n    return {body}\n")
    place, found = refusal(FunctionReward(function=f"{path}:score", on_error=on_error).score, texts())
    assert place.endswith(f"mine.py:2{sample}")
    assert found == value


def test_not_finite_is_a_failure_and_none_is_not_applicable(write: Callable[[str], str]) -> None:
    path = write("def score(completions, **kwargs):\n    return [float('nan'), None, -(10**400), True]\n")
    nan, none, infinite, yes = FunctionReward(function=f"{path}:score").score(texts())
    assert nan == Score.failed("the reward is nan, not a finite number (the function at mine.py:1)")
    assert none == NOT_APPLICABLE
    assert "-inf" in str(infinite.failure)
    assert yes == Score(1.0, 1.0)


@pytest.mark.parametrize(
    "body",
    ["np.arange(4) / 4", "torch.arange(4) / 4", "[np.float32(i / 4) for i in range(4)]", "(i / 4 for i in range(4))"],
)
def test_numbers_of_numpy_and_torch_and_iterators(write: Callable[[str], str], body: str) -> None:
    path = write(f"import numpy as np, torch\ndef score(completions, **kwargs):\n    return {body}\n")
    scores = FunctionReward(function=f"{path}:score").score(texts())
    assert scores == [Score(i / 4, i / 4) for i in range(4)]


RAISES = """
def score(completions, **kwargs):
    return [check(text) for text in completions]

def check(text):
    if not text:
        raise ZeroDivisionError("nothing in it")
    return float(len(text))
"""


def test_a_function_that_raises_is_an_error_with_its_line(write: Callable[[str], str]) -> None:
    path = write(RAISES)
    place, value = refusal(FunctionReward(function=f"{path}:score").score, texts())
    assert place.endswith("mine.py:7")
    assert value == "ZeroDivisionError: nothing in it"


def test_a_call_that_does_not_begin_has_the_place_of_the_function(write: Callable[[str], str]) -> None:
    header = "import functools\n\n"
    for source in (
        "def score(completions, targets, **kwargs):\n    return [0.0]\n",
        "def score(completions, images, **kwargs):\n    return [0.0]\n",
        "def score(prompts, /, **kwargs):\n    return [0.0]\n",
        "def inner(completions, targets, **kwargs):\n    return [0.0]\nscore = functools.partial(inner)\n",
    ):
        path = write(header + source)
        for on_error in ("raise", "null"):
            reward = FunctionReward(function=f"{path}:score", on_error=on_error, factory=False)
            if on_error == "raise":
                place, value = refusal(reward.score, texts())
                assert place.endswith("mine.py:3")
                assert str(value).startswith("TypeError: ")
            else:
                assert all("(mine.py:3)" in str(score.failure) for score in reward.score(texts()))
    # One that calls another in a wrong way has begun.
    place, _ = refusal(FunctionReward(function=f"{write(WRONG)}:score").score, texts())
    assert place.endswith("mine.py:2")


WRONG = "def score(completions, **kwargs):\n    return check()\n\ndef check(text):\n    return 0.0\n"


def test_the_message_of_an_error_is_left_out_where_there_is_none_and_cut_where_it_is_long(
    write: Callable[[str], str],
) -> None:
    for raised, shown in (
        ("SystemExit", "SystemExit"),
        ("MemoryError()", "MemoryError"),
        (f"ValueError({'x' * 200!r})", f"ValueError: {'x' * 200}"),
        (f"ValueError({'x' * 201!r})", f"ValueError: {'x' * 197}..."),
    ):
        path = write(f"def score(completions, **kwargs):\n    raise {raised}\n")
        assert refusal(FunctionReward(function=f"{path}:score").score, texts())[1] == shown
        (first, *_) = FunctionReward(function=f"{path}:score", on_error="null").score(texts())
        assert first == Score.failed(f"the function raised {shown} (mine.py:2)")


@pytest.mark.parametrize("on_error", [None, "null"])
def test_on_opt_in_only_the_guilty_sample_fails(write: Callable[[str], str], on_error: str | None) -> None:
    reward = FunctionReward(function=f"{write(RAISES)}:score", on_error=on_error)
    *well, guilty = reward.score(texts())
    assert [score.value for score in well] == [float(len(text)) for text in TEXTS[:3]]
    assert guilty == Score.failed("the function raised ZeroDivisionError: nothing in it (mine.py:7)")


def test_an_error_inside_a_coroutine_has_its_line(write: Callable[[str], str]) -> None:
    path = write(
        "import asyncio\nasync def score(completions, **kwargs):\n    await asyncio.sleep(0)\n    return 1 / 0\n"
    )
    place, value = refusal(FunctionReward(function=f"{path}:score").score, texts())
    assert place.endswith("mine.py:4")
    assert str(value).startswith("ZeroDivisionError")


def test_what_the_function_reports_comes_with_its_scores(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        "def score(completions, log_metric, log_extra, **kwargs):\n"
        "    log_metric('share', 0.25)\n    log_extra('why', completions)\n    return [float('nan')]\n"
    )
    with caplog.at_level(logging.DEBUG):
        (score,) = score_samples(FunctionReward(function=f"{path}:score"), texts(1))
    assert score.logged == {"share": 0.25}
    assert score.extra == {"why": texts(1).completions[0]}
    assert "sample s0" in caplog.text
    assert "mine.py:1" in caplog.text


def test_images_in_prompts_come_as_copies_to_who_names_them(write: Callable[..., str]) -> None:
    path = write(
        "def score(completions, source_images, images=None, **kwargs):\n"
        "    values = [sum(image.getpixel((0, 0))[0] for image in each) for each in source_images]\n"
        "    for each in source_images:\n"
        "        for image in each: image.paste((9, 9, 9), (0, 0, 4, 4))\n"
        "    assert images is None or len(images) == len(completions)\n"
        "    return values\n"
    )
    reward = FunctionReward(function=f"{path}:score")
    assert (reward.load_needs().sources, reward.load_needs().column) == ("required", None)
    shared = flat(51)
    batch = make_batch([flat(1), flat(2), flat(3)], source_images=[[shared], [], [shared, flat(2)]])
    expected = [Score(51.0, 51.0), Score(0.0, 0.0), Score(53.0, 53.0)]
    assert reward.score(batch) == reward.score(batch) == expected
    assert reward.score(make_batch([flat(1)])) == [Score(0.0, 0.0)]
    assert reward([flat(1)], source_images=[[shared]]) == expected[:1]
    assert refusal(reward, [flat(1)])[0] == "rewards.function, source_images"


def test_on_texts_they_are_called_as_trl_calls_them(write: Callable[..., str]) -> None:
    path = write(
        "def score(completions, image, **kwargs):\n"
        "    assert 'source_images' not in kwargs\n"
        "    many = [len(each) for each in kwargs['images']]\n"
        "    return [many[row] + (0 if one is None else one.width / 100) for row, one in enumerate(image)]\n"
        "def narrow(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):\n"
        "    return [1.0] * len(prompts)\n"
    )
    batch = texts(2, source_images=[[noise(0, 8, 4), noise(1, 9, 4)], []])
    reward = FunctionReward(function=f"{path}:score")
    assert reward.load_needs().sources == "optional"
    assert [score.value for score in reward.score(batch)] == [2.08, 0.0]
    narrow = FunctionReward(function=f"{path}:narrow")
    assert narrow.load_needs().sources is None
    assert [score.value for score in narrow.score(batch)] == [1.0, 1.0]
