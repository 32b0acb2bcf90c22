"""A fingerprint sees the code that a stage runs: every part that it executes, and no other."""

import gc
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from configs.scoring import RewardSection
from configs.training import AdvantagesSection
from tasks.checkout import CHECKOUT
from tasks.execution import fingerprint
from tasks.execution.fingerprint import PACKAGES, Symbol, code_fingerprint, reached_symbols
from tasks.execution.stages import STAGES, stage_named
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.stage_calls import MIX, PLACEMENT, ROLLOUT, UPDATE, base, plan, spec

MADE = {
    "tasks/__init__.py": "",
    "tasks/stage.py": '''
"""Stage."""
import grpo_core.losses
from grpo_core import OFFERED, kl
from tasks.shapes import Shape

LIMIT = 3
UNUSED = 4


@decorated_by_nothing_that_counts
def run(shape: "Shape"):
    """Run."""
    from grpo_core.lazy import late
    return late(LIMIT) + grpo_core.losses.clipped(shape) + kl.k3(1) + OFFERED


def unused():
    return UNUSED
''',
    "tasks/shapes.py": "class Base:\n    side = 1\n\n\nclass Shape(Base):\n    pass\n",
    "grpo_core/__init__.py": '"""Core."""\nfrom grpo_core.offered import OFFERED, NEVER\nprint("imported")\n',
    "grpo_core/offered.py": "OFFERED = 1\nNEVER = 2\n",
    "grpo_core/lazy.py": "def late(x):\n    # Twice.\n    return helper(x)\n\n\ndef helper(x):\n    return x * 2\n",
    "grpo_core/losses.py": "def clipped(x):\n    return x\n\n\ndef cispo(x):\n    return x\n",
    "grpo_core/kl.py": "def k3(x):\n    return x\n",
}
EDITS = [
    ("tasks/stage.py", '"""Run."""', '"""Run the stage."""', False),
    ("tasks/stage.py", "@decorated_by_nothing_that_counts\n", "", False),
    ("tasks/stage.py", "UNUSED = 4", "UNUSED = 5", False),
    ("tasks/stage.py", "LIMIT = 3", "LIMIT = 2", True),
    ("tasks/shapes.py", "side = 1", "side = 2", True),
    ("grpo_core/__init__.py", 'print("imported")', 'print("again")', True),
    ("grpo_core/offered.py", "OFFERED = 1", "OFFERED = 3", True),
    ("grpo_core/offered.py", "NEVER = 2", "NEVER = 3", False),
    ("grpo_core/lazy.py", "    # Twice.\n", "", False),
    ("grpo_core/lazy.py", "x * 2", "x * 3", True),
    ("grpo_core/losses.py", "def clipped(x):\n    return x", "def clipped(x):\n    return 2 * x", True),
    ("grpo_core/losses.py", "def cispo(x):\n    return x", "def cispo(x):\n    return 2 * x", False),
    ("grpo_core/kl.py", "return x", "return -x", True),
]


@pytest.mark.parametrize(("file", "old", "new", "counts"), EDITS, ids=[f"{file}:{new!r}" for file, _, new, _ in EDITS])
def test_what_is_reached_counts(tmp_path: Path, file: str, old: str, new: str, counts: bool) -> None:
    for name, text in MADE.items():
        for place in ("before", "after"):
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    edited = tmp_path / "after" / file
    assert old in edited.read_text()
    edited.write_text(edited.read_text().replace(old, new))
    before, after = (code_fingerprint(["tasks.stage:run"], tmp_path / place) for place in ("before", "after"))
    assert (before != after) == counts


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for root in ("tasks.absent", "tasks.checkout:absent"):
        with pytest.raises(ValueError, match=root):
            code_fingerprint([root])


SPEC = spec()
STAGE_ROOTS = {
    "collect rollouts": stage_named("collect rollouts").roots({"model": SPEC}),
    "score ssim": stage_named("score reward").roots({"section": RewardSection(reward="ssim")}),
    "score jpeg": stage_named("score reward").roots({"section": MIX[0]}),
    "compute advantages": stage_named("compute advantages").roots({}),
    "update policy": stage_named("update policy").roots({"model": SPEC}),
}


# File and definition; edits of one tree, and the stages that run any of them.
EDITED = [
    (
        {
            "grpo_core/losses/policy_loss.py": "def clipped",
            "grpo_core/rewards/image_statistics/statistics.py": "class JpegReward",
            "grpo_core/policies/estimate.py": "def estimate_resources",
        },
        {"update policy", "score jpeg"},
    ),
    (
        {
            "grpo_core/logprobs.py": "def score_hidden",
            "grpo_core/rewards/similarity/pixels.py": "class SsimReward",
            "grpo_core/advantages/compute.py": "def compute_advantages",
        },
        {"collect rollouts", "update policy", "score ssim", "compute advantages"},
    ),
]


def copied(checkout: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, checkout / package, ignore=lambda _, names: _not_code(names))
    return checkout


def _not_code(names: list[str]) -> list[str]:
    return [name for name in names if "." in name and not name.endswith(".py")]


def edit(checkout: Path, file: str, definition: str, comment: str = "", docstring: str = "", code: str = "") -> None:
    head, _, rest = (CHECKOUT / file).read_text().partition(f"\n{definition}")
    before, quotes, body = rest.partition('"""\n')
    assert body
    (checkout / file).write_text(f"{comment}{head}\n{definition}{before}{docstring}{quotes}{code}{body}")


def test_changed_comments_and_docstrings_count_nowhere(tmp_path: Path) -> None:
    checkout = copied(tmp_path / "checkout")
    for file, definition in (item for edits, _ in EDITED for item in edits.items()):
        edit(checkout, file, definition, comment="# A comment.\n", docstring=" Edited.")
    for roots in STAGE_ROOTS.values():
        assert code_fingerprint(roots, checkout) == code_fingerprint(roots)


@pytest.mark.parametrize(("edits", "changed"), EDITED, ids=["losses", "log-probs"])
def test_a_changed_line_changes_the_stages_that_run_it(
    tmp_path: Path, edits: dict[str, str], changed: set[str]
) -> None:
    checkout = copied(tmp_path / "checkout")
    for file, definition in edits.items():
        edit(checkout, file, definition, code="    edited = 1\n")
    different = {
        name for name, roots in STAGE_ROOTS.items() if code_fingerprint(roots, checkout) != code_fingerprint(roots)
    }
    assert different == changed


@contextmanager
def executed() -> Iterator[set[CodeType]]:
    """Collects what runs in this thread."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def symbols_of(codes: set[CodeType]) -> set[Symbol]:
    """The top-level names of this project that the code belongs to."""
    found = set()
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(CHECKOUT) and path.relative_to(CHECKOUT).parts[0] in PACKAGES:
            module = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
            name = code.co_qualname.split(".")[0]
            # What runs at import time is no work of the stage.
            found |= {(module, name)} - {(module, "<module>")}
    return found


def test_everything_that_a_stage_runs_is_in_its_fingerprint(store: ArtifactStore) -> None:
    run = {name: stage_named(name).function for name in STAGES}

    def once(stage: str, roots: str, *arguments: object) -> Any:
        with executed() as codes:
            result = run[stage](*arguments)
        missing = symbols_of(codes) - reached_symbols(STAGE_ROOTS[roots])
        assert missing == set()
        return result

    rollouts = once("collect rollouts", "collect rollouts", base(), plan(), SPEC, ROLLOUT, True, PLACEMENT)
    folder = "iteration_000001"
    scores = once("score reward", "score jpeg", rollouts, MIX[0], f"{folder}/rewards", "iteration 1", PLACEMENT)
    rounds = (SamplingRound(rollouts, {MIX[0].label: scores}),)
    advantages = once(
        "compute advantages", "compute advantages", rounds, ("tokens",), MIX, AdvantagesSection(), folder, "i", None
    )
    settings = UPDATE.model_copy(update={"kl_coef": 0.1, "entropy_coef": 0.01})
    arguments = (base(), (rollouts,), advantages, SPEC, {"tokens": settings}, 1, 0, "i", PLACEMENT)
    policy = once("update policy", "update policy", *arguments)
    assert policy.version == 1


def _let_others_run(*_: object) -> None:
    time.sleep(0)


def test_stages_that_start_at_once_fingerprint_the_same() -> None:
    """Python 3.11 raises SystemError where two threads build syntax trees and one of them collects garbage."""
    roots = [("tasks.rewards.score_rewards",), ("tasks.update.update_policy",), ("tasks.rollouts.collect_rollouts",)]
    expected = [code_fingerprint(each) for each in roots]
    fingerprint._digest.cache_clear()
    fingerprint._read.cache_clear()
    fingerprint._source.cache_clear()
    interval = sys.getswitchinterval()
    gc.callbacks.append(_let_others_run)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(roots)) as threads:
            assert list(threads.map(code_fingerprint, roots)) == expected
    finally:
        sys.setswitchinterval(interval)
        gc.callbacks.remove(_let_others_run)
