"""Train a shipped tiny model again from its recipe: weights, files, measurements, prompt files.

`python -m data.tiny_models glm-image`, `glm-image-edit`, `sd3`, `text` or `vision`; the same recipe gives the same
weights on the same machine.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

import data.tiny_sd3 as sd3
import data.tiny_text as text
import data.tiny_vision as vision
from data.edits import HELDOUT_FILE as EDIT_HELDOUT_FILE
from data.edits import TRAIN_FILE as EDIT_TRAIN_FILE
from data.edits import choose_edits, split_edits, write_edit_file
from data.grounding import PROMPT_FILES, write_medground_example
from data.grounding import write_prompt_files as write_grounding_files
from data.shapes import HELDOUT_FILE, TRAIN_FILE, choose_scenes, split_scenes, write_prompt_file
from data.tiny_glm_image import components, editing, training
from data.training import ProgressCallback, write_recipe
from grpo_core.policies.glm_image.loading import load_pipeline

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DATA = Path(__file__).parent
_MEASURED_EDITS = 60
LINES = 20
"""Lines that a training prints, each with its last loss."""


def make_glm_image() -> None:
    """Make the tiny GLM-Image: token model, decoder, prompt files; it has never seen the held-out captions."""
    recipe = components.TinyRecipe()
    seen, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    pipeline = components.build_pipeline(recipe)

    def train() -> Mapping[str, object]:
        steps = _progress("train token model")
        token_model = asdict(training.train_autoregressive(pipeline, recipe, steps))
        decoder = training.train_decoder(pipeline, recipe, _progress("train decoder"))
        return {"token_model": token_model, "decoder": {"final_loss": decoder}}

    def measure(folder: Path) -> list[object]:
        return [
            {"temperature": warm, **asdict(training.evaluate_tiny_model(folder, unseen, temperature=warm))}
            for warm in (1.0, 0.7)
        ]

    def save(folder: Path) -> None:
        components.save_tiny_model(pipeline, folder)

    replace_model("tiny-glm-image", recipe, components.LIBRARIES, train, save, measure)
    for name, scenes, count in (
        (TRAIN_FILE, seen, recipe.train_prompts),
        (HELDOUT_FILE, unseen, recipe.heldout_prompts),
    ):
        write_prompt_file(choose_scenes(scenes, count, recipe.seed), DATA / "prompts" / name, DATA / "targets")


def make_glm_image_edit() -> None:
    """Make the tiny GLM-Image that edits, from the shipped tiny GLM-Image; some pairs of colours it has never seen."""
    recipe = editing.TinyEditRecipe()
    seen, unseen = split_edits(recipe.base.seed, recipe.heldout_fraction)
    base = load_pipeline(str(DATA / "models" / "tiny-glm-image"), dtype=torch.float32, device=torch.device("cpu"))
    pipeline = editing.build_editor(base)

    def train() -> Mapping[str, object]:
        token_model = editing.train_token_editor(pipeline, recipe, _progress("train token model"))
        decoder = editing.train_decoder_on_sources(pipeline, recipe, _progress("train decoder"))
        return {"token_model": token_model, "decoder": {"final_loss": decoder}}

    def measure(folder: Path) -> list[object]:
        chosen = choose_edits(unseen, _MEASURED_EDITS, recipe.base.seed)
        return [
            {"temperature": warm, **asdict(editing.evaluate_tiny_editor(folder, chosen, temperature=warm))}
            for warm in (1.0, 0.7)
        ]

    def save(folder: Path) -> None:
        components.save_tiny_model(pipeline, folder)

    replace_model("tiny-glm-image-edit", recipe, components.LIBRARIES, train, save, measure)
    prompts = DATA / "prompts"
    for name, edits, count in (
        (EDIT_TRAIN_FILE, seen, recipe.train_prompts),
        (EDIT_HELDOUT_FILE, unseen, recipe.heldout_prompts),
    ):
        write_edit_file(choose_edits(edits, count, recipe.base.seed), prompts / name, DATA / "targets")


def make_sd3() -> None:
    """Make the tiny SD3; its prompts are those of the tiny GLM-Image."""
    recipe = sd3.TinySd3Recipe()
    _, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    pipeline = sd3.build_pipeline(recipe)

    def train() -> Mapping[str, object]:
        return {"final_loss": sd3.train_transformer(pipeline, recipe, _progress("train transformer"))}

    def measure(folder: Path) -> list[object]:
        return [
            {
                "num_inference_steps": 8,
                "guidance_scale": scale,
                **asdict(sd3.evaluate_tiny_sd3(folder, unseen, 8, scale)),
            }
            for scale in (1.0, 2.0)
        ]

    replace_model("tiny-sd3", recipe, sd3.LIBRARIES, train, pipeline.save_pretrained, measure)


def make_text() -> None:
    """Make the tiny text model and its prompt files; it has never seen the held-out words."""
    recipe, tokenizer = text.TinyTextRecipe(), text.build_tokenizer()
    _, unseen = text.split_words(recipe.seed, train=0, heldout=recipe.heldout_words)
    model = text.build_model(recipe, tokenizer)

    def train() -> Mapping[str, object]:
        steps = _progress("train text model")
        return {"final_loss": text.train_model(model, tokenizer, recipe, steps)}

    def measure(folder: Path) -> list[object]:
        return [asdict(text.evaluate_tiny_text_model(folder, unseen, temperature=warm)) for warm in (1.0, 0.1)]

    def save(folder: Path) -> None:
        text.save_tiny_text_model(model, tokenizer, folder)

    replace_model("tiny-text", recipe, text.LIBRARIES, train, save, measure)
    text.write_prompt_files(recipe, DATA / "prompts")


def make_vision() -> None:
    """Make the tiny vision model and the drawn images of its prompts; it has never seen the held-out images."""
    recipe = vision.TinyVisionRecipe()
    processor = vision.build_processor(recipe)
    model = vision.build_model(recipe, processor)

    def train() -> Mapping[str, object]:
        steps = _progress("train vision model")
        return {"final_loss": vision.train_model(model, processor, recipe, steps)}

    def measure(folder: Path) -> list[object]:
        return [
            asdict(vision.evaluate_tiny_vision_model(folder, recipe, shapes=shapes, temperature=warm))
            for shapes in PROMPT_FILES
            for warm in (1.0, 0.0)
        ]

    def save(folder: Path) -> None:
        vision.save_tiny_vision_model(model, processor, folder)

    replace_model("tiny-vision", recipe, vision.LIBRARIES, train, save, measure)
    sizes = {"train": recipe.train_prompts, "heldout": recipe.heldout_prompts}
    write_grounding_files(DATA / "prompts", recipe.seed, **sizes)
    write_medground_example(DATA / "medground", recipe.seed, recipe.medground_prompts)


def replace_model(
    name: str,
    recipe: "DataclassInstance",
    libraries: Sequence[str],
    train: Callable[[], Mapping[str, object]],
    save: Callable[[Path], None],
    measure: Callable[[Path], list[object]],
) -> None:
    """Train a model, save it with its recipe, and replace the shipped one once the new one is complete.

    Args:
        name: folder below data/models.
        libraries: those whose versions affect the result.
        train: changes the model in place and returns what was measured on the way.
        measure: loads the saved model as a user would, and measures it on what it has never seen.
    """
    started, models = time.perf_counter(), DATA / "models"
    trained = {**train(), "train_seconds": round(time.perf_counter() - started)}
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        fresh = Path(scratch) / "model"
        save(fresh)
        write_recipe(fresh, recipe, {**trained, "heldout": measure(fresh)}, libraries=libraries)
        if (models / name).exists():
            (models / name).rename(Path(scratch) / "previous")
        fresh.rename(models / name)


def _progress(stage: str) -> ProgressCallback:
    def report(step: int, total: int, loss: float) -> None:
        if step % max(1, total // LINES) == 0 or step == total:
            print(f"{stage}: {step}/{total}, loss {loss:.4f}", file=sys.stderr, flush=True)

    return report


MODELS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "glm-image": make_glm_image,
        "glm-image-edit": make_glm_image_edit,
        "sd3": make_sd3,
        "text": make_text,
        "vision": make_vision,
    }
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    make = MODELS[parser.parse_args().model]
    torch.set_num_threads(1)
    make()
