"""A sample in the terminal: its text, or the image where the terminal has enough colours."""

from PIL import Image
from rich.console import Console

from flows.sampling.sample import Sample
from flows.terminal.inspection import has_colours, thumbnail
from flows.terminal.tables import plain, relative


def show_sample(sample: Sample, console: Console) -> None:
    """Print a sample: its prompt with the text, or with the path of the image and the image itself."""
    console.print(plain(f"{sample.prompt} [{sample.index}]"), style="dim", soft_wrap=True)
    if sample.text is not None:
        console.print(plain(sample.text), soft_wrap=True, highlight=False)
    if sample.file is not None:
        console.print(plain(relative(sample.file)), soft_wrap=True, highlight=False)
        if has_colours(console):
            with Image.open(sample.file) as image:
                console.print(thumbnail(image.convert("RGB")))
