"""Exports, loaded by diffusers, transformers and peft alone, against the policy that was stored."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from peft import PeftModel
from PIL import Image, ImageChops
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.loader import read_config
from flows.export.export import export
from flows.export.plan import plan_export
from flows.export.usage import TEXT_PROMPT
from flows.requests import ExportRequest, SampleRequest
from flows.sample import open_source, sample
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.glm_image.decoding import large_grid_ids
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.trained.settings import ADAPTER_FILE, LoraSettings, TrainingChoice
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import STREAMS
from grpo_core.seeds import derive_seed, make_generator
from tasks.storage.artifacts.commit import delete_files
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tasks.verification.card import verification_file
from tasks.verification.records import VerificationReport
from tests.flows.conftest import flip, refused
from tests.flows.export.test_contents import HALVES, SHIPPED, both_halves, store_run
from tests.flows.export.test_evaluated import DIFFERS, verified
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tiny_policies import TEXT_MODEL, TEXT_PROMPTS, build_policy, build_text_policy, render

# peft reads an attribute of transformers by its previous name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

GREEDY = CausalLMSettings(max_completion_length=24, top_k=1)
FULL = TrainingChoice(lora=None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def adapted(root: Path) -> CausalLMPolicy:
    """An adapter of the text model, stored as the run `adapted` whose version 1 is the best."""
    policy = build_text_policy(GREEDY, disturbed=0.05)
    store_run(root, "adapted", policy, {0: 0.0, 1: 0.4, 2: 0.2})
    return policy


@pytest.fixture(scope="module")
def full(root: Path) -> CausalLMPolicy:
    """All weights of the text model, stored as the run `full`, which was not evaluated."""
    policy = build_text_policy(GREEDY, choice=FULL, disturbed=0.01)
    store_run(root, "full", policy, {}, lora=False)
    return policy


@pytest.fixture(scope="module")
def drawing(root: Path, shipped_pipeline: GlmImagePipeline) -> GlmImagePolicy:
    """An adapter of the image model, stored as the run `drawing`."""
    policy = build_policy(shipped_pipeline, disturbed=0.05)
    store_run(root, "drawing", policy, {})
    return policy


@pytest.fixture(scope="module")
def painting(root: Path) -> GlmImagePolicy:
    """An adapter of each half of the image model, stored as the run `painting`."""
    policy = both_halves()
    store_run(root, "painting", policy, {}, settings=HALVES)
    return policy


def exported(root: Path, run: str, folder: Path, **options: Any) -> Path:
    export(plan_export(ExportRequest(run=run, folder=str(folder), root=str(root), **options)))
    return folder


def run_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the lines of Python in an export's README.md, in the folder that it is in, and return what they define."""
    monkeypatch.chdir(folder.parent)
    (code,) = re.findall(r"```python\n(.+?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    defined: dict[str, Any] = {}
    exec(code, defined)
    return defined


@torch.no_grad()
def test_the_adapter_gives_our_logprobs_in_plain_peft(root: Path, adapted: CausalLMPolicy, tmp_path: Path) -> None:
    folder = exported(root, "adapted@best", tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TEXT_MODEL), str(folder))
    tokens = adapted.sample_tokens(TEXT_PROMPTS[:1], 1, [3]).actions
    prompt = adapted.encode(TEXT_PROMPTS[:1]).input_ids
    logits = model(torch.cat([prompt, tokens.token_ids], 1)).logits[:, prompt.shape[1] - 1 : -1]
    plain = logits.log_softmax(-1).gather(-1, tokens.token_ids[..., None])[..., 0]
    ours = build_text_policy(CausalLMSettings(max_completion_length=24))
    ours.load_weights(folder)
    unrestricted = tokens.__class__(tokens.prompts, tokens.token_ids, tokens.loss_mask, 1.0, None)
    scored = ours.logprobs(unrestricted).logprobs
    torch.testing.assert_close(plain[tokens.loss_mask], scored[tokens.loss_mask], atol=1e-5, rtol=0)
    with safe_open(folder / ADAPTER_FILE, "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    card = (folder / "README.md").read_text()
    assert "# adapted, version 1\n" in card
    assert "| reward | 0.500 (0.272 to 0.695) | 0.900 (0.672 to 1.095) |" in card


@pytest.mark.usefixtures("full")
def test_a_stored_verification_goes_along(root: Path, tmp_path: Path) -> None:
    report = verified(run="full", stages=(DIFFERS,))
    content = dump_checked(report.model_dump(mode="json"))
    ArtifactStore(str(root), "full").write_file(verification_file("full"), content, shared=True)
    folder = exported(root, "full", tmp_path / "full")
    written = load_checked((folder / "verification.json").read_bytes())
    assert VerificationReport.model_validate(written) == report
    assert "It found differences: 1 stage" in (folder / "README.md").read_text()
    # It was not evaluated.
    assert not (folder / "evaluation.json").exists()


@pytest.mark.parametrize(("run", "options"), [("adapted", {}), ("adapted", {"merged": True}), ("full", {})])
def test_the_lines_of_the_card_answer_as_the_policy(
    run: str,
    options: dict[str, Any],
    root: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy: CausalLMPolicy = request.getfixturevalue(run)
    (answer,) = policy.decode(policy.sample_tokens([TEXT_PROMPT], 1, [0]).actions)
    folder = exported(root, run, tmp_path / "exported", **options)
    run_card(folder, monkeypatch)
    assert capsys.readouterr().out == f"{answer}\n"
    if run == "full" or options:
        assert AutoTokenizer.from_pretrained(folder).chat_template == policy.tokenizer.chat_template


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that diffusers copies the processor's code to."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def same(first: Image.Image, second: Image.Image) -> bool:
    return ImageChops.difference(first, second).getbbox() is None


@torch.no_grad()
@pytest.mark.usefixtures("modules")
def test_the_merged_pipeline_draws_our_pixels(
    root: Path, drawing: GlmImagePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(root, "drawing", tmp_path / "merged", merged=True)
    pipe = GlmImagePipeline.from_pretrained(folder, trust_remote_code=True)
    pipe.set_progress_bar_config(disable=True)
    prompt, seeds, settings = "a red circle", [5, 6], drawing.settings
    tokens = drawing.tokens.sample([prompt], 2, seeds).actions
    prior = large_grid_ids(tokens.token_ids, tokens.loss_mask, drawing.tokens.grids)
    drawn = pipe(
        [prompt] * 2,
        height=settings.height,
        width=settings.width,
        prior_token_ids=prior,
        generator=[make_generator(seed) for seed in seeds],
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
    ).images
    ours = render(drawing, tokens, seeds)
    assert all(
        same(first, second) for first, second in zip(drawn, ours, strict=True) if isinstance(second, Image.Image)
    )
    assert len(drawn) == len(ours) == 2
    merged = drawing.tokens._score(pipe.vision_language_encoder, tokens, entropy="none").logprobs
    torch.testing.assert_close(merged, drawing.tokens.logprobs(tokens).logprobs, atol=2e-5, rtol=0)
    run_card(folder, monkeypatch)
    with Image.open(folder.parent / "image.png") as image:
        assert image.size == (64, 64)


@torch.no_grad()
def test_the_image_adapter_gives_our_logprobs_in_plain_peft(
    root: Path, drawing: GlmImagePolicy, shipped_pipeline: GlmImagePipeline, tmp_path: Path
) -> None:
    folder = exported(root, "drawing", tmp_path / "adapter")
    base = build_policy(shipped_pipeline, lora=None).tokens.pipeline.vision_language_encoder
    tokens = drawing.tokens.sample(["a red circle"], 2, [1, 2]).actions
    plain = drawing.tokens._score(PeftModel.from_pretrained(base, str(folder)), tokens, entropy="none")
    assert torch.equal(plain.logprobs, drawing.tokens.logprobs(tokens).logprobs)


@torch.no_grad()
@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    "merged", [pytest.param(False, id="adapters"), pytest.param(True, id="merged", marks=pytest.mark.slow)]
)
def test_the_lines_of_the_card_load_both_halves(
    merged: bool, root: Path, painting: GlmImagePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(root, "painting", tmp_path / "both", merged=merged)
    pipe = run_card(folder, monkeypatch)["pipe"]
    tokens = painting.tokens.sample(["a red circle"], 2, [1, 2]).actions
    theirs = painting.tokens._score(pipe.vision_language_encoder, tokens, entropy="none").logprobs
    torch.testing.assert_close(theirs, painting.tokens.logprobs(tokens).logprobs, atol=2e-5, rtol=0)
    prior = large_grid_ids(tokens.token_ids, tokens.loss_mask, painting.tokens.grids)

    def drawn(pipeline: GlmImagePipeline) -> Tensor:
        noise = [make_generator(seed) for seed in (5, 6)]
        call = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 1.5, "output_type": "latent"}
        found: Tensor = pipeline(["a red circle"] * 2, prior_token_ids=prior, generator=noise, **call).images
        return found

    ours = drawn(painting.decoder.pipeline)
    torch.testing.assert_close(drawn(pipe), ours, atol=1e-5 if merged else 0, rtol=0)
    with painting.decoder.trained.reference():
        assert not torch.allclose(drawn(painting.decoder.pipeline), ours, atol=1e-2)
    expected = set() if merged else {"tokens", "denoising"}
    assert {path.name for path in folder.iterdir() if path.name in STREAMS} == expected


@torch.no_grad()
@pytest.mark.parametrize(
    "merged", [pytest.param(False, id="adapter", marks=pytest.mark.slow), pytest.param(True, id="merged")]
)
def test_the_lines_of_the_card_draw_with_any_pipeline(
    merged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `grpo sample` draws from the export."""
    model, file = SHIPPED[DiffusersPolicy]
    settings = read_config(file).rollout
    choice = {"denoising": TrainingChoice(LoraSettings(4, 8.0))}
    policy = DiffusersPolicy.load(str(model), settings, choice)  # type: ignore[arg-type]
    disturb(policy.denoising.trainable_parameters(), 0.05)
    store_run(tmp_path / "runs", "steps", policy, {})
    folder = exported(tmp_path / "runs", "steps", tmp_path / "steps", merged=merged)
    pipe = run_card(folder, monkeypatch)["pipe"]
    call = policy.denoising.call_arguments(["a red circle"], None, policy.settings.size)

    def drawn(pipeline: Any) -> Tensor:
        noise = make_generator(5)
        found: Tensor = pipeline(**call, num_inference_steps=8, generator=noise, output_type="latent").images
        return found

    ours = drawn(policy.denoising.pipeline)
    torch.testing.assert_close(drawn(pipe), ours, atol=1e-5 if merged else 0, rtol=0)
    with policy.denoising.trained.reference():
        assert not torch.allclose(drawn(policy.denoising.pipeline), ours, atol=1e-2)
    request = SampleRequest(source=str(folder), prompts=("a red circle",), out=str(tmp_path / "out"))
    (written,) = sample(request, open_source(request))
    (group,) = policy.sample([GroupRequest("a red circle", ("s",), (0,), (derive_seed(0, "noise", 0),))])
    (expected,) = group.outputs
    assert isinstance(expected, Image.Image)
    assert written.file is not None
    with Image.open(written.file) as image:
        low, high = zip(*ImageChops.difference(image, expected).getextrema(), strict=True)
    assert min(low) == 0
    assert max(high) <= (1 if merged else 0)


def _fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "mine.txt").touch()


CASES: list[tuple[dict[str, Any], Callable[[Path], None] | None, str, str]] = [
    ({}, _fill, "DIR", "out"),
    ({}, Path.touch, "DIR", "out"),
    ({"run": "adapted@0"}, None, "RUN", "adapted@0"),
    ({"run": "adapted@3"}, None, "RUN", "adapted@3"),
    ({"run": "full@best"}, None, "RUN", "full@best"),
    ({"push_to_hub": "no such/name"}, None, "--push-to-hub", "no such/name"),
    ({"push_to_hub": "someone/policy"}, None, "--push-to-hub", "someone/policy"),
]


@pytest.mark.parametrize(("options", "prepare", "place", "value"), CASES)
@pytest.mark.usefixtures("adapted", "full")
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    options: dict[str, Any],
    prepare: Callable[[Path], None] | None,
    place: str,
    value: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    folder = tmp_path / "out"
    if prepare is not None:
        prepare(folder)
    before = sorted(tmp_path.rglob("*"))
    (error,) = refused(lambda: exported(root, folder=folder, **{"run": "adapted", **options}))
    assert (error.place, str(error.value).removeprefix(f"{tmp_path}/")) == (place, value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    """A run of the text adapter that a test may damage."""
    store_run(tmp_path / "runs", "own", build_text_policy(disturbed=0.05), {0: 0.0, 1: 0.4, 2: 0.2})
    return tmp_path / "runs" / "own"


def test_the_best_version_is_chosen_among_those_that_are_stored(own_run: Path, tmp_path: Path) -> None:
    store = plan_export(ExportRequest(run=str(own_run), folder=str(tmp_path / "x"))).store
    first = store.find("policies/000001")
    assert first is not None
    found = store.manifest_at(store.path(first.folder))
    assert found is not None
    delete_files(store, first, list(found.files), pruned={"by": "grpo prune"})
    request = ExportRequest(run=f"{own_run}@best", folder=str(tmp_path / "best"))
    assert plan_export(request).policy.version == 2
    (error,) = refused(lambda: plan_export(request.model_copy(update={"run": f"{own_run}@1"})))
    assert (error.place, str(error.value)) == ("RUN", "own@1")


def test_damaged_weights_are_refused_and_the_last_valid_version_is_taken(own_run: Path, tmp_path: Path) -> None:
    flip(own_run / "policies/000002/tokens" / ADAPTER_FILE)
    request = ExportRequest(run=str(own_run), folder=str(tmp_path / "out"))
    plan = plan_export(request)
    assert (plan.policy.version, len(plan.notes)) == (1, 1)
    (error,) = refused(lambda: plan_export(request.model_copy(update={"run": f"{own_run}@2"})))
    assert (error.place, str(error.value)) == ("RUN", "own@2")


def test_the_moving_average_is_exported_where_a_run_keeps_one(tmp_path: Path) -> None:
    policy, average = build_text_policy(disturbed=0.05), build_text_policy(disturbed=0.1)
    store_run(tmp_path / "runs", "averaged", policy, {}, average=average)
    folder = exported(tmp_path / "runs", "averaged", tmp_path / "adapter")
    average.save_weights(tmp_path / "expected")
    written, expected = (load_file(place / ADAPTER_FILE) for place in (folder, tmp_path / "expected"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    assert "| weights | their moving average |" in (folder / "README.md").read_text()


def test_merged_weights_that_are_not_finite_leave_nothing_behind(tmp_path: Path) -> None:
    policy = build_text_policy()
    with torch.no_grad():
        next(iter(policy.trainable_parameters().values())).fill_(torch.nan)
    store_run(tmp_path / "runs", "broken", policy, {})
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="NaN"):
        exported(tmp_path / "runs", "broken", tmp_path / "out" / "merged", merged=True)
    assert not list((tmp_path / "out").iterdir())
