"""Bad input: every problem once, with place, value and hint, before anything is written or a model is imported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from configs.loader import check_config, read_config
from configs.schema import RunConfig
from flows.preflight.doctor import examine
from flows.preflight.inputs import check_inputs, run_checks
from flows.preflight.prompts import read_prompt_files
from flows.preflight.rewards import check_rewards, token_problems
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from tests.flows import conftest
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT

MODELS = REPOSITORY / "data" / "models"
JPEG = ('rewards=[{"reward": "jpeg", "settings": {"direction": "compressible"}}]', "evaluate.prompts=null")
NO_TARGETS = ("data.targets=null", "data.target_column=null", *JPEG)


def refused(tmp_path: Path, *overrides: str, config: Path | str = TINY) -> tuple[InputError, ...]:
    """The problems of a training run, which must leave nothing behind."""
    requested = [f"storage.root={tmp_path}/runs", *overrides]
    errors = conftest.refused(lambda: check_inputs(read_config(config, requested)))
    assert not (tmp_path / "runs").exists()
    assert all(error.hint for error in errors)
    return errors


def only(errors: tuple[InputError, ...], place: str, value: object) -> None:
    (error,) = errors
    assert error.place.startswith(place)
    assert str(value) in str(error.value)


def prompt_file(folder: Path, content: str, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def test_a_reward_against_a_source_needs_it_in_each_prompt_and_in_the_aspect_of_the_sample(tmp_path: Path) -> None:
    for name, size in (("square", (80, 80)), ("wide", (128, 64))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")

    def problems(images: list[list[str]], **settings: object) -> list[tuple[str, object]]:
        rows = [{"prompt": f"edit {row}", "images": each} for row, each in enumerate(images)]
        path = prompt_file(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "edits.jsonl")
        reward = json.dumps([{"reward": "mse", "settings": {"against": "source", **settings}}])
        given = (f"data.prompts={path}", "data.image_column=images", f"rewards={reward}", "evaluate.prompts=null")
        config = read_config(TINY, [*NO_TARGETS[:2], *given])
        return [(error.place, error.value) for error in check_rewards(config, read_prompt_files(config))]

    assert problems([["square.png"], ["square.png", "wide.png"]]) == []
    (other,) = problems([["square.png"], ["wide.png"], ["wide.png"]])
    assert other[0].startswith("rewards.0.mse, data, ")
    assert other[0].endswith("edits.jsonl, line 2, column images")
    assert other[1] == "image of 128x64 pixels"
    (missing,) = problems([["square.png"], []])
    assert missing[0].startswith("rewards.0.mse, data, prompt ")
    assert missing[1] == "0 images"
    ((_, fewer),) = problems([["square.png", "square.png"], ["square.png"]], source_index=1)
    assert fewer == "1 images"
    assert problems([[], []]) == [("rewards.0.mse", "mse")]


def test_an_image_generator_takes_the_users_text_of_a_conversation(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a red circle"}]}
    path = prompt_file(tmp_path, json.dumps(row) + "\n", "prompts.jsonl")
    config = read_config(TINY, (f"data.prompts={path}", *NO_TARGETS))
    assert [each.text for each in read_prompt_files(config).usable("data")[0].prompts] == ["a red circle"]


def opened(config: RunConfig) -> None:
    from flows.pipeline.run import start_run

    with start_run(config):
        pass


class TestPrompts:
    def test_a_file_that_cannot_be_used_is_named_with_its_section(self, tmp_path: Path) -> None:
        path = prompt_file(tmp_path, '{"subject": "a cat"}\n', "prompts.jsonl")
        only(refused(tmp_path, f"data.prompts={path}", *NO_TARGETS), "data.prompts", "columns subject")
        only(refused(tmp_path, "evaluate.prompts=missing.txt"), "evaluate.prompts", "missing.txt")

    def test_columns_that_do_not_go_along(self, tmp_path: Path) -> None:
        letters = "data/prompts/letters_train.jsonl"
        for override, place in (
            ("evaluate.columns=[wrod]", "evaluate.columns"),
            (f"data={{datasets: [{{name: a, prompts: {letters}, columns: [wrod]}}]}}", "data.datasets.0.columns"),
        ):
            only(refused(tmp_path, override, config=TINY_TEXT), place, "wrod")
        only(refused(tmp_path, "data.columns=[word]", config=TINY_TEXT), "rewards.0.answer", "answer")

    def test_what_a_person_should_know_of_them(self, tmp_path: Path) -> None:
        path = prompt_file(tmp_path, "\n".join(["Caption", *("x" * length for length in (4000, 4002, 4001))]), "a.csv")
        config = read_config(TINY, [f"storage.root={tmp_path}", f"data.prompts={path}", *NO_TARGETS])
        inputs, found = check_inputs(config), examine(config).findings
        column, long = inputs.notes
        assert column == f"data.prompts: {path}: the prompts are column Caption"
        assert "(row 2) has 4002 characters; 1 more have over 4000" in long
        assert [each.notes for each in found if each.subject == "prompts"] == [(column, long)]
        work, disk = (next(each.message for each in found if each.subject == name) for name in ("work", "disk"))
        assert inputs.ahead == (f"work: {work}", f"disk: {disk}")
        assert {column, long, *inputs.ahead} <= {*conftest.heard_of(lambda: opened(config))[1].lines}

    def test_heldout_prompts_that_are_trained_on_are_counted(self, tmp_path: Path) -> None:
        mine = prompt_file(tmp_path, "a cat\na dog\na cow\n", "mine.txt")
        other = prompt_file(tmp_path, "a dog\na bird\na cow\na hen\n", "other.txt")
        for heldout, expected in ((mine, ["3 of 3"]), (other, ["2 of 4"]), (None, [])):
            given = f"evaluate={{prompts: {heldout or 'null'}}}"
            notes = read_prompt_files(read_config(TINY, [*NO_TARGETS, f"data.prompts={mine}", given])).notes
            counts = [note.split()[1:4] for note in notes if note.startswith("evaluate: ")]
            assert [" ".join(each) for each in counts] == expected
        shipped = [read_prompt_files(read_config(file)).notes for file in (REPOSITORY / "configs").glob("*.yaml")]
        assert not [note for notes in shipped for note in notes if note.startswith("evaluate: ")]

    def test_the_first_and_the_last_prompt_are_shown_with_their_targets(self, tmp_path: Path) -> None:
        long = "a star with ten long rays in all the colours of the rainbow and nothing next to it"
        path = prompt_file(tmp_path, f"a red circle\na blue heart\na cross\n{long}\n")
        for index in range(4):
            Image.new("RGB", (64, 64)).save(tmp_path / f"{index}.png")
        targets = [f"data.prompts={path}", f"data.targets={tmp_path}", "data.target_column=null", *JPEG]
        config = read_config(TINY, [f"storage.root={tmp_path}/runs", *targets])
        shortened = "a star with ten long rays in all the col … d nothing next to it"
        pairs = f"data.targets: a red circle -> 0.png; {shortened} -> 3.png"
        assert check_inputs(config).notes == (pairs,)
        assert [each.notes for each in examine(config).findings if each.subject == "prompts"] == [(pairs,)]
        assert pairs in conftest.heard_of(lambda: opened(config))[1].lines

    def test_prompts_that_the_model_cannot_read_have_their_rows(self, tmp_path: Path) -> None:
        path = prompt_file(tmp_path, "a cat\na red <sop> circle")
        only(refused(tmp_path, f"data.prompts={path}", *NO_TARGETS), f"data.prompts: {path}, row 2", "<sop>")
        # One id each, of 4,096 with those of an image.
        rows = ["a cat", "red " * 4090, "a cow", f"a {'red ' * 4090}"]
        long = prompt_file(tmp_path, "\n".join(rows), "long.txt")
        given = (f"data.prompts={prompt_file(tmp_path, 'a')}", *NO_TARGETS, f"evaluate={{prompts: {long}}}")
        first, second = refused(tmp_path, *given)
        assert (first.place, second.place) == tuple(f"evaluate.prompts: {long}, row {row}" for row in (2, 4))
        rows = [json.dumps({"prompt": text, "answer": "a"}) for text in ("abc", "b" * 600)]
        text = prompt_file(tmp_path, "\n".join(rows), "text.jsonl")
        only(refused(tmp_path, f"data.prompts={text}", config=TINY_TEXT), f"data.prompts: {text}, row 2", "bbb")


class TestSizes:
    @pytest.mark.parametrize(
        ("changes", "place", "value"),
        [
            (["rollout.height=63"], "rollout.", "64x63"),
            (["data.width=96", "data.height=96"], "data.prompts: {file}, row 3", "100x64"),
            (["data.width=100", "data.height=64"], "data.width and height", "100x64"),
        ],
    )
    def test_what_the_model_cannot_generate(self, tmp_path: Path, changes: list[str], place: str, value: str) -> None:
        path = prompt_file(
            tmp_path, "prompt,size\na red circle,\na blue cross,64x96\na heart,100x64\na bird,100x64\n", "prompts.csv"
        )
        errors = refused(tmp_path, f"data.prompts={path}", *changes, *NO_TARGETS)
        only(errors, place.format(file=path), value)

    def test_a_file_with_another_size_in_each_row(self, tmp_path: Path) -> None:
        rows = "".join(f"a cat,{side}x64\n" for side in range(97, 104))
        path = prompt_file(tmp_path, f"prompt,size\n{rows}", "prompts.csv")
        *errors, last = refused(tmp_path, f"data.prompts={path}", *NO_TARGETS)
        assert [error.value for error in (*errors, last)] == [f"{side}x64" for side in range(97, 102)]
        assert last.hint.endswith("2 more sizes are refused.")

    @pytest.mark.parametrize("section", ["data", "evaluate"])
    def test_what_a_reward_cannot_score(self, tmp_path: Path, section: str) -> None:
        row = {"prompt": "a heart", "target": "blue-heart-center-white.png"}
        path = prompt_file(tmp_path, json.dumps([row, {**row, "size": "8x8"}]), "prompts.json")
        errors = refused(tmp_path, f"{section}.prompts={path}", 'rewards=[{"reward": "ssim"}]')
        only(errors, "rewards.0.reward", "ssim of 8x8 pixels")
        assert errors[0].hint.endswith(f"the size of {section}.prompts: {path}, row 2.")
        path.write_text(json.dumps([{**row, "kind": "large"}, {**row, "size": "8x8", "kind": "small"}]))
        meant = {"reward": "ssim", "where": {"kind": ["large"]}}
        (tmp_path / "all.json").write_text(json.dumps([{**row, "kind": "large"}]))
        both = {"data": tmp_path / "all.json", "evaluate": tmp_path / "all.json", section: path}
        files = [f"{part}.prompts={file}" for part, file in both.items()]
        run_checks(read_config(TINY, [*files, f"rewards={json.dumps([meant])}"]))

    def test_a_row_that_a_reward_cannot_score_with(self, tmp_path: Path) -> None:
        boxes = [[0, 0, 4, 4], [4, 0, 0, 4], None, *([[4, 0, 0, 4]] * 6)]
        path = prompt_file(tmp_path, json.dumps([{"prompt": "where?", "box": box} for box in boxes]), "prompts.json")
        rewards = 'rewards=[{"reward": "box_iou"}]'
        errors = refused(tmp_path, f"evaluate.prompts={path}", f"data.prompts={path}", rewards, config=TINY_TEXT)
        assert [(error.place, error.value) for error in errors] == [
            (f"data.prompts: {path}, row {row}, column box", [4, 0, 0, 4]) for row in (2, 4, 5, 6, 7)
        ]
        # Two more of the training prompts, and seven held-out ones.
        assert errors[-1].hint.endswith("9 more rows are refused.")


class TestTargets:
    def test_another_aspect_ratio_than_the_images(self, tmp_path: Path) -> None:
        data, heldout = refused(tmp_path, "rollout.height=32")
        for error, place in ((data, "data.targets"), (heldout, "evaluate.targets")):
            only((error,), place, "64x64")


FROZEN = 'policy={"model": "data/models/tiny-glm-image", "dtype": "float32", "lora": null, "frozen": "x"}'
TWO_FILES = "data={datasets: [{name: a, prompts: one.txt}, {name: b, prompts: two.txt}]}"


class TestSettings:
    def test_a_loss_of_ones_own_that_cannot_be_imported(self, tmp_path: Path) -> None:
        only(refused(tmp_path, "update.loss=no_such_module:loss"), "update.loss", "no_such_module:loss")
        streams = refused(tmp_path, 'update.denoising.loss="math:pi"', config="configs/tiny_both.yaml")
        only(streams, "update.denoising.loss", "math:pi")

    def test_prompts_whose_decoder_makes_unequal_passes_in_processes_of_sharded_weights(self, tmp_path: Path) -> None:
        sources = REPOSITORY / "data" / "prompts" / "sources"
        copied = (Path(shutil.copy(each, tmp_path)) for each in sorted(sources.glob("*.png"))[:2])
        first, second = ([each.name] for each in copied)
        data = f"data={{prompts: {tmp_path}/prompts.jsonl, image_column: images}}"

        def problems(*images: list[str], train: str) -> list[object]:
            rows = [{"prompt": f"edit {row}", "images": each} for row, each in enumerate(images)]
            prompt_file(tmp_path, "\n".join(map(json.dumps, rows)), "prompts.jsonl")
            settings = ("placement={devices: [cpu, cpu], sharding: fsdp2}", f"policy.train=[{train}]")
            fitting = ("rollout.sde_window_range=[0, 2]", "update.clip_range=1e-4", "rewards=[{reward: jpeg}]")
            found = refused(tmp_path, data, *settings, *fitting, config="configs/tiny_edit.yaml")
            assert "update.micro_batch_size" in [error.place for error in found] or train == "tokens"
            return [error.value for error in found if error.place == "placement.sharding"]

        assert problems(first, [*first, *second], train="denoising") == ["fsdp2"]
        assert problems(first, second, train="denoising") == problems(first, [], train="tokens") == []

    @pytest.mark.parametrize(
        ("override", "place", "value"),
        [
            ("policy.model=data/models/missing", "policy.model", "data/models/missing"),
            ("policy.model=data", "policy.model", "data"),
            ("policy.lora.targets=nothing_like_it", "policy.lora.targets", "nothing_like_it"),
            (FROZEN, "policy.frozen", "x"),
            ("policy.lora.targets=(", "policy.lora.targets", "("),
            ("placement.sharding=fsdp2", "placement.sharding", "fsdp2"),
            ("placement.devices=[0, 99]", "placement.devices", "[0, 99]"),
            ("update.optimizer=paged_adamw", "update.optimizer", "paged_adamw"),
            ("storage.root=nosuch://runs", "storage.root", "nosuch://runs"),
        ],
    )
    def test_each_has_its_place_and_hint(self, tmp_path: Path, override: str, place: str, value: str) -> None:
        only(refused(tmp_path, override), place, value)

    @pytest.mark.parametrize(
        ("override", "place", "value"),
        [
            ("rewards.0.settings={column: nope}", "rewards.0.answer", "nope"),
            ("rewards.0.settings={column: 3}", "rewards.0", "3"),
            ("policy.model=data/prompts", "policy.model", "data/prompts"),
            ("rollout.max_completion_length=4000", "rollout.max_completion_length", "4000"),
        ],
    )
    def test_those_of_a_text_run(self, tmp_path: Path, override: str, place: str, value: str) -> None:
        # Training and held-out prompts may both lack a column.
        for error in refused(tmp_path, override, config=TINY_TEXT):
            only((error,), place, value)

    def test_the_machine_of_a_placed_update_is_not_checked_here(self, tmp_path: Path) -> None:
        placed = ("placement.update.pool=far", "update.optimizer=paged_adamw")
        only(refused(tmp_path, *placed), "placement.update.pool", "far")

    @pytest.mark.parametrize(
        ("name", "config", "file"), [("tiny-glm-image", TINY, "vae/config.json"), ("tiny-text", TINY_TEXT, "")]
    )
    def test_a_damaged_model_folder(self, tmp_path: Path, name: str, config: Path, file: str) -> None:
        folder = Path(shutil.copytree(MODELS / name, tmp_path / "model"))
        if file:
            (folder / file).write_text('{"block_out_channels": ')
        else:
            (folder / "model.safetensors").unlink()
        only(refused(tmp_path, f"policy.model={folder}", config=config), "policy.model", str(folder))

    def test_a_size_that_a_cached_hub_model_cannot_draw(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = tmp_path / "hub" / "models--someone--model" / "snapshots" / "abc"
        shutil.copytree(MODELS / "tiny-glm-image", snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
        only(refused(tmp_path, "policy.model=someone/model", "rollout.height=63"), "rollout.", "63")

    def test_everything_wrong_is_reported_together(self, tmp_path: Path) -> None:
        files = ("data.prompts=missing.txt", "policy.model=./missing", "evaluate.targets=nowhere")
        assert len(refused(tmp_path, *files)) == 3
        several = refused(tmp_path, TWO_FILES, config=TINY_TEXT)
        assert [error.place for error in several] == ["data.datasets.0.prompts", "data.datasets.1.prompts"]


def test_each_prompt_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.preflight import prompts

    read: list[str] = []
    real = prompts.read_prompts

    def counted(file: str, **options: object) -> object:
        read.append(file)
        return real(file, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(prompts, "read_prompts", counted)
    config = read_config(TINY_TEXT, [f"storage.root={tmp_path}/runs"])
    check_inputs(config)
    opened(config)
    assert sorted(read) == sorted(filter(None, [config.data.prompts, config.evaluate.prompts]))


def test_settings_of_a_stored_adapter_are_refused_as_those_of_the_configuration_are(tmp_path: Path) -> None:
    model = str(REPOSITORY / "data" / "models" / "tiny-text")
    stored = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["norm"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**stored, "base_model_name_or_path": model}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    adapter = (f"policy.adapter={tmp_path}", "policy.lora=null", f"policy.model={model}", "policy.dtype=bfloat16")
    problems = refused(tmp_path, *adapter, config=TINY_TEXT)
    only(problems, "policy.lora.modules_to_save", "norm")


@pytest.mark.parametrize(
    ("kind", "parameter", "places"),
    [
        ("diffusers", "completion_ids", ["mine"]),
        ("diffusers", "completion_ids=None", []),
        ("glm_image", "completion_ids", []),
    ],
)
def test_a_reward_that_needs_ids_is_refused_where_none_are_sampled(
    tmp_path: Path, kind: str, parameter: str, places: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def score(completions, {parameter}, **columns): return []\n")
    rewards = [{"reward": "function", "name": "mine", "settings": {"function": f"{tmp_path}/mine.py:score"}}]
    config = read_config(
        f"configs/{'tiny' if kind == 'glm_image' else 'tiny_sd3'}.yaml", [f"rewards={json.dumps(rewards)}"]
    )
    (section,) = config.rewards
    found = list(token_problems(config, section, build_reward(section.reward, section.settings), section.label))
    assert [error.place for error in found] == places
    assert all("parameter a default" in error.hint for error in found)


def test_a_share_of_the_prompts_is_held_out(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, "abc\ndba\ncab\nbad\nabc\n")
    function = json.dumps([{"reward": "function", "settings": {"function": "data/sums/reward.py:right_sum"}}])
    given = ("evaluate={share: 0.5, samples_per_prompt: 2}", f"rewards={function}", f"data={{prompts: {path}}}")
    config = read_config(TINY_TEXT, [f"storage.root={tmp_path}/runs", *given])
    files = read_prompt_files(config)
    ((training,), (heldout,)) = (files.usable(part) for part in ("data", "evaluate"))
    assert files.problems == ()
    assert len({each.text for each in heldout.prompts}) == 2
    assert len(training.prompts) + len(heldout.prompts) == 5
    assert {each.text for each in training.prompts}.isdisjoint(each.text for each in heldout.prompts)
    # What is stored names the prompts too, and is read as it was.
    assert check_config(config.model_dump(mode="json")) == config
    single = prompt_file(tmp_path, "abc\nabc\n", "single.txt")
    only(refused(tmp_path, *given[:2], f"data={{prompts: {single}}}", config=TINY_TEXT), "evaluate.share", 0.5)
    other = "data/prompts/letters_heldout.jsonl"
    only(refused(tmp_path, f"evaluate={{share: 0.5, prompts: {other}}}", config=TINY_TEXT), "evaluate.share", 0.5)
