"""A fingerprint sees the code that a stage runs: every part that it executes, and no other."""

import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.user_code.files import PROJECT_PACKAGES
from grpo_core.user_code.syntax import SyntaxWalk, parse
from tasks.execution import fingerprint
from tasks.execution.fingerprint import ORCHESTRATION, code_fingerprint, is_orchestration, reached_modules
from tasks.execution.stage import STAGES, stage_named
from tasks.process import CHECKOUT
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.stage_calls import MIX, PLACEMENT, ROLLOUT, UPDATE, base, plan, spec

MADE = {
    "tasks/__init__.py": "",
    "tasks/stage.py": '''
"""Stage."""
import grpo_core.losses
from grpo_core import OFFERED, kl
from tasks.caching import stage
from tasks.shapes import Shape

LIMIT = 3
UNUSED = 4


@stage
def run(shape: Shape):
    """Run."""
    from grpo_core.lazy import late
    return late(LIMIT) + grpo_core.losses.clipped(shape) + kl.k3(1) + OFFERED


def unused():
    return UNUSED
''',
    "tasks/shapes.py": "class Base:\n    side = 1\n\n\nclass Shape(Base):\n    pass\n",
    "tasks/caching.py": "def stage(function):\n    return function\n",
    "grpo_core/__init__.py": """
from grpo_core.offered import OFFERED
from grpo_core.other import OTHER
print("imported")
""",
    "grpo_core/offered.py": "OFFERED = 1\n",
    "grpo_core/other.py": "OTHER = 1\n",
    "grpo_core/lazy.py": "def late(x):\n    # Twice.\n    return helper(x)\n\n\ndef helper(x):\n    return x * 2\n",
    "grpo_core/losses.py": "from math import sin as wave\n\n\ndef clipped(x):\n    return x\n",
    "grpo_core/kl.py": "def k3(x):\n    return x\n",
}
EDITS = [
    ("tasks/stage.py", '"""Run."""', '"""Run the stage."""', False),
    ("tasks/stage.py", "@stage\n", "", False),
    ("tasks/stage.py", "UNUSED = 4", "UNUSED = 5", True),
    ("tasks/stage.py", "LIMIT = 3", "LIMIT = 2", True),
    ("tasks/shapes.py", "side = 1", "side = 2", True),
    ("grpo_core/__init__.py", 'print("imported")', 'print("again")', True),
    ("grpo_core/offered.py", "OFFERED = 1", "OFFERED = 3", True),
    ("grpo_core/lazy.py", "    # Twice.\n", "", False),
    ("grpo_core/lazy.py", "x * 2", "x * 3", True),
    ("grpo_core/losses.py", "import sin as", "import cos as", True),
    ("grpo_core/losses.py", "def clipped(x):\n    return x", "def clipped(x):\n    return 2 * x", True),
    ("grpo_core/losses.py", "def clipped", "\n\n# One more.\ndef clipped", False),
    ("grpo_core/other.py", "OTHER = 1", "OTHER = 2", False),
    ("tasks/caching.py", "def stage", "def staged", False),
    ("grpo_core/kl.py", "return x", "return -x", True),
]


@pytest.mark.parametrize(("file", "old", "new", "counts"), EDITS, ids=[f"{file}:{new!r}" for file, _, new, _ in EDITS])
def test_what_is_reached_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, counts: bool
) -> None:
    # It counts all objects that pytest's conftest froze.
    monkeypatch.setattr(fingerprint, "collection_paused", nullcontext)
    assert old in MADE[file]
    for place, made in (("before", MADE), ("after", {**MADE, file: MADE[file].replace(old, new)})):
        for name, text in made.items():
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    before, after = (code_fingerprint(["tasks.stage:run"], tmp_path / place) for place in ("before", "after"))
    assert (before != after) == counts


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for root in ("tasks.absent", "tasks.process:absent"):
        with pytest.raises(ValueError, match=root):
            code_fingerprint([root])


SPEC = spec()
STAGE_ROOTS = {
    "collect rollouts": stage_named("collect rollouts").roots({"model": SPEC, "rollout": ROLLOUT}),
    "score ssim": stage_named("score reward").roots({"section": RewardSection(reward="ssim")}),
    "score jpeg": stage_named("score reward").roots({"section": MIX[0]}),
    "compute advantages": stage_named("compute advantages").roots({}),
    "update policy": stage_named("update policy").roots({"model": SPEC}),
}


REACHED_BY: dict[str, set[str]] = {
    "grpo_core.losses.microbatch_loss": {"update policy"},
    "grpo_core.logprobs": {"collect rollouts", "update policy"},
    "grpo_core.rewards.similarity.pairs": {"score ssim"},
    "grpo_core.rewards.image_statistics": {"score jpeg"},
    "grpo_core.advantages.compute": {"compute advantages"},
    "tasks.execution.work_pool": set(),
    "tasks.execution.caching": set(),
    "tasks.execution.stopping": set(),
    "tasks.storage.lease": set(),
    "tasks.storage.roots": set(),
    "tasks.progress": set(),
    "tasks.storage.parquet": {*STAGE_ROOTS},
}
COMPUTING = {"torch", "numpy", "polars", "pyarrow", "PIL", "transformers", "diffusers", "peft"}
NEEDS_ITS_ERRORS = {"tasks.execution.resources", "tasks.execution.errors"}
"""They know torch's error of a full memory, and ask it how much there is; memory is in no key."""

NAMED_IN_CALLS = {
    "grpo_core.parity",
    "grpo_core.user_code.python_path",
    "grpo_core.user_code.syntax",
    "grpo_core.user_code.files",
}
"""An error that travels between processes, and the digests of a call's code."""

NAMED_IN_PLACES = {
    "grpo_core.pipeline_files",
    "grpo_core.services",
    *(f"grpo_core.policies{name}" for name in ("", ".trained")),
    *(f"grpo_core.policies.trained.{name}" for name in ("quantization", "settings")),
}
"""Settings of policies and of services, by which is found where a stage runs; scoring has none of them."""


def test_no_stage_sees_orchestration_and_orchestration_computes_nothing() -> None:
    """A log line, a retry or a lock may change without any result being made again."""
    reached = set().union(*(reached_modules(roots) for roots in STAGE_ROOTS.values()))
    assert {module for module in reached if is_orchestration(module)} == set()
    for file in sorted((CHECKOUT / "tasks").rglob("*.py")):
        module = ".".join(file.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
        if not is_orchestration(module) or module in NEEDS_ITS_ERRORS:
            continue
        walk = SyntaxWalk(module.rpartition(".")[0])
        walk.visit(parse(file.read_bytes()))
        imported = {name for _, (name, _), runs in walk.imports if runs}
        assert not {name.partition(".")[0] for name in imported} & COMPUTING, module


def test_leaving_out_orchestration_leaves_out_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a stage's time and place lead to is orchestration too."""
    kept = {name: reached_modules(roots) for name, roots in STAGE_ROOTS.items()}
    monkeypatch.setattr(fingerprint, "ORCHESTRATION", ())
    fingerprint._reached.cache_clear()
    complete = {name: reached_modules(roots) for name, roots in STAGE_ROOTS.items()}
    fingerprint._reached.cache_clear()
    for name, reached in complete.items():
        lost = {each for each in reached - kept[name] if not each.startswith(ORCHESTRATION)}
        assert lost <= NAMED_IN_CALLS | NAMED_IN_PLACES, name


def test_a_module_is_in_the_keys_of_the_stages_that_reach_it() -> None:
    reached = {name: reached_modules(roots) for name, roots in STAGE_ROOTS.items()}
    found = {module: {name for name in reached if module in reached[name]} for module in REACHED_BY}
    assert found == REACHED_BY


@contextmanager
def executed() -> Iterator[set[CodeType]]:
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def modules_of(codes: set[CodeType]) -> set[str]:
    """The modules of this project that the code belongs to; what runs at import time is no work of a stage."""
    paths = {Path(code.co_filename) for code in codes if code.co_name != "<module>"}
    below = [path.relative_to(CHECKOUT) for path in paths if path.is_relative_to(CHECKOUT)]
    named = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in below]
    return {name for name in named if name.split(".")[0] in PROJECT_PACKAGES}


def test_everything_that_a_stage_runs_is_in_its_fingerprint(store: ArtifactStore) -> None:
    run = {name: stage_named(name).function for name in STAGES}

    def once(stage: str, roots: str, *arguments: object) -> Any:
        with executed() as codes:
            result = run[stage](*arguments)
        missing = modules_of(codes) - reached_modules(STAGE_ROOTS[roots])
        assert {module for module in missing if not is_orchestration(module)} == set()
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
    roots = [("configs.sections",), ("grpo_core.losses",), ("tasks.storage.parquet",)]
    expected = [code_fingerprint(each) for each in roots]
    fingerprint._digest.cache_clear()
    fingerprint._reached.cache_clear()
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
