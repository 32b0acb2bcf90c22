"""`grpo doctor`: the memory and the disk that a run needs, and its functions tried on samples."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
)

from configs.loader import read_config
from flows.preflight.doctor import examine
from flows.preflight.machine import Finding
from flows.preflight.model import reward_device, reward_model_bytes
from grpo_core.policies.estimate import ALWAYS
from grpo_core.rewards.model_reward import ModelReward
from grpo_core.rewards.registry import build_reward
from tasks.rewards.score_rewards import scores_key
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT
from tests.flows.preflight.conftest import examined, with_free_space
from tests.tiny_policies import TEXT_MODEL

pytestmark = pytest.mark.usefixtures("bare_machine")


GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"


Tried = tuple[bool, list[Finding], list[str]]
"""Whether all is well, the findings of the rewards, and the lines of progress."""


Trial = Callable[..., Tried]


def test_memory_is_estimated_without_the_weights(tmp_path: Path) -> None:
    diagnosis, hints = examined(REPOSITORY / "configs" / "glm_image_80gb.yaml", f"storage.root={tmp_path}")
    assert "hf download zai-org/GLM-Image --include" in hints.pop("weights")
    assert hints == {}
    assert diagnosis.memory is not None
    assert 40 < diagnosis.memory.needed / 2**30 < 80


def test_reward_models_on_the_gpu_of_the_policy_are_counted_by_their_headers(tmp_path: Path) -> None:
    """In their precision, however they are stored, and a file of two rewards once."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for part, shape in enumerate([(300, 1000), (700, 1000)], start=1):
        save_file(
            {"weight": torch.zeros(shape, dtype=torch.float16)}, folder / f"model-0000{part}-of-00002.safetensors"
        )

    def counted(*overrides: str, device: str = "cuda", processes: int = 0, dtype: str = "float32") -> int:
        settings = {"model": str(folder), "device": device, "dtype": dtype}
        rewards = [
            {"reward": "reward_model", "name": f"judge_{number}", "processes": processes, "settings": settings}
            for number in range(2)
        ]
        return reward_model_bytes(
            read_config(TINY_TEXT, ["placement.devices=auto", f"rewards={json.dumps(rewards)}", *overrides])
        )

    assert counted() == 4 * 1_000_000
    assert counted(processes=2) == 2 * 4 * 1_000_000
    assert counted(dtype="bfloat16") == 2 * 1_000_000
    assert counted(device="cpu") == counted(device="cuda:1") == 0
    assert counted("placement.rewards.pool=far") == counted("placement.devices=cpu") == 0
    settings = {"model": str(folder), "device": "cuda"}
    rewards = json.dumps([{"reward": "reward_model", "settings": settings}])
    memory = examined(TINY_TEXT, f"storage.root={tmp_path}", "placement.devices=auto", f"rewards={rewards}")[0].memory
    assert memory is not None
    (part,) = (part for part in memory.parts if part.name == "reward models")
    assert (part.bytes, part.phases) == (4 * 1_000_000, ALWAYS)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"no header")
    assert counted() == 4 * 300_000


def test_rewards_of_device_auto_run_beside_the_policy_if_its_gpu_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(250, 1000)}, tmp_path / "model.safetensors")
    given = json.dumps([{"reward": "reward_model", "settings": {"model": str(tmp_path), "device": "auto"}}])
    config, on_cpu = (
        read_config(TINY_TEXT, [f"rewards={given}", f"placement.devices={device}"]) for device in ("auto", "cpu")
    )
    assert reward_device(config, 10**15) == "auto"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, 5_000_000))
    assert reward_device(config, 4_000_000) == "auto"
    assert reward_device(config, 4_000_001) == reward_device(on_cpu, 0) == "cpu"
    reward = build_reward("reward_model", config.rewards[0].settings)
    assert isinstance(reward, ModelReward)
    assert reward.runs_on.device == "cuda:0"
    placed = config.rewards[0].with_device("cpu")
    assert build_reward("reward_model", placed.settings) == replace(reward, device="cpu")
    assert scores_key(placed) == scores_key(config.rewards[0])
    named = placed.model_copy(update={"settings": {**placed.settings, "device": "cuda:1"}})
    assert named.with_device("cpu") == named


@pytest.mark.parametrize("root", ["folder", "bucket"])
def test_room_for_temporary_files_is_in_the_line_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    place = str(tmp_path / "runs") if root == "folder" else "memory://somewhere/runs"
    for free, healthy in ((1000, True), (0, False)):
        monkeypatch.setattr(
            "shutil.disk_usage",
            lambda path, free=free: SimpleNamespace(
                free=(free if str(path) == tempfile.gettempdir() else 1000) * 2**30
            ),
        )
        diagnosis, hints = examined(TINY, f"storage.root={place}")
        (disk,) = (each for each in diagnosis.findings if each.subject == "disk")
        assert (disk.healthy, tempfile.gettempdir() in disk.message) == (healthy, True)
        assert ("TMPDIR" in hints.get("disk", "")) is not healthy


def test_sizes_are_named_and_the_largest_decides_the_memory(tmp_path: Path) -> None:
    """Tokens: 16 and 64 of a square; 8 x 12 and, of aspect 1.5, 3 x 4 (4 sqrt(2/3) = 3.3, 4 sqrt(1.5) = 4.9)."""
    rows = [{"prompt": "a heart", "size": size} for size in (None, "96x64", "96x64")]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    plain = ["data.targets=null", "data.target_column=null", 'rewards=[{"reward": "jpeg"}]', "evaluate.prompts=null"]
    plain += [f"data.prompts={tmp_path}/prompts.json", f"storage.root={tmp_path}"]
    sized, _ = examined(TINY, *plain, "data.width=32", "data.height=32")
    (finding,) = (each for each in sized.findings if each.subject == "sizes")
    assert finding.message == "96x64 of 108 tokens (2 prompts), 32x32 of 32 tokens (1 prompt)"
    largest, _ = examined(TINY, *plain, "rollout.width=96", "data.width=96", "data.height=64")
    assert sized.memory == largest.memory


@pytest.mark.slow
def test_policies_count_towards_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 M adapter parameters and two moments each, in fp32, are 1.1 GB an iteration; the images are 10 GB in all."""
    with_free_space(monkeypatch, 100)
    every = (REPOSITORY / "configs" / "glm_image_80gb.yaml", f"storage.root={tmp_path}", "run.keep_policies=null")
    assert "disk" in examined(*every)[1]
    assert "disk" not in examined(*every, "run.iterations=50")[1]


def test_states_count_towards_the_disk(tmp_path: Path) -> None:
    """Three states of 3 x 8 x 8 values in 16 bits are 1,152 bytes an image, and 2^18 images 0.28 GiB."""
    sampled = ["rollout.prompts_per_iteration=8", "rollout.group_size=8", "run.iterations=4096"]
    config = read_config(REPOSITORY / "configs" / "tiny_sd3.yaml", [f"storage.root={tmp_path}", *sampled])
    (disk,) = (each for each in examine(config).findings if each.subject == "disk")
    assert "262144 images take at most 3 GiB, their denoising states 0.28 GiB" in disk.message


FUNCTIONS = """
import statistics

def words(images, **columns):
    return ["red", "blue"]

def breaks(completions, **columns):
    raise KeyError("answer")

def counted(completions, completion_ids, prompts, **columns):
    assert len(completions) == len(completion_ids) == len(prompts) == 2 and prompts[0] == prompts[1]
    return [len(columns), float("nan")]

def first(completions, **columns):
    return [len(text.split()[0]) for text in completions]

def contrast(images, targets, completion_ids, **columns):
    assert all(image.size == target.size for image, target in zip(images, targets))
    pixels = [list(image.convert("L").tobytes()) for image in images]
    assert pixels[0] != pixels[1] and all(0 <= code < 73 for ids in completion_ids for code in ids)
    assert all(statistics.stdev(each) > 10 for each in pixels)
    return [len(ids) for ids in completion_ids]

def huge(prompts, **columns):
    return [10**400 for prompt in prompts]

def silent(prompts, **columns):
    return [None for prompt in prompts]

def paired(prompts, targets, **columns):
    return [0.0 for prompt in prompts]
"""


class TestTrials:
    @pytest.fixture
    def trial(self, tmp_path: Path) -> Trial:
        (tmp_path / "own.py").write_text(FUNCTIONS)

        def trial(
            config: Path,
            function: str,
            scope: Mapping[str, object] = {},
            changes: Sequence[str] = (),
            **settings: object,
        ) -> Tried:
            named = {"function": f"{tmp_path}/own.py:{function}", **settings}
            rewards = json.dumps([{"reward": "function", "settings": named, **scope}])
            lines: list[str] = []
            overrides = [f"storage.root={tmp_path}", f"rewards={rewards}", *changes]
            diagnosis = examine(read_config(config, overrides), lines.append)
            return diagnosis.healthy, [each for each in diagnosis.findings if each.subject == "rewards"], lines

        return trial

    def test_a_function_is_refused_as_training_refuses_it(self, trial: Trial) -> None:
        for config, function, settings, problem in (
            (TINY, "words", {}, "own.py:4, sample trial sample 1: got 'red'"),
            (TINY_TEXT, "breaks", {}, "own.py:8: got \"KeyError: 'answer'\""),
            # The place of a call that does not begin is that of the function.
            (TINY_TEXT, "paired", {}, 'own.py:30: got "TypeError: paired() missing'),
            # Training counts these as failed samples, and stops at too many of them.
            (TINY_TEXT, "huge", {}, "rewards.0.huge: got 'the reward is inf, not a finite number"),
            (TINY_TEXT, "breaks", {"on_error": "null"}, 'rewards.0.breaks: got "the function raised KeyError'),
        ):
            healthy, (finding,), _ = trial(config, function, **settings)
            assert problem in finding.message
            assert (healthy, finding.healthy) == (False, False)

    def test_made_up_samples_are_like_those_of_the_run(self, trial: Trial) -> None:
        """64 x 64 pixels are 8 x 8 tokens after a preview of 4 x 4, which an edit has not."""
        for config, function, settings, outcome in (
            (TINY, "contrast", {"with_targets": True}, "80.000\n"),
            (REPOSITORY / "configs" / "tiny_edit.yaml", "contrast", {"with_targets": True}, "64.000\n"),
            (TINY_TEXT, "first", {}, "1.000, 7.000\n"),
            (GROUNDING, "first", {}, "1.000, 7.000\n"),
            # Two columns of each prompt, and the three hooks of TRL.
            (TINY_TEXT, "counted", {}, "5.000, the reward is nan"),
            (TINY_TEXT, "silent", {}, "none (not applicable)"),
        ):
            healthy, (finding,), _ = trial(config, function, **settings)
            assert healthy, finding
            (note,) = finding.notes
            assert f" samples: {outcome}" in note.rpartition(" (")[0] + "\n", note

    def test_tokens_of_a_model_that_is_not_here_are_not_made_up(self, trial: Trial) -> None:
        absent = ["policy.model=nobody/absent"]
        for function, lines in (("counted", 0), ("first", 1)):
            _, (finding,), heard = trial(TINY_TEXT, function, changes=absent)
            assert finding.healthy
            assert len(heard) == lines

    def test_the_functions_are_named_once_before_they_are_called(self, trial: Trial) -> None:
        (line,) = trial(TINY_TEXT, "silent")[2]
        assert line.endswith("/own.py:silent ...")
        assert trial(TINY_TEXT, "breaks", {"where": {"word": ["none of them"]}})[::2] == (True, [])
        lines: list[str] = []
        examine(read_config(TINY), lines.append)
        assert not lines

    @pytest.mark.slow
    def test_a_function_that_crashes_by_a_signal_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "crashing.py"
        file.write_text("import ctypes\ndef score(completions, **rest):\n    return ctypes.string_at(0)\n")
        rewards = json.dumps([{"reward": "function", "settings": {"function": f"{file}:score"}}])
        program = "from flows.command_line.main import run; run()"
        command = [sys.executable, "-c", program, "doctor", str(TINY_TEXT), "--set", f"rewards={rewards}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == -signal.SIGSEGV
        assert f'File "{file}", line 3 in score' in ended.stderr


def test_memory_is_that_of_the_longest_prompt(tmp_path: Path) -> None:
    """The ids are those of the tokenizer's own template; the cache has them and the completion, but for its end."""
    words = ["ok", "sort the letters of banana", "sort"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": each, "answer": "a", "word": "a"}) for each in words))
    changes = (f"storage.root={tmp_path}/runs", f"data.prompts={path}", "evaluate.prompts=null")
    diagnosis, _ = examined(TINY_TEXT, *changes, "rollout.max_completion_length=20")
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    given = [{"role": "user", "content": words[1]}]
    longest = len(tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=True)["input_ids"])
    (weights,) = (each for each in diagnosis.findings if each.subject == "weights")
    assert f"prompts counted as {longest} ids" in weights.message
    config, rollout = LlamaConfig.from_pretrained(TEXT_MODEL), read_config(TINY_TEXT, changes).rollout
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    rows = rollout.prompts_per_batch * rollout.group_size
    assert diagnosis.memory is not None
    parts = {part.name: part.bytes for part in diagnosis.memory.parts}
    assert parts["key-value cache"] == rows * (longest + 20 - 1) * values * 4
