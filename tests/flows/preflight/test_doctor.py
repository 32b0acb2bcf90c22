"""`grpo doctor`: what it finds, the memory it estimates for shipped files, and that it changes nothing."""

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread
from types import SimpleNamespace

import huggingface_hub
import pytest
from transformers import MambaConfig, PhimoeConfig, PreTrainedConfig
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.preflight.doctor import Diagnosis, examine
from flows.preflight.engine import engine_notes
from flows.preflight.inputs import CHECKS, check_inputs
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT, refused
from tests.tiny_policies import TEXT_MODEL

GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
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
    assert not any("exact GiB" in table.rows[0] for table in examine(read_config(TINY)).report().tables if table.rows)
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
    assert "hf download zai-org/GLM-Image" in hints.pop("weights")
    assert hints == {}
    assert diagnosis.memory is not None
    assert 40 < diagnosis.memory.needed / 2**30 < 80


def test_an_unknown_tracker_is_a_problem_of_its_own(tmp_path: Path) -> None:
    _, hints = examined(TINY, f"storage.root={tmp_path}", "run.trackers=[tensorbord]")
    assert set(hints) == {"trackers"}


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


def test_a_prompt_that_the_model_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "sort the letters of goga" * 999, "answer": "aggo", "word": "goga"}))
    hints = examined(TINY_TEXT, f"storage.root={tmp_path}", f"data.prompts={path}")[1]
    assert "max_completion_length" in hints["model"]


def test_each_problem_has_a_subject_and_a_hint(tmp_path: Path) -> None:
    wrong = ["data.prompts=missing.txt", "placement.devices=cuda", "storage.root=nosuch://runs"]
    sets = [part for override in wrong for part in ("--set", override)]
    result = CliRunner().invoke(application, ["doctor", str(TINY), *sets, "--json"])
    assert result.exit_code == 2
    findings = [each for each in json.loads(result.stdout.splitlines()[-1])["findings"] if not each["healthy"]]
    assert {each["subject"] for each in findings} == {"prompts", "device", "storage", "memory"}
    assert all(each["hint"] in " ".join(result.stderr.split()) for each in findings)


def text_model(folder: Path, config: PreTrainedConfig) -> tuple[str, ...]:
    """Overrides for a run of this model with adapters; its weights are never opened."""
    shutil.copytree(TEXT_MODEL, folder / "model")
    config.save_pretrained(folder / "model")
    return (f"policy.model={folder}/model", f"storage.root={folder}/runs", "policy.lora={rank: 2}")


def test_doctor_and_train_refuse_a_model_alike(tmp_path: Path) -> None:
    overrides = text_model(tmp_path, MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=288))
    diagnosis, hints = examined(TINY_TEXT, *overrides)
    (error,) = refused(lambda: check_inputs(read_config(TINY_TEXT, overrides)))
    assert [each.hint for each in diagnosis.findings if each.subject == "model"] == [error.hint] == [hints["model"]]
    assert "A mamba model cannot be trained here: it gives no cache" in error.hint


def test_what_adapters_leave_out_is_said(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 288}
    overrides = text_model(tmp_path, PhimoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    diagnosis, _ = examined(TINY_TEXT, *overrides)
    notes = check_inputs(read_config(TINY_TEXT, overrides)).notes
    assert [each.notes for each in diagnosis.findings if each.subject == "model"] == [notes]
    assert "model.layers.*.mlp.router.weight" in notes[0]


def test_a_subject_with_a_problem_has_no_other_verdict(tmp_path: Path) -> None:
    """Of a hub name nothing is known until its size is estimated."""
    diagnosis, hints = examined(TINY_TEXT, f"storage.root={tmp_path}", "policy.model=nobody/nothing")
    assert [each.healthy for each in diagnosis.findings if each.subject == "model"] == [False]
    assert set(hints) == {"model"}


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
        _, hints = examined(TINY_TEXT, f"storage.root={tmp_path}", "policy.model=nobody/nothing")
        server.shutdown()
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
def words(images, **columns):
    return ["red", "blue"]

def breaks(completions, **columns):
    raise KeyError("answer")

def counted(completions, completion_ids, prompts, **columns):
    assert len(completions) == len(completion_ids) == len(prompts) == 2 and prompts[0] == prompts[1]
    return [len(columns), float("nan")]

def light(images, targets, **columns):
    return [image.getextrema()[0][0] if image.size == target.size else 0 for image, target in zip(images, targets)]
"""


def test_a_function_is_called_once_and_refused_as_training_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)

    def trial(config: Path, function: str, **scope: object) -> tuple[Diagnosis, str]:
        """Everything that is said about this reward."""
        settings = {"function": f"{tmp_path}/own.py:{function}", "with_targets": function == "light"}
        rewards = json.dumps([{"reward": "function", "settings": settings, **scope}])
        diagnosis, _ = examined(config, f"storage.root={tmp_path}", f"rewards={rewards}")
        own = [each for each in diagnosis.findings if each.subject == "rewards"]
        return diagnosis, "\n".join(line for each in own for line in (each.message, each.hint, *each.notes))

    for config, function, problem in (
        (TINY, "words", "own.py:2, sample blank sample 1: got 'red'"),
        (TINY_TEXT, "breaks", "own.py:6: got \"KeyError: 'answer'\""),
    ):
        diagnosis, printed = trial(config, function)
        assert problem in printed
        assert not diagnosis.healthy
    # White images of the target's size; the two columns of each prompt, and the three hooks of TRL.
    assert trial(TINY, "light")[1] == "ready: light\n\nlight: called with two blank samples: 255.000"
    counted = trial(TINY_TEXT, "counted")[1]
    assert "called with two blank samples: 5.000, the reward is nan" in counted
    waiting, printed = trial(TINY_TEXT, "breaks", where={"word": ["none of them"]})
    assert printed.startswith("loads; not called yet: breaks\n")
    assert waiting.healthy
