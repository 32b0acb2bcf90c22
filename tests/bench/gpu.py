"""`make bench-gpu`: models of released sizes with random weights on this machine's GPU.

A model is written as its configurations with files of holes, and loaded as any other; its values are drawn on the GPU.
On a GPU that computes nothing (tests/stub_gpu) a few blocks of each model show that every part runs; there only memory
is a figure, and nothing is stored.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from configs.loader import read_config
from configs.placement import PlacementSection
from flows.preflight.model import estimate_model, with_memory
from grpo_core.errors import InputError
from grpo_core.policies.estimate import GIB
from grpo_core.policies.protocol import policy_family
from tasks.models.devices import configure_torch
from tasks.models.initial import training_choices
from tasks.models.resident import ModelSpec, load_untried
from tests.bench import make_parts
from tests.bench.gpu_phases import Bench, Limits
from tests.bench.page import Measured, Row, store, tables, this_machine
from tests.bench.trl_trainer import large_tokenizer
from tests.stub_gpu.released_models import write_model


@dataclass(frozen=True)
class Shape:
    """A released model, by its name in `write_model`, and the shipped configuration that it is trained with.

    Attributes:
        seconds: its share of ten minutes, after which no further figure is begun.
    """

    title: str
    model: str
    config: str
    seconds: float


PARTS = {
    "gpu_text": Shape("A Qwen3 of 1.7 B parameters on a GPU", "qwen3_1_7b", "text_7b", 120),
    "gpu_glm_image": Shape("Both halves of GLM-Image on a GPU, 512 x 512", "glm_image", "glm_image_both", 240),
    "gpu_sd3": Shape("Stable Diffusion 3.5 medium on a GPU, 512 x 512", "sd3", "sd35_medium", 150),
}
BLOCKS_ON_A_STUB = 2


def measure(part: str, commit: str | None) -> None:
    """Measure a model, print its table, and store it unless nothing was computed."""
    shape, begun, rows = PARTS[part], time.perf_counter(), []
    stub = torch.cuda.get_device_name().startswith("Stub GPU")
    with tempfile.TemporaryDirectory() as folder, _host_values(stub):
        for row in _rows(shape, Path(folder, "model"), stub):
            rows.append(replace(row, left_out="none: a stub") if stub and row.unit != "GiB" else row)
            print(f"{part}: {row.what}", file=sys.stderr)
    minutes = round((time.perf_counter() - begun) / 60, 1)
    measured = Measured(shape.title, commit, date.today().isoformat(), minutes, this_machine(), tuple(rows))
    print(tables({part: measured}))
    if not stub:
        store(part, measured)


def _host_values(stub: bool) -> AbstractContextManager[object]:
    """On a stub, make up what the host reads, and the convolutions that it lacks."""
    if not stub:
        return nullcontext()
    from tests.stub_gpu.host_values import HostValues

    return HostValues(everything=False)


def _rows(shape: Shape, folder: Path, stub: bool) -> Iterator[Row]:
    """Load a model and yield its figures, or the reason why it is left out."""
    until, device = time.perf_counter() + shape.seconds, configure_torch(PlacementSection(devices="cuda"))
    config = read_config(f"configs/{shape.config}.yaml", [f"policy.model={folder}"])
    blocks = BLOCKS_ON_A_STUB if stub else None
    write_model(shape.model, folder, getattr(torch, config.policy.dtype), blocks=blocks)
    if config.policy.kind == "causal_lm":
        large_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references=config.references)
    try:
        spec = with_memory(config, spec)
        with training_choices(config.policy, None, None, references=config.references) as choices:
            memory = estimate_model(config, choices, offload=spec.offloads(device)).memory
    except InputError as error:
        yield Row(what="all", unit="", ours=(), left_out=str(error))
        return
    size = torch.cuda.get_device_properties(device).total_memory
    if memory.needed > size:
        needs = f"left out: it needs {memory.needed / GIB:.1f} GiB, and this GPU has {size / GIB:.1f}"
        yield Row(what="all", unit="GiB", ours=(), left_out=needs)
        return
    limits, begun = Limits.of_this_gpu(), time.perf_counter()
    settings: Any = policy_family(config.policy.kind).settings(config.rollout.model_dump())
    bench = Bench(config, load_untried(spec, settings, device), limits, memory)
    bench.draw_values()
    bench.seconds["load, and draw random values"] = time.perf_counter() - begun
    yield from bench.rows(until)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("make bench-gpu measures a GPU, and PyTorch finds none here.", file=sys.stderr)
        sys.exit(2)
    make_parts("tests.bench.gpu", PARTS, measure)
