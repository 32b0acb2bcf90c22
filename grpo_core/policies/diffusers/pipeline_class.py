"""What a class of pipeline can do, read from the source of diffusers without importing it, which takes seconds.

Any text-to-image pipeline can be trained whose own `__call__` makes every denoising step through its scheduler and lets
everything else be given: the prompts, the size, the first latents, and that latents are returned undecoded.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_NEEDED = ("prompt", "height", "width", "num_inference_steps", "generator", "latents", "output_type")
_GUIDANCE = ("guidance_scale", "true_cfg_scale")
# An `image` may be a condition that can be left out.
_OTHER_INPUTS = ("control_image", "mask_image", "masked_image_latents", "video", "num_frames", "prior_token_ids")
# The function below the decorator is the one that is called with gradients.
_DECORATORS = ("torch.no_grad()", "torch.inference_mode()")


@dataclass(frozen=True)
class PipelineClass:
    """One class of pipeline.

    Attributes:
        name: of the class.
        call: default of each argument of its `__call__`; None also where it is no constant.
        parts: names of its parts.
        packs: whether two by two latents become one position of the transformer, outside of it.
        no_guidance: highest scale that is no classifier-free guidance: 1 where predictions are interpolated, 0 where
            their difference is added.
        longest_prompt: largest `max_sequence_length` that its `check_inputs` lets pass; None: it compares with none.
        problem: why its denoising cannot be trained, as a sentence; None if it can.
    """

    name: str
    call: Mapping[str, object]
    parts: tuple[str, ...]
    packs: bool
    no_guidance: int
    longest_prompt: int | None
    problem: str | None


@cache
def find_pipeline_class(name: str) -> PipelineClass | None:
    """Find a class of pipeline in the installed diffusers; None if it has none of this name."""
    for source in _sources():
        if f"\nclass {name}(" in source:
            return next(_described(each) for each in _classes(source) if each.name == name)
    return None


def pipeline_classes() -> Iterator[PipelineClass]:
    """Yield every class of pipeline of the installed diffusers."""
    for source in _sources():
        yield from (_described(each) for each in _classes(source) if each.name.endswith("Pipeline"))


def _sources() -> Iterator[str]:
    return (file.read_text() for file in sorted((_package() / "pipelines").glob("**/pipeline_*.py")))


def _classes(source: str) -> list[ast.ClassDef]:
    return [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]


def _package() -> Path:
    spec = find_spec("diffusers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@cache
def _text_to_image_classes() -> frozenset[str]:
    """Return the classes that diffusers' AutoPipelineForText2Image can choose."""
    tree = ast.parse((_package() / "pipelines" / "auto_pipeline.py").read_text())
    assigned = (each for each in tree.body if isinstance(each, ast.Assign))
    (mapping,) = (each for each in assigned if ast.unparse(each.targets[0]) == "AUTO_TEXT2IMAGE_PIPELINES_MAPPING")
    return frozenset(each.id for each in ast.walk(mapping.value) if isinstance(each, ast.Name))


def _described(source: ast.ClassDef) -> PipelineClass:
    functions = {each.name: each for each in source.body if isinstance(each, ast.FunctionDef)}
    call, init = functions.get("__call__"), functions.get("__init__")
    arguments = {} if call is None else _defaults(call)
    parts = () if init is None else tuple(each.arg for each in init.args.args[1:])
    problem = "It has no call of its own." if call is None else _problem(source.name, call, arguments, parts)
    bound = _bound(functions.get("do_classifier_free_guidance"), "self._guidance_scale")
    return PipelineClass(
        name=source.name,
        call=arguments,
        parts=parts,
        packs="_pack_latents" in functions,
        no_guidance=1 if bound is None else bound,
        longest_prompt=_bound(functions.get("check_inputs"), "max_sequence_length"),
        problem=problem,
    )


def _bound(function: ast.FunctionDef | None, value: str) -> int | None:
    """Return n of a condition `value > n` in a function; None if it has none."""
    compared = (each for each in (() if function is None else ast.walk(function)) if isinstance(each, ast.Compare))
    for each in compared:
        match each:
            case ast.Compare(left, [ast.Gt()], [ast.Constant(int() | float() as bound)]) if ast.unparse(left) == value:
                return int(bound)
    return None


def _defaults(function: ast.FunctionDef) -> dict[str, object]:
    names = [each.arg for each in function.args.args[1:]]
    given = function.args.defaults
    values: list[object] = [None] * (len(names) - len(given))
    values += [each.value if isinstance(each, ast.Constant) else None for each in given]
    return dict(zip(names, values, strict=True))


def _problem(name: str, call: ast.FunctionDef, arguments: Mapping[str, object], parts: tuple[str, ...]) -> str | None:
    """Return the first reason why this pipeline cannot be trained."""
    if missing := [each for each in _NEEDED if each not in arguments]:
        return f"Its call takes no {', '.join(missing)}."
    if other := [each for each in _OTHER_INPUTS if each in arguments]:
        return f"It does not make images from text alone: its call takes {', '.join(other)}."
    if "image" in arguments and name not in _text_to_image_classes():
        return "It does not make images from text alone: its call takes an image."
    if not any(each in arguments for each in _GUIDANCE):
        return "Its guidance is not an argument of its call."
    if missing := [each for each in ("scheduler", "transformer") if each not in parts]:
        return f"It has no {' and no '.join(missing)}."
    body = ast.unparse(call)
    if "self.encode_prompt(" not in body:
        return "It does not encode its prompts by a method encode_prompt, so its text encoders would run in each pass."
    if "self.scheduler.step(" not in body or "images=" not in body:
        return "Its call does not go from the steps of one scheduler to images."
    if not any(ast.unparse(each) in _DECORATORS for each in call.decorator_list):
        return "Its call cannot run with gradients: it is not decorated with torch.no_grad()."
    return None
