"""Samples of a run, of its exports and of a model, against the policy's own sampler."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops
from rich.console import Console

from configs.loader import read_config
from flows.export.export import export
from flows.export.plan import plan_export
from flows.requests import ExportRequest, SampleRequest
from flows.sample import Sample, check_output, open_source, sample
from flows.terminal.inspection import show_sample
from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.family import CausalLMFamily
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.records import GroupRequest
from grpo_core.seeds import derive_seed
from tasks.runs.stored import stored_config
from tests.flows.export.test_contents import HALVES, SHIPPED, both_halves, store_run
from tests.tiny_policies import MODEL as IMAGE_MODEL
from tests.tiny_policies import TEXT_MODEL, build_text_policy

PROMPTS = ("sort the letters of banana", "sort the letters of goga")


def samples(source: str | Path, prompts: tuple[str, ...] = PROMPTS, **options: Any) -> list[Sample]:
    request = SampleRequest(source=str(source), prompts=prompts, **options)
    return list(sample(request, open_source(request)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_run_and_its_exports_answer_alike(tmp_path: Path) -> None:
    policy = build_text_policy(CausalLMSettings(max_completion_length=24), disturbed=0.05)
    run = store_run(tmp_path, "run", policy, {}).folder
    expected = []
    for prompt in PROMPTS:
        seeds = [derive_seed(3, "tokens", number) for number in range(2)]
        expected += policy.decode(policy.sample_tokens([prompt], 2, seeds).actions)
    assert [each.text for each in samples(run, seed=3, samples=2)] == expected
    # A sample depends on nothing but its prompt, its index and the seed.
    assert [each.text for each in samples(run, PROMPTS[1:], seed=3)] == expected[2:3]
    for name, merged in (("adapter", False), ("merged", True)):
        folder = tmp_path / name
        export(plan_export(ExportRequest(run=str(run), folder=str(folder), merged=merged)))
        assert [each.text for each in samples(folder, seed=3, samples=2)] == expected


def test_a_model_answers_with_changed_settings() -> None:
    (answer,) = samples(TEXT_MODEL, PROMPTS[1:], overrides=("rollout.top_k=1", "rollout.max_completion_length=24"))
    assert (answer.text, answer.truncated) == ("aggo", False)
    (cut,) = samples(TEXT_MODEL, PROMPTS[1:], overrides=("rollout.top_k=1", "rollout.max_completion_length=2"))
    assert (cut.text, cut.truncated) == ("ag", True)
    console = Console(file=io.StringIO(), width=80)
    for each in (answer, cut):
        show_sample(each.prompt, each.text, each.file, console, truncated=each.truncated)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1::2] == ["aggo", "ag (truncated)"]


def test_adapters_of_both_halves_draw_alike_from_the_run_and_from_its_export(tmp_path: Path) -> None:
    policy = both_halves()
    run = store_run(tmp_path, "run", policy, {}, settings=HALVES).folder
    export(plan_export(ExportRequest(run=str(run), folder=str(tmp_path / "adapters"))))
    (group,) = policy.sample(
        [GroupRequest("a red circle", ("s",), (derive_seed(0, "tokens", 0),), (derive_seed(0, "noise", 0),))]
    )
    (expected,) = group.outputs
    assert isinstance(expected, Image.Image)
    for source, name in ((f"{run}@1", "run-v1"), (run, "run-v2"), (tmp_path / "adapters", "adapters")):
        (written,) = samples(source, ("a red circle",), out=str(tmp_path / "out"))
        assert written.file == str(tmp_path / "out" / f"{name}-01-a-red-circle-seed0-1.png")
        with Image.open(written.file) as image:
            assert ImageChops.difference(image, expected).getbbox() is None


SHOWN = ("evaluate.num_inference_steps=3", "evaluate.guidance_scale=2.5", "evaluate.height=96", "evaluate.width=64")


def disturbed_pipeline() -> DiffusersPolicy:
    model, file = SHIPPED[DiffusersPolicy]
    choice = {"denoising": TrainingChoice(LoraSettings(4, 8.0))}
    return DiffusersPolicy.load(str(model), read_config(file).rollout, choice)  # type: ignore[arg-type]


KINDS: dict[str, tuple[Callable[[], Policy], tuple[str, ...]]] = {
    "texts": (lambda: build_text_policy(CausalLMSettings(), disturbed=0.05), ()),
    "both halves": (both_halves, (*HALVES, *SHOWN)),
    "a pipeline": (disturbed_pipeline, SHOWN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_people_are_shown_what_the_evaluations_draw(kind: str, tmp_path: Path) -> None:
    """From the run and from its export, which says so in its lines of Python."""
    build, settings = KINDS[kind]
    run = store_run(tmp_path, "run", build(), {}, settings=settings)
    shown = stored_config(run.store).evaluation_rollout
    for setting in settings[len(settings) - len(SHOWN) :]:
        name, _, value = setting.removeprefix("evaluate.").partition("=")
        assert getattr(shown, name) == float(value)
    folder = tmp_path / "export"
    export(plan_export(ExportRequest(run=str(run.folder), folder=str(folder))))
    for source in (run.folder, folder):
        request = SampleRequest(source=str(source), prompts=("sort it",))
        assert open_source(request).config.rollout == shown
        if settings:
            changed = request.model_copy(update={"overrides": ("rollout.num_inference_steps=7",)})
            assert open_source(changed).config.rollout == shown.model_copy(update={"num_inference_steps": 7})
    with pytest.raises(InputError) as caught:
        open_source(SampleRequest(source=str(run.folder), prompts=("sort it",), overrides=("rollout.group_size=7",)))
    assert caught.value.place == "rollout.group_size"
    if settings:
        assert "height=96, width=64, num_inference_steps=3" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"source": "nothing"}, "RUN"),
        ({"source": f"{TEXT_MODEL}@best"}, "RUN"),
        ({"out": "somewhere"}, "--out"),
        ({"overrides": ("update.learning_rate=1",)}, "--set"),
        ({"overrides": ("rollout.temperature=-1",)}, "rollout.temperature"),
        ({"prompts": ("x" * 2000,)}, "prompt 1"),
        ({"source": str(IMAGE_MODEL)}, "rollout.height and width"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_the_model_loads(options: dict[str, Any], place: str) -> None:
    request = SampleRequest(**{"source": str(TEXT_MODEL), "prompts": PROMPTS, **options})
    with pytest.raises(InputError) as caught:
        check_output(request, open_source(request))
    assert caught.value.place == place


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"policy": {}}', '{"policy": {"model": "m"}, "rollout": null}'])
def test_a_damaged_record_of_an_export_is_refused(tmp_path: Path, record: str) -> None:
    for name, content in (("config.json", "{}"), ("grpo.json", record)):
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        open_source(SampleRequest(source=str(tmp_path), prompts=PROMPTS))
    assert (caught.value.place, caught.value.value) == ("RUN|MODEL", str(tmp_path / "grpo.json"))


def test_images_in_prompts_are_checked_and_given_to_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "a.png"
    Image.new("RGB", (5, 4)).save(image)

    def opened(prompt: str, *images: Path) -> Any:
        request = SampleRequest(source=str(TEXT_MODEL), prompts=(prompt,), images=tuple(map(str, images)))
        return open_source(request)

    with pytest.raises(InputError, match="does not see images"):
        opened("what?", image)
    sizes: list[Any] = []
    monkeypatch.setattr(CausalLMFamily, "refuse_prompts", lambda *given: sizes.append(given[-1]))
    source = opened("<image> or <image>?", image, image)
    assert [each.content for each in source.images] == [image.read_bytes()] * 2
    assert sizes == [[[(5, 4), (5, 4)]]]
    for prompt, images, place in (("<image>?", [image] * 2, "PROMPT"), ("what?", [tmp_path / "b.png"], "--image")):
        with pytest.raises(InputError) as caught:
            opened(prompt, *images)
        assert caught.value.place == place
    assert opened("a literal <image>").prompts == ("a literal <image>",)
