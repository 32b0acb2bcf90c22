"""Prompts -> texts, or images in files, with the sampler of the training."""

import re
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from pydantic import BaseModel

from flows.pipeline.requests import SampleRequest
from flows.sampling.source import Source
from grpo_core.errors import InputError, NonFiniteError
from grpo_core.groups import GroupRequest
from grpo_core.records import BrokenImage
from grpo_core.seeds import derive_seed
from tasks.storage.filesystem.files import require_writable

FOLDER = "samples"
_LETTERS = 40


class Sample(BaseModel):
    """One sample of a prompt.

    Attributes:
        index: which of the prompt's samples, from 1.
        text: the answer; None for an image.
        file: path of the image; None for a text.
    """

    prompt: str
    index: int
    text: str | None
    file: str | None


def check_output(request: SampleRequest, source: Source) -> Path | None:
    """Return the folder for images; None for texts.

    Raises:
        InputError: it cannot be written, or the samples are texts.
    """
    if source.spec.family.modality == "text":
        if request.out is not None:
            raise InputError("--out", request.out, "This model answers with texts, which are printed; leave it out.")
        return None
    folder = Path(request.out or FOLDER).expanduser()
    require_writable(folder.absolute(), "--out")
    return folder


def sample(request: SampleRequest, source: Source) -> Iterator[Sample]:
    """Sample prompt by prompt; a sample depends on its prompt, its index and the seed alone.

    Raises:
        NonFiniteError: pixels of an image are not numbers; it is not written.
    """
    folder, policy = check_output(request, source), source.load()
    numbers = range(request.samples)
    seeds = tuple(derive_seed(request.seed, "tokens", number) for number in numbers)
    noise = tuple(derive_seed(request.seed, "noise", number) for number in numbers)
    for place, prompt in enumerate(request.prompts, start=1):
        sample_ids = tuple(f"{prompt!r}, {index}" for index in range(1, request.samples + 1))
        (group,) = policy.sample([GroupRequest(prompt, sample_ids, seeds, noise)])
        for index, output in enumerate(group.outputs, start=1):
            if isinstance(output, BrokenImage):
                raise NonFiniteError("a decoded image", [sample_ids[index - 1]], f"{output.reason}.")
            file = None
            if isinstance(output, Image.Image) and folder is not None:
                words = re.sub(r"\W+", "-", prompt.lower()).strip("-")[:_LETTERS]
                file = folder / f"{source.name}-{place:02d}-{words}-seed{request.seed}-{index}.png"
                folder.mkdir(parents=True, exist_ok=True)
                output.save(file)
            text = output if isinstance(output, str) else None
            yield Sample(prompt=prompt, index=index, text=text, file=None if file is None else str(file))
