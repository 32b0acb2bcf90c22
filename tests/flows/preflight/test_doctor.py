"""`grpo doctor`: what it finds, the memory it estimates for shipped files, and that it changes nothing."""

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    MambaConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.preflight.doctor import TRIED, UNTRIED, examine
from flows.preflight.engine import engine_notes
from flows.preflight.inputs import CHECKS, check_inputs
from flows.preflight.measured import PhaseCosts, measure_run
from flows.preflight.model import trained_model
from flows.preflight.prompts import read_prompt_files
from grpo_core.errors import InputError
from grpo_core.hub import loaded_files
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rewards.reward import Score
from grpo_core.rewards.text.rules import AnswerReward
from tasks.models.resident import load_policy
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT, Runs, Start, refused
from tests.flows.preflight.conftest import examined
from tests.grpo_core.rewards.stub import as_a_gated_repository, reach, serve
from tests.tiny_policies import TEXT_MODEL

GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
pytestmark = pytest.mark.usefixtures("bare_machine")


JPEG = 'rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]'


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
    (tmp_path / "rare.txt").write_text("a cat \U00010384\U00010385\neine Straße, кот, قطة\n")
    plain = ("data.targets=null", "data.target_column=null", "rewards=[{reward: sharpness}]")
    diagnosis, _ = examined(TINY, f"storage.root={tmp_path}", f"data.prompts={tmp_path}/rare.txt", *plain)
    (found,) = (each for each in diagnosis.findings if each.subject == "fonts")
    assert (found.healthy, bool(found.hint), "2 letters (Ugaritic)" in found.message) == (True, True, True)


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
    diagnosis = examine(config, load=True)
    (trial,) = (each for each in diagnosis.findings if each.subject == "trial")
    assert (trial.healthy, "log-probs within" in trial.message) == (True, True)
    assert diagnosis.loaded is not None
    assert [(each.phase, each.allocated) for each in diagnosis.loaded.phases] == [
        ("sampling", None),
        ("tokens update", None),
    ]
    (parity,) = diagnosis.loaded.parity
    # A cache and one pass round differently.
    assert 0 < parity.mean < parity.most < 1e-5 < parity.allowed.mean_difference
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


def test_every_reward_scores_a_little_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a network can be loaded, or a server answers, is seen before a run; no model is loaded after a fault."""
    config = read_config(TINY_TEXT, (f"storage.root={tmp_path}/runs",))
    monkeypatch.setattr(AnswerReward, "score", lambda self, batch: [Score(None, None, "no weights")] * len(batch))
    (rewards,) = (each for each in examine(config).findings if each.subject == "rewards")
    assert rewards.healthy
    diagnosis = examine(config, load=True)
    (rewards,) = (each for each in diagnosis.findings if each.subject == "rewards")
    assert (rewards.healthy, "rewards.0.answer: got 'no weights'" in rewards.message) == (False, True)
    assert diagnosis.loaded is None


def test_what_a_loaded_model_takes_is_measured_without_a_change_of_it() -> None:
    """Both components are updated, by a learning rate of 0."""
    config = read_config(REPOSITORY / "configs" / "tiny_both.yaml", ("rollout.prompts_per_batch=1",))
    policy = load_policy(trained_model(config), config.rollout, torch.device("cpu"))
    before = {
        (stream, name): value.clone()
        for stream, component in policy.components.items()
        for name, value in component.trainable_parameters().items()
    }
    measured = measure_run(config, read_prompt_files(config), policy, torch.device("cpu"))
    assert [*measured.costs.seconds] == ["sampling", "decoding", "tokens update", "denoising update"]
    assert all(
        torch.equal(before[stream, name], value)
        for stream, component in policy.components.items()
        for name, value in component.trainable_parameters().items()
    )
    assert {each.stream: each.most > each.allowed.max_difference for each in measured.parity} == {
        "tokens": False,
        "denoising": False,
    }


def test_a_phase_without_room_names_what_to_lower() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    costs = PhaseCosts(torch.device("cpu"))
    with pytest.raises(InputError, match=r"too small \(sample tokens\)") as caught:
        costs.during("decoding", costs.during, "sampling", work)
    assert (caught.value.place, caught.value.value) == ("rollout.prompts_per_batch", "CUDA out of memory")


def test_seconds_of_a_phase_are_without_those_of_one_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    costs = PhaseCosts(torch.device("cpu"))
    costs.during("decoding", lambda: costs.during("sampling", lambda: None))
    assert (costs.seconds, costs.peaks) == ({"sampling": 3.0, "decoding": 6.0}, {})


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


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, None),
        ({"update__learning_rate": 0.5}, "run.name"),
        ({"run__name": "new", "run__continue_from": "run@99"}, "run.continue_from"),
        ({"run__name": "new", "run__continue_from": "run"}, None),
    ],
)
def test_doctor_and_train_refuse_what_stored_runs_do_not_fit(
    undisturbed: tuple[Runs, Start], changes: dict[str, object], place: str | None
) -> None:
    others = {key: value for key, value in changes.items() if key != "run__name"}
    sets = undisturbed[0].sets(str(changes.get("run__name", "run")), **{"run__on_change": "refuse", **others})
    diagnosed = CliRunner().invoke(application, ["doctor", str(TINY), *sets, "--json"])
    findings = json.loads(diagnosed.stdout.splitlines()[-1])["findings"]
    problems = [each["message"].partition(":")[0] for each in findings if not each["healthy"]]
    assert problems == ([] if place is None else [place])
    if place is not None:
        started = CliRunner().invoke(application, ["train", str(TINY), *sets])
        assert (started.exit_code, place in started.output) == (2, True)
