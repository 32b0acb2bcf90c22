"""Bad input through the command line: exit code 2, each problem once with place, value and hint, nothing written."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from flows.command_line.main import application
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT

TARGETS = REPOSITORY / "data" / "targets"


def refused(tmp_path: Path, *overrides: str, config: Path | str = TINY) -> list[str]:
    """The messages of `grpo train`, which must refuse and leave nothing behind."""
    sets = [part for override in (f"storage.root={tmp_path}/runs", *overrides) for part in ("--set", override)]
    result = CliRunner().invoke(application, ["train", str(config), *sets])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()
    messages = result.stderr.splitlines()
    assert all(message.startswith("error: ") and ": got " in message for message in messages), result.stderr
    assert "Traceback" not in result.stderr
    return messages


def only(messages: list[str], place: str, value: str, hint: str) -> None:
    (message,) = messages
    assert message.startswith(f"error: {place}"), message
    assert value in message
    assert hint in message


def prompt_file(folder: Path, content: str, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_text(content)
    return path


class TestPrompts:
    @pytest.mark.parametrize("content", ["", "\n\n  \n"])
    def test_empty_file(self, tmp_path: Path, content: str) -> None:
        path = prompt_file(tmp_path, content)
        messages = refused(tmp_path, f"data.prompts={path}", "data.targets=null", "data.target_column=null", *JPEG)
        only(messages, "data.prompts", str(path), "Put at least one prompt into")

    def test_missing_file(self, tmp_path: Path) -> None:
        messages = refused(tmp_path, "data.prompts=data/prompts/shapes_trian.jsonl")
        only(messages, "data.prompts", "shapes_trian.jsonl", "shapes_train.jsonl")

    def test_no_prompt_column(self, tmp_path: Path) -> None:
        path = prompt_file(tmp_path, '{"caption": "a cat"}\n', "prompts.jsonl")
        messages = refused(tmp_path, f"data.prompts={path}", "data.targets=null", "data.target_column=null", *JPEG)
        assert len(messages) == 1
        assert "caption" in messages[0]

    def test_heldout_prompts_are_named_as_such(self, tmp_path: Path) -> None:
        messages = refused(tmp_path, "evaluate.prompts=missing.txt")
        only(messages, "evaluate.prompts", "missing.txt", "There is no such file")


JPEG = ('rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]', "evaluate.prompts=null")


class TestTargets:
    def copied(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(TARGETS, tmp_path / "targets"))

    def test_not_a_image(self, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        (folder / "purple-cross-center-black.png").write_text("I am no image")
        messages = refused(tmp_path, f"data.targets={folder}")
        only(messages, "data.targets", "purple-cross-center-black.png", "Give a PNG")

    def test_truncated_image(self, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        path = folder / "purple-cross-center-black.png"
        path.write_bytes(path.read_bytes()[:60])
        only(refused(tmp_path, f"data.targets={folder}"), "data.targets", path.name, "not a whole image")

    def test_missing_image(self, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        (folder / "purple-cross-center-black.png").unlink()
        only(
            refused(tmp_path, f"data.targets={folder}"), "data.targets", "purple-cross-center-black.png", "no such file"
        )

    def test_numbers_that_do_not_pair(self, tmp_path: Path) -> None:
        folder = tmp_path / "two"
        folder.mkdir()
        for name in ("1.png", "2.png"):
            Image.new("RGB", (8, 8)).save(folder / name)
        messages = refused(tmp_path, f"data.targets={folder}", "data.target_column=null")
        only(messages, "data.targets", "2 images", "exactly one a prompt")

    def test_another_aspect_ratio_than_the_images(self, tmp_path: Path) -> None:
        data, heldout = refused(tmp_path, "rollout.height=32")
        for message, place in ((data, "data.targets"), (heldout, "evaluate.targets")):
            only([message], place, "64x64", "64x32")


class TestSettings:
    @pytest.mark.parametrize(
        ("override", "place", "value", "hint"),
        [
            # Near enough to the targets' aspect ratio, which would be told too.
            ("rollout.height=63", "rollout.", "63", "8"),
            ("rollout.group_size=1", "rollout.group_size", "1", "greater than or equal to 2"),
            ("policy.model=data/models/missing", "policy.model", "data/models/missing", "no such folder"),
            ("policy.model=data", "policy.model", "data", "folder"),
            ("rollout.grup_size=4", "rollout.grup_size", "4", "did you mean group_size?"),
            ("update.learning_rate=fast", "update.learning_rate", "'fast'", "number"),
            ("update.learning_rate=.nan", "update.learning_rate", "nan", "finite"),
            ("policy.lora.targets=nothing_like_it", "policy.lora.targets", "nothing_like_it", "layer names"),
            (
                'policy={"model": "data/models/tiny-glm-image", "dtype": "float32", "lora": null, "frozen": "x"}',
                "policy.frozen",
                "'x'",
                "matches no parameter",
            ),
            ("policy.lora.targets=(", "policy.lora.targets", "'('", "regular expression"),
            ("update.learning_rate=1e39", "update.learning_rate", "1e+39", "less than or equal to 1000"),
            ("update.micro_batch_size=0", "update.micro_batch_size", "0", "greater than or equal to 1"),
            ("placement.sharding=fsdp2", "placement.sharding", "fsdp2", "processes to 2"),
            ("placement.processes=100000", "placement.processes", "100000", "a core of its own"),
            ("update.optimizer=paged_adamw", "update.optimizer", "paged_adamw", "adamw"),
            ("rollout.top_p=1.5", "rollout.top_p", "1.5", "less than or equal to 1"),
            ("nonsense", "--set", "nonsense", "section.key=value"),
            ("run.name.first=x", "--set", "run.name.first=x", "not a section"),
            ("rewards.7.weight=1", "--set", "rewards.7.weight=1", "no index of a list of 2"),
            ("run.name=../up", "run.name", "../up", "the first a letter or digit"),
            ("placement.rollouts.pool=a b", "placement.rollouts.pool", "a b", "Letters, digits"),
            ("storage.root=nosuch://runs", "storage.root", "nosuch://runs", "URL of a known kind"),
            ("rewards.0.reward=sssim", "rewards.0", "sssim", "Did you mean ssim?"),
            ("update.minibatch_size=1000", "update.minibatch_size", "1000", "rows (rollout.prompts_per_iteration x"),
        ],
    )
    def test_one_message(self, tmp_path: Path, override: str, place: str, value: str, hint: str) -> None:
        only(refused(tmp_path, override), place, value, hint)

    def test_gpu_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        only(refused(tmp_path, "placement.device=cuda"), "placement.device", "cuda", "auto or cpu")

    def test_the_machine_of_a_placed_update_answers_for_itself(self, tmp_path: Path) -> None:
        placed = ("placement.update.pool=far", "update.optimizer=paged_adamw", "placement.processes=100000")
        only(refused(tmp_path, *placed), "placement.update.pool", "far", "grpo")

    def test_damaged_model_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(REPOSITORY / "data" / "models" / "tiny-glm-image", folder)
        (folder / "vae" / "config.json").write_text('{"block_out_channels": ')
        only(refused(tmp_path, f"policy.model={folder}"), "policy.model", str(folder), "config.json is damaged")

    def test_size_that_a_cached_hub_model_cannot_draw(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = tmp_path / "hub" / "models--someone--model" / "snapshots" / "abc"
        shutil.copytree(REPOSITORY / "data" / "models" / "tiny-glm-image", snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
        only(refused(tmp_path, "policy.model=someone/model", "rollout.height=63"), "rollout.", "63", "8")

    def test_lpips_without_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no-weights"))
        messages = refused(tmp_path, "rewards.0.reward=lpips")
        assert messages
        assert all("rewards.0" in message and "lpips" in message for message in messages)

    def test_wrong_key_in_the_file(self, tmp_path: Path) -> None:
        config = prompt_file(tmp_path, TINY.read_text().replace("kl_coef:", "kl_coeff:"), "mine.yaml")
        only(refused(tmp_path, config=config), "update.kl_coeff", "0.01", "did you mean kl_coef?")

    def test_missing_config(self, tmp_path: Path) -> None:
        only(
            refused(tmp_path, config="configs/tyni.yaml"),
            "CONFIG",
            "configs/tyni.yaml",
            "Did you mean configs/tiny.yaml",
        )

    def test_everything_wrong_is_told_at_once(self, tmp_path: Path) -> None:
        in_the_file = refused(tmp_path, "rollout.group_size=1", "update.clip=1", "run.seed=-1")
        assert len(in_the_file) == 3
        behind_the_file = refused(
            tmp_path, "data.prompts=missing.txt", "policy.model=./missing", "evaluate.targets=nowhere"
        )
        assert len(behind_the_file) == 3


@pytest.mark.parametrize("kind", ["below a file", "read-only"])
def test_unwritable_root(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "runs" if kind == "below a file" else Path("/proc/grpo-runs")
    result = CliRunner().invoke(application, ["train", str(TINY), "--set", f"storage.root={root}"])
    assert result.exit_code == 2, result.output
    only(result.stderr.splitlines(), "storage.root", str(root), "choose another")


def test_told_before_a_model_or_a_server(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom flows.command_line.main import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('prefect', 'diffusers', 'peft') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", script, "train", str(TINY), "--set", "data.prompts=missing.txt"]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    child = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 2, child.stderr
    assert child.stdout.strip() == "[]"
    assert child.stderr.count("error:") == 1
    assert not (tmp_path / "home").exists()
    # Libraries of the rewards are imported by now, which is most of it; a model or server would take several times it.
    assert time.perf_counter() - begun < 120


@pytest.mark.parametrize(
    ("override", "place", "hint"),
    [
        ("rewards.0.settings={column: nope}", "rewards.0.answer: got 'nope'", "it has answer, word"),
        ("rewards.0.settings={column: 3}", "rewards.answer.column: got 3", "name of a column"),
        ("policy.model=data/prompts", "policy.model: got 'data/prompts'", "config.json"),
        ("rollout.max_completion_length=4000", "rollout.max_completion_length: got 4000", "set it lower"),
        ("rewards=[{reward: jpeg}]", "rewards.0.reward: got 'jpeg'", "makes a text"),
        (
            "data={datasets: [{name: a, prompts: one.txt}, {name: b, prompts: two.txt}]}",
            "data.datasets.1.prompts: got 'two.txt'",
            "no such file",
        ),
    ],
)
def test_what_a_text_run_may_not_say(override: str, place: str, hint: str) -> None:
    result = CliRunner().invoke(application, ["train", str(TINY_TEXT), "--set", override])
    told = " ".join(result.output.split())
    assert result.exit_code == 2
    assert place in told
    assert hint in told


def test_a_model_without_its_weights_is_refused_before_the_run_is_touched(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "data" / "models" / "tiny-text", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    options = ["--set", f"policy.model={tmp_path / 'model'}", "--set", f"storage.root={tmp_path / 'runs'}"]
    result = CliRunner().invoke(application, ["train", str(TINY_TEXT), *options])
    assert result.exit_code == 2
    assert "holds no weights" in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()
