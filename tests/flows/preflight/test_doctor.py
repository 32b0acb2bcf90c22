"""`grpo doctor`: what it finds, the memory it estimates for shipped files, and that it changes nothing."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    MambaConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.preflight.doctor import TRIED, UNTRIED, Diagnosis, examine
from flows.preflight.engine import engine_notes
from flows.preflight.inputs import CHECKS, check_inputs
from flows.preflight.machine import Finding
from flows.preflight.model import reward_model_bytes, trained_model
from flows.preflight.prompts import read_prompt_files
from grpo_core.errors import InputError
from grpo_core.hub import loaded_files
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.estimate import ALWAYS
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tasks.models.resident import load_policy
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT, Runs, refused
from tests.grpo_core.rewards.stub import as_a_gated_repository, reach, serve
from tests.tiny_policies import TEXT_MODEL

GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
Tried = tuple[bool, list[Finding], list[str]]
"""Whether all is well, the findings of the rewards, and the lines of progress."""

Trial = Callable[..., Tried]
JPEG = 'rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]'


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large disk, but no GPU, no server and no downloaded model."""
    with_free_space(monkeypatch, 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def with_free_space(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=gib * 2**30))


def examined(config: Path, *overrides: str) -> tuple[Diagnosis, dict[str, str]]:
    """The diagnosis, and the hints of its problems by subject."""
    diagnosis = examine(read_config(config, overrides))
    hints = {finding.subject: finding.hint for finding in diagnosis.findings if not finding.healthy}
    assert all(hints.values()), "every problem has a hint"
    return diagnosis, hints


def test_nothing_is_wrong_with_the_tiny_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(application, ["doctor", str(TINY), "--set", f"storage.root={tmp_path}/runs", "--json"])
    printed = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, printed["healthy"]) == (0, True)
    assert {finding["subject"] for finding in printed["findings"]} >= {*CHECKS, "weights", "memory", "disk", "server"}
    diagnosis = examine(read_config(TINY))
    assert diagnosis.memory is not None
    assert diagnosis.report().tables == []
    (table,) = diagnosis.report(tables=True).tables
    needed = float(table.rows[-1]["update of tokens"]) * 1.15
    assert table.note.startswith("a GPU should have ")
    assert float(table.note.split()[4]) == pytest.approx(needed, abs=0.02) == diagnosis.memory.needed / 2**30
    assert not (tmp_path / "runs").exists()


def test_scripts_that_no_font_has_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPL_IGNORE_SYSTEM_FONTS", "1")
    found = {}
    for name, prompt in (("rare", "a cat \U00010384\U00010385"), ("known", "eine Straße, кот, قطة")):
        path = tmp_path / f"{name}.txt"
        path.write_text(f"{prompt}\n")
        changes = (
            f"data.prompts={path}",
            "data.targets=null",
            "data.target_column=null",
            "rewards=[{reward: sharpness}]",
        )
        diagnosis, _ = examined(TINY, f"storage.root={tmp_path}", *changes)
        (found[name],) = (each for each in diagnosis.findings if each.subject == "fonts")
    assert all(each.healthy for each in found.values())
    assert "2 letters (Ugaritic)" in found["rare"].message
    assert found["rare"].hint
    assert found["known"].message.startswith("DejaVuSans.ttf ")
    assert not found["known"].hint


def test_memory_is_estimated_without_the_weights(tmp_path: Path) -> None:
    diagnosis, hints = examined(REPOSITORY / "configs" / "glm_image_80gb.yaml", f"storage.root={tmp_path}")
    assert "hf download zai-org/GLM-Image --include" in hints.pop("weights")
    assert hints == {}
    assert diagnosis.memory is not None
    assert 40 < diagnosis.memory.needed / 2**30 < 80


def test_reward_models_on_the_gpu_of_the_policy_are_counted_by_their_headers(tmp_path: Path) -> None:
    """In fp32, however they are stored, and a file of two rewards once."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for part, shape in enumerate([(300, 1000), (700, 1000)], start=1):
        save_file(
            {"weight": torch.zeros(shape, dtype=torch.float16)}, folder / f"model-0000{part}-of-00002.safetensors"
        )

    def counted(*overrides: str, device: str = "cuda", processes: int = 0) -> int:
        settings = {"model": str(folder), "device": device}
        rewards = [
            {"reward": "reward_model", "name": f"judge_{number}", "processes": processes, "settings": settings}
            for number in range(2)
        ]
        return reward_model_bytes(
            read_config(TINY_TEXT, ["placement.devices=auto", f"rewards={json.dumps(rewards)}", *overrides])
        )

    assert counted() == 4 * 1_000_000
    assert counted(processes=2) == 2 * 4 * 1_000_000
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


def test_what_a_function_uses_and_no_key_sees_is_named_as_at_a_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\nimport importlib\nNAME = 'json'\nimportlib.import_module(NAME)\n"
        "VALUE = float(Path(__file__).with_name('value.txt').read_text())\n"
        "def score(images, **columns):\n    return [VALUE for _ in images]\n"
        "def loss(inputs, settings):\n    return -inputs.ratio\n"
    )
    (tmp_path / "value.txt").write_text("0.5")
    rewards = f'rewards=[{{"reward": "function", "settings": {{"function": "{file}:score"}}}}]'
    config = read_config(TINY, [f"storage.root={tmp_path}/runs", rewards, f"update.loss={file}:loss"])
    noted = [note for note in check_inputs(config).notes if "no key sees" in note]
    assert [note.partition(",")[0] for note in noted] == ["rewards.0.score", "update.loss"]
    for note in noted:
        assert "mine.py:4 (import_module)" in note
        assert f"{tmp_path}/value.txt (read by an import)" in note
    (finding,) = (each for each in examine(config).findings if each.subject == "rewards")
    assert {*noted} <= {*finding.notes}


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
    config = REPOSITORY / "configs" / "glm_image_80gb.yaml"
    assert "disk" in examined(config, f"storage.root={tmp_path}")[1]
    assert "disk" not in examined(config, f"storage.root={tmp_path}", "run.iterations=50")[1]


def test_states_count_towards_the_disk(tmp_path: Path) -> None:
    """Three states of 3 x 8 x 8 values in 16 bits are 1,152 bytes an image, and 2^18 images 0.28 GiB."""
    sampled = ["rollout.prompts_per_iteration=8", "rollout.group_size=8", "run.iterations=4096"]
    config = read_config(REPOSITORY / "configs" / "tiny_sd3.yaml", [f"storage.root={tmp_path}", *sampled])
    (disk,) = (each for each in examine(config).findings if each.subject == "disk")
    assert "262144 images take at most 3 GiB, their denoising states 0.28 GiB" in disk.message


def test_each_problem_has_a_subject_and_a_hint(tmp_path: Path) -> None:
    wrong = ["data.prompts=missing.txt", "placement.devices=cuda", "storage.root=nosuch://runs"]
    wrong += ["run.trackers=[tensorbord]"]
    sets = [part for override in wrong for part in ("--set", override)]
    result = CliRunner().invoke(application, ["doctor", str(TINY), *sets, "--json"])
    assert result.exit_code == 2
    findings = [each for each in json.loads(result.stdout.splitlines()[-1])["findings"] if not each["healthy"]]
    assert {each["subject"] for each in findings} == {"prompts", "device", "storage", "memory", "trackers"}
    assert all(each["hint"] in " ".join(result.stderr.split()) for each in findings)


def text_model(folder: Path, config: PreTrainedConfig) -> tuple[str, ...]:
    """Overrides for a run of this model with adapters; its weights are never opened."""
    shutil.copytree(TEXT_MODEL, folder / "model")
    config.save_pretrained(folder / "model")
    return (f"policy.model={folder}/model", f"storage.root={folder}/runs", "policy.lora={rank: 2}")


SMALL = {"vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
REFUSED: Mapping[str, tuple[PreTrainedConfig, str]] = {
    "policy.lora={rank: 2}": (MambaConfig(**SMALL, num_hidden_layers=2), "A mamba model cannot be trained here: "),
    "policy.lora={rank: 2, targets: lm_head, init_lora_weights: pissa}": (
        Qwen2Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, eos_token_id=268, tie_word_embeddings=True),
        "moves a part of the weights of lm_head into an adapter",
    ),
}


@pytest.mark.parametrize("lora", REFUSED)
def test_doctor_and_train_refuse_a_model_alike(tmp_path: Path, lora: str) -> None:
    config, hint = REFUSED[lora]
    overrides = (*text_model(tmp_path, config), lora)
    diagnosis, hints = examined(TINY_TEXT, *overrides)
    (error,) = refused(lambda: check_inputs(read_config(TINY_TEXT, overrides)))
    assert [each.hint for each in diagnosis.findings if each.subject == "model"] == [error.hint] == [hints["model"]]
    assert hint in error.hint


ASKED: dict[str, object] = {"role": "user", "content": "2+2?"}


def test_an_answer_that_the_prompt_begins_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": [ASKED, {"role": "assistant", "content": "So"}]}, {"prompt": [ASKED]}]
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps({**row, "answer": "4"}) for row in rows))
    config = read_config(TINY_TEXT, (f"data.prompts={tmp_path}/set.jsonl", f"storage.root={tmp_path}/runs"))
    assert any("in 1 of 2 prompts the assistant begins" in note for note in read_prompt_files(config).notes)


def test_what_adapters_leave_out_is_said(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 288}
    overrides = text_model(tmp_path, PhimoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    diagnosis, _ = examined(TINY_TEXT, *overrides)
    notes = check_inputs(read_config(TINY_TEXT, overrides)).notes
    assert [each.notes for each in diagnosis.findings if each.subject == "model"] == [(TRIED, *notes)]
    assert "model.layers.*.mlp.router.weight" in notes[0]


def test_the_model_is_loaded_and_tried_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that the tests do not try says so; a fault that only its weights show is found before a run, and by it."""
    config = read_config(TINY_TEXT, (f"storage.root={tmp_path}/runs",))
    (trial,) = (each for each in examine(config, load=True).findings if each.subject == "trial")
    assert (trial.healthy, "log-probs within" in trial.message) == (True, True)
    monkeypatch.setattr("grpo_core.policies.causal_lm.model_types.TRIED", frozenset())
    (model,) = (each for each in examine(config).findings if each.subject == "model")
    assert model.notes == (UNTRIED,)
    score = CausalLMPolicy.logprobs

    def shifted(*arguments: Any, **named: Any) -> Any:
        scored = score(*arguments, **named)
        return replace(scored, logprobs=scored.logprobs + 0.01)

    monkeypatch.setattr(CausalLMPolicy, "logprobs", shifted)
    (trial,) = (each for each in examine(config, load=True).findings if each.subject == "trial")
    assert "log-probs while scoring differ by 0.01" in trial.hint
    spec = trained_model(config)
    with pytest.raises(InputError, match=r"scoring differ by 0\.01.* Found \d+ s after.*grpo doctor --load") as caught:
        load_policy(spec, config.rollout, torch.device("cpu"))
    assert caught.value.place == "policy.model"


@pytest.mark.parametrize(
    ("config", "changes", "counted"),
    [
        (TINY, [], "60 for training and 12 held out, all with a target image"),
        (TINY, ["evaluate.targets=null", "evaluate.target_column=null", "evaluate.prompts=null"], "60 for training"),
        (TINY, ["data.targets=null", "data.target_column=null", JPEG], "12 with a target image"),
        (TINY_TEXT, [], "256 for training and 32 held out"),
    ],
)
def test_targets_are_counted_where_there_are_any(
    tmp_path: Path, config: Path, changes: list[str], counted: str
) -> None:
    diagnosis, _ = examined(config, f"storage.root={tmp_path}", *changes)
    (finding,) = (each for each in diagnosis.findings if each.subject == "prompts")
    assert counted in finding.message
    assert ("target" in finding.message) == any("target" in note for note in finding.notes) == (config is TINY)


@pytest.mark.parametrize(("consent", "changes"), [(True, {}), (True, {"max_position_embeddings": 20}), (False, {})])
def test_weights_that_a_run_would_download_are_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consent: bool, changes: dict[str, int]
) -> None:
    """What describes the model is read before: this one reads 20 ids, and completions have 24."""
    files = {path.name: path.read_bytes() for path in TEXT_MODEL.iterdir()}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with serve() as stub:
        stub.respond = partial(as_a_gated_repository, files, consent=consent)
        reach(stub, monkeypatch)
        diagnosis, hints = examined(TINY_TEXT, f"storage.root={tmp_path}", "policy.model=someone/model")
    huggingface_hub.close_session()
    assert not list(tmp_path.rglob("*.safetensors"))
    if not consent:
        assert set(hints) == {"model"}
        assert "hf auth login" in hints["model"]
    elif changes:
        assert set(hints) == {"model"}
        assert "20 ids" in hints["model"]
    else:
        assert hints == {}
        (weights,) = (each for each in diagnosis.findings if each.subject == "weights")
        wanted = loaded_files(files)
        size = sum(len(files[name]) for name in wanted) / 1e9
        assert f"downloads {size:.3g} GB in {len(wanted)} files " in weights.notes[0]
        assert str(tmp_path / "hub") in weights.notes[0]


class SilentHub(StreamRequestHandler):
    """Takes connections and closes them without an answer."""

    connections = 0

    def handle(self) -> None:
        type(self).connections += 1


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients would ask five more times for each file, and wait longer each time."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with TCPServer(("127.0.0.1", 0), SilentHub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        diagnosis, hints = examined(TINY_TEXT, f"storage.root={tmp_path}", "policy.model=nobody/nothing")
        server.shutdown()
    assert [each.healthy for each in diagnosis.findings if each.subject == "model"] == [False]
    assert (SilentHub.connections, set(hints)) == (1, {"model"})
    assert huggingface_hub.is_offline_mode()


def test_the_command_of_a_fitting_server_has_what_adapters_and_images_need(tmp_path: Path) -> None:
    served = ("rollout.engine=vllm", 'rollout.vllm={"url": "http://127.0.0.1:8001"}', f"storage.root={tmp_path}/runs")

    def options(file: Path, *overrides: str) -> dict[str, str]:
        (note,) = engine_notes(read_config(file, [*served, *overrides]))
        return dict(pairwise(shlex.split(note)))

    pixels = ('policy.lora={"rank": 9}', "policy.freeze_vision=true", "rollout.max_pixels=784")
    seeing = options(GROUNDING, *pixels)
    assert json.loads(seeing["--mm-processor-kwargs"]) == {"size": {"shortest_edge": 196, "longest_edge": 784}}
    assert "--enable-scale-out" in seeing
    assert (seeing["--max-lora-rank"], seeing["--port"]) == ("16", "8001")
    choices = {"tokens": TrainingChoice(LoraSettings(rank=64))}
    CausalLMPolicy.load(str(TEXT_MODEL), CausalLMSettings(), choices).save_weights(tmp_path / "adapter")
    # The rank is that of the adapter which training starts from.
    reading = options(TINY_TEXT, f"policy.adapter={tmp_path / 'adapter'}")
    assert reading["--max-lora-rank"] == "64"
    assert "--enable-lora" in reading
    assert "--enable-scale-out" not in reading


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
            assert f" samples: {outcome}" in f"{note}\n"

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


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, None),
        ({"update__learning_rate": 0.5}, "run.name"),
        ({"run__name": "new", "run__continue_from": "nothere"}, "run.continue_from"),
        ({"run__name": "new", "run__continue_from": "run@99"}, "run.continue_from"),
        ({"run__name": "new", "run__continue_from": "run"}, None),
    ],
)
def test_doctor_and_train_refuse_what_stored_runs_do_not_fit(
    finished: Runs, changes: dict[str, object], place: str | None
) -> None:
    name = str(changes.get("run__name", "run"))
    changed = {key: value for key, value in changes.items() if key != "run__name"}
    sets = finished.sets(name, **{"run__on_change": "refuse", **changed})
    diagnosed = CliRunner().invoke(application, ["doctor", str(TINY), *sets, "--json"])
    findings = json.loads(diagnosed.stdout.splitlines()[-1])["findings"]
    problems = [each["message"].partition(":")[0] for each in findings if not each["healthy"]]
    assert problems == ([] if place is None else [place])
    if place is not None:
        started = CliRunner().invoke(application, ["train", str(TINY), *sets])
        assert (started.exit_code, place in started.output) == (2, True)
