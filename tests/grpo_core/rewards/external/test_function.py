import asyncio
import hashlib
import importlib.util
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import trl.rewards
from PIL import Image
from trl.trainer import grpo_trainer

from grpo_core.errors import InputError
from grpo_core.rewards.external.function import FunctionReward
from grpo_core.rewards.protocol import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.scoring import provenance_of, score_samples
from tests.grpo_core.rewards.conftest import flat, make_batch, noise

TEXTS = [
    "<think>\nI add.\n</think>\nThe sum is \\boxed{3}.",
    "The sum is 3, the sum is 3, the sum is 3.",
    "<think>once</think><think>twice</think> \\boxed{4}",
    "",
]
TOKENS = [list(range(12)), [5, 6, 7] * 9, [1, 1, 1, 1], []]
COLUMNS = {"solution": ["$3$", "$3$", "no number", "$3$"]}


def texts(count: int = 4, columns: Mapping[str, list[object]] | None = None, **more: Any) -> ScoringBatch:
    return ScoringBatch(
        sample_ids=[f"s{i}" for i in range(count)],
        prompts=[f"prompt {i}" for i in range(count)],
        completions=TEXTS[:count],
        columns={key: list(values)[:count] for key, values in (columns or {}).items()},
        token_ids=TOKENS[:count],
        **more,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


def as_trl_calls(function: Any, batch: ScoringBatch) -> list[float | None]:
    """TRL's own trainer code on a stand-in for the trainer's state."""
    # Its logger asks for that of accelerate.
    accelerate.PartialState(cpu=True)

    class Accelerator:
        device = "cpu"

    class Trainer(grpo_trainer.GRPOTrainer):
        def __init__(self) -> None:
            self.accelerator, self.state, self.environments = Accelerator(), None, None
            self.reward_funcs, self.reward_processing_classes = [function], [None]
            self.reward_func_names, self.current_gradient_accumulation_steps = ["mine"], 1
            self._log_completion_extra = self._log_metric = lambda *given: None

    trainer = Trainer()
    rows = range(len(batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "gather", lambda rewards: rewards)
        patch.setattr(grpo_trainer, "profiling_context", lambda *given: threading.Lock())
        rewards = trainer._calculate_rewards.__wrapped__(
            trainer,
            [{"prompt": batch.prompts[i], **{key: batch.columns[key][i] for key in batch.columns}} for i in rows],
            [[{"role": "user", "content": batch.prompts[i]}] for i in rows],
            [[{"role": "assistant", "content": batch.completions[i]}] for i in rows],
            [list(ids) for ids in batch.token_ids],
        )
    return [None if math.isnan(value) else value for value in rewards[:, 0].tolist()]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("think_format_reward", None),
        ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -0.5}),
        ("get_repetition_penalty_reward", None),
        ("get_soft_overlong_punishment", {"max_completion_len": 20, "soft_punish_cache": 10}),
        ("accuracy_reward", None),
        ("reasoning_accuracy_reward", None),
        ("reasoning_accuracy_reward", {"reasoning_delimiters": ["</think>", "sum"]}),
        ("get_cosine_scaled_reward", {"max_len": 20}),
    ],
)
def test_every_function_of_trl_gives_its_own_numbers(name: str, arguments: dict[str, Any] | None) -> None:
    if importlib.util.find_spec("math_verify") is None and ("accuracy" in name or "cosine" in name):
        pytest.skip("this function of TRL needs the package math_verify")
    function = getattr(trl.rewards, name)
    if name.startswith("get_"):
        function = function(**(arguments or {}))
    elif arguments:
        arguments_given = dict(arguments)
        inner = function

        def function(**keywords: Any) -> Any:
            return inner(**keywords, **arguments_given)

    batch = texts(columns=COLUMNS)
    reward = FunctionReward(function=f"trl.rewards:{name}", arguments=arguments)
    assert reward.preflight() == []
    expected = as_trl_calls(function, batch)
    assert len(set(expected)) > 1
    got = [score.value for score in reward.score(batch)]
    # TRL keeps them in single precision.
    assert got == pytest.approx(expected, abs=1e-7)


def test_every_reward_of_trl_is_tried() -> None:
    tried = {"think_format_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"}
    tried |= {"accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"}
    assert {name for name in dir(trl.rewards) if "reward" in name or "punish" in name} >= tried
    public = set(trl.rewards._import_structure["other_rewards"]) | set(trl.rewards._import_structure["format_rewards"])
    assert public | set(trl.rewards._import_structure["accuracy_rewards"]) == tried


def test_a_function_that_lacks_its_package_says_so_with_its_line() -> None:
    if importlib.util.find_spec("math_verify") is not None:
        pytest.skip("math_verify is installed")
    reward = FunctionReward(function="trl.rewards:accuracy_reward")
    with pytest.raises(
        InputError, match=r"accuracy_rewards\.py:\d+: got 'ImportError: Please install the `math_verify`"
    ):
        reward.score(texts(columns=COLUMNS))


SPY = """
calls = []
def score(prompts, completions, completion_ids, **kwargs):
    calls.append((prompts, completions, completion_ids, kwargs))
    return [float(len(c)) for c in completions]
"""


def spied(path: str) -> list[Any]:
    (module,) = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path]
    calls: list[Any] = module.calls
    return calls


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


def test_messages_where_asked_for_and_where_annotated(write: Callable[..., str]) -> None:
    message = [{"role": "assistant", "content": TEXTS[0]}]
    for number, (annotation, setting, expected) in enumerate(
        [
            ("list[list[dict[str, str]]]", None, True),
            ("'List[List[dict]]'", None, True),
            ("list[str]", None, False),
            ("list[str]", True, True),
            ("list[list]", False, False),
        ]
    ):
        source = SPY.replace("completions,", f"completions: {annotation},", 1)
        path = write(source, f"annotated_{number}.py")
        FunctionReward(function=f"{path}:score", conversational=setting).score(texts(1))
        ((prompts, completions, _, _),) = spied(path)
        assert completions == ([message] if expected else [TEXTS[0]])
        assert prompts == ([[{"role": "user", "content": "prompt 0"}]] if expected else ["prompt 0"])


def test_pictures_come_as_rgb_copies_under_both_names(write: Callable[..., str]) -> None:
    path = write(
        "def score(completions, images, **kwargs):\n"
        "    assert completions == images and kwargs['completion_ids'] is None\n"
        "    values = [image.getpixel((0, 0))[0] / 255 for image in images]\n"
        "    for image in images: image.paste((9, 9, 9), (0, 0, 4, 4))\n"
        "    return values\n"
    )
    reward = FunctionReward(function=f"{path}:score")
    pictures = [flat(51), Image.new("L", (8, 8), 255), noise(0, 8, 8)]
    first = reward.score(make_batch(pictures))
    assert [score.value for score in first[:2]] == [0.2, 1.0]
    assert reward.score(make_batch(pictures)) == first
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
    assert reward.needs_target
    batch = make_batch([flat(1), flat(2)], [Image.new("RGBA", (4, 4), (0, 0, 51, 255)), None])
    assert [score.value for score in reward.score(batch)] == [53.0, 2.0]
    assert not FunctionReward(function=f"{path}:score").needs_target
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0, 2.0]", r"mine\.py:2: got '2 rewards'\. It got 4 samples"),
        ("[]", r"mine\.py:2: got '0 rewards'\. It got 4 samples"),
        ("0.5", r"mine\.py:2: got 'float 0\.5'\. Return a list"),
        ("None", r"mine\.py:2: got 'NoneType None'\. Return a list"),
        ("'good'", r"mine\.py:2: got .*good.*Return a list"),
        ("{'a': 1, 'b': 2, 'c': 3, 'd': 4}", r"mine\.py:2: got .*Return a list"),
        ("[1, 'good', 2, 3]", r"mine\.py:2, sample s1: got 'good'\. Return a number"),
        ("[1, 2, 3, [4]]", r"mine\.py:2, sample s3: got \[4\]\. Return a number"),
        ("[1, 2, 3, 1j]", r"mine\.py:2, sample s3: got 1j\. Return a number"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", None])
def test_wrong_answers_are_named_with_file_and_line(
    write: Callable[[str], str], body: str, message: str, on_error: str | None
) -> None:
    path = write(f"\ndef score(completions, **kwargs):\n    return {body}\n")
    with pytest.raises(InputError, match=message):
        FunctionReward(function=f"{path}:score", on_error=on_error).score(texts())


def test_not_finite_is_a_failure_and_none_is_not_applicable(write: Callable[[str], str]) -> None:
    path = write("def score(completions, **kwargs):\n    return [float('nan'), None, float('-inf'), True]\n")
    nan, none, infinite, yes = FunctionReward(function=f"{path}:score").score(texts())
    assert nan == Score.failed("the reward came out as nan, which is not a finite number (the function at mine.py:1)")
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
    with pytest.raises(InputError, match=r"mine\.py:7: got 'ZeroDivisionError: nothing in it'.*on_error: null"):
        FunctionReward(function=f"{path}:score").score(texts())


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
    with pytest.raises(InputError, match=r"mine\.py:4: got 'ZeroDivisionError"):
        FunctionReward(function=f"{path}:score").score(texts())


def test_by_group_gives_one_whole_group_a_call(write: Callable[[str], str]) -> None:
    path = write(SPY.replace("[float(len(c)) for c in completions]", "[len(set(completions))] * len(completions)"))
    reward = FunctionReward(function=f"{path}:score", by_group=True)
    assert reward.needs_group
    scores = reward.score(texts(group_ids=["a", "a", "a", "b"]))
    assert [score.value for score in scores] == [3, 3, 3, 1]
    assert [len(call[1]) for call in spied(path)] == [3, 1]
    with pytest.raises(InputError, match="come without groups"):
        reward.score(texts())


def test_version_follows_the_file_and_settings_leave_out_the_folder(
    write: Callable[[str], str], tmp_path: Path
) -> None:
    path = write("def score(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    reward = FunctionReward(function=f"{path}:score")
    before = reward.version
    assert reward.score(texts(1)) == [Score(1.0, 1.0)]
    write("def score(completions, **kwargs):\n    return [2.00] * len(completions)\n")
    assert reward.score(texts(1)) == [Score(2.0, 2.0)]
    assert reward.version != before
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "mine.py").write_text(Path(path).read_text())
    assert provenance_of(FunctionReward(function=f"{other}/mine.py:score")) == provenance_of(reward)
    assert str(tmp_path) not in str(provenance_of(reward))


def test_what_a_call_does_to_its_arguments_ends_with_it(write: Callable[[str], str]) -> None:
    path = write(
        "def score(completions, seen, **kwargs):\n"
        "    seen['all'] += completions\n"
        "    return [float(len(seen['all']))] * len(completions)\n"
    )
    reward = FunctionReward(function=f"{path}:score", arguments={"seen": {"all": []}})
    assert [reward.score(texts(2))[0].value for _ in range(3)] == [2.0, 2.0, 2.0]


def test_version_of_a_module_is_that_of_the_code_that_runs(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "def score(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    path = write(source, "module_of_rewards.py")
    importing = write("from module_of_rewards import score\n", "importing_rewards.py")
    for reward in (
        FunctionReward(function="module_of_rewards:score"),
        FunctionReward(function="module_of_rewards:score", arguments={"more": 1}),
        FunctionReward(function=f"{importing}:score"),
    ):
        write(source, "module_of_rewards.py")
        before = reward.version
        assert before == f"1+{hashlib.sha256(source.encode()).hexdigest()[:16]}"
        Path(path).write_text(source.replace("1.0", "2.00"))
        assert reward.score(texts(1)) == [Score(1.0, 1.0)]
        assert reward.version == before


def test_a_file_imports_its_neighbour(write: Callable[..., str]) -> None:
    write("FULL = 7.0\n", "neighbour_of_mine.py")
    path = write("import neighbour_of_mine\ndef score(completions, **kwargs):\n    return [neighbour_of_mine.FULL]\n")
    assert FunctionReward(function=f"{path}:score").score(texts(1)) == [Score(7.0, 7.0)]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("trl.rewards:think_fromat_reward", r"has no think_fromat_reward\. Did you mean think_format_reward"),
        ("no_such_module.x:score", r"There is no module no_such_module\. .*no_such_module\.x\.py:NAME"),
        ("no/such/file.py:score", r"There is no file .*no/such/file\.py"),
        ("{file}:total", r"It is int, not a function"),
        ("{file}:narrow", r"does not take the keyword\(s\) prompts, completion_ids, trainer_state.*\*\*kwargs"),
        ("{file}:BUILT_IN", r"no Python source"),
        ("{file}:make", r"Calling it raised ValueError: no size at .*mine\.py:5"),
        ("{file}:make_nothing", r"gave int where a reward function was due"),
        ("{broken}:score", r"Importing it raised ZeroDivisionError: division by zero at .*broken\.py:2"),
        ("{misspelt}:score", r"Importing it raised SyntaxError.*misspelt\.py:1"),
        ("{lacking}:score", r"Importing it raised ModuleNotFoundError.*no_such_package.* at .*lacking\.py:1"),
    ],
)
def test_preflight_tells_what_is_missing(write: Callable[..., str], reference: str, message: str) -> None:
    file = write(
        "total = 3\nBUILT_IN = len\ndef narrow(completions): return []\n"
        "def make(size=None):\n    raise ValueError('no size')\ndef make_nothing(): return 3\n"
    )
    broken = write("x = 1\n1 / 0\n", "broken.py")
    misspelt = write("def (:\n", "misspelt.py")
    lacking = write("import no_such_package\n", "lacking.py")
    named = reference.format(file=file, broken=broken, misspelt=misspelt, lacking=lacking)
    (problem,) = FunctionReward(function=named).preflight()
    assert re.search(message, problem), problem
    assert problem.startswith("rewards.function.function")


def test_needs_the_column_that_the_function_cannot_do_without(write: Callable[[str], str]) -> None:
    path = write("def score(completions, solution, hint=None, **kwargs): return [1.0]\n")
    assert FunctionReward(function=f"{path}:score").needs_column == "solution"
    assert FunctionReward(function=f"{path}:score", arguments={"solution": ["x"]}).needs_column is None
    assert FunctionReward(function="trl.rewards:think_format_reward").needs_column is None
    assert FunctionReward(function="no.such:thing").needs_column is None


def test_token_ids_that_are_needed_and_not_known(write: Callable[[str], str]) -> None:
    reward = FunctionReward(function="trl.rewards:get_repetition_penalty_reward")
    batch = ScoringBatch(sample_ids=["s"], prompts=["p"], completions=["c"])
    with pytest.raises(InputError, match=r"other_rewards\.py:\d+: .*needs completion_ids"):
        reward.score(batch)


def test_a_column_with_the_name_of_an_argument(write: Callable[[str], str]) -> None:
    reward = FunctionReward(function="trl.rewards:think_format_reward")
    with pytest.raises(InputError, match="Rename the column"):
        reward.score(texts(1, columns={"completions": ["x"]}))


def test_what_the_function_reports_goes_to_the_log(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        "def score(completions, log_metric, log_extra, **kwargs):\n"
        "    log_metric('share', 0.25)\n    log_extra('why', completions)\n    return [float('nan')]\n"
    )
    with caplog.at_level(logging.DEBUG):
        score_samples(FunctionReward(function=f"{path}:score"), texts(1))
    assert "share: 0.25" in caplog.text
    assert "why" in caplog.text
    assert "sample s0" in caplog.text
    assert "mine.py:1" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value", "mend"),
    [
        ("function", "", "path/to/file"),
        ("function", "module.function", "path/to/file"),
        ("function", 3, "path/to/file"),
        ("arguments", ["x"], "names with numbers"),
        ("arguments", {"x": object()}, "names with numbers"),
        ("arguments", {"x": float("nan")}, "names with numbers"),
        ("factory", 1, "true, false or null"),
        ("conversational", "yes", "true, false or null"),
        ("by_group", None, "true or false"),
        ("with_targets", "no", "true or false"),
        ("on_error", "ignore", "raise, null"),
        ("revision", 3, "Set a text"),
    ],
)
def test_wrong_settings_are_refused(setting: str, value: object, mend: str) -> None:
    given: dict[str, Any] = {"function": "trl.rewards:think_format_reward", setting: value}
    with pytest.raises(InputError, match=rf"rewards\.function\.{setting}: got .*{mend}"):
        FunctionReward(**given)
