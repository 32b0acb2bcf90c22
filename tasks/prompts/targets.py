"""Target images that belong to prompts, and the image size of each prompt."""

import hashlib
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import open_image, require_aspect, to_rgb
from grpo_core.rollouts.streams import ImageSize
from tasks.process import map_in_threads
from tasks.prompts.files import file_ending, find_input, join_uri, list_input_folder, nearest_names, read_input_file
from tasks.prompts.images import IMAGE_ENDINGS, complete_image, name_inside, upright_size
from tasks.prompts.read import Prompt

if TYPE_CHECKING:
    from tasks.storage.artifacts.store import ArtifactStore

SIZE_COLUMNS = ("width", "height", "size")  # an image's size: two of pixels, or one such as 512x768, width first

_SIDE = r"0*([1-9][0-9]{0,5})"
# Columns with empty cells often come as floats.
_ONE_SIDE, _BOTH_SIDES = re.compile(rf"{_SIDE}(?:\.0)?"), re.compile(f"{_SIDE} ?[xX×] ?{_SIDE}")
_PIXELS = "Give a whole number of pixels above 0, or leave both cells empty for the size of the rollout."
_TEXT = "Give width and height in pixels as in 512x768, or leave the cell empty for the size of the rollout."


def read_sizes(prompts: Sequence[Prompt], *, source: str, default: ImageSize) -> tuple[ImageSize, ...]:
    """Return the size of each prompt's images, `default` for a row without one; InputError for unclear sizes."""
    return tuple(
        _size_of(prompt.columns, size_place(source, row)) or default for row, prompt in enumerate(prompts, start=1)
    )


def size_place(source: str, row: int) -> str:
    """Name a row of a prompt file, counted from 1 over its prompts, in an error about its size."""
    return f"data.prompts: {source}, row {row}"


def _size_of(columns: Mapping[str, object], place: str) -> ImageSize | None:
    width, height = (
        _numbers(_ONE_SIDE, columns.get(name), f"{place}, column {name}", _PIXELS) for name in SIZE_COLUMNS[:2]
    )
    if (width is None) != (height is None):
        given, missing = ("width", "height") if height is None else ("height", "width")
        hint = f"This row has no {missing}. Give both, or leave both empty for the size of the rollout."
        raise InputError(f"{place}, column {given}", columns[given], hint)
    both = _numbers(_BOTH_SIDES, columns.get("size"), f"{place}, column size", _TEXT)
    size = None if both is None else ImageSize(*both)
    own = None if width is None or height is None else ImageSize(*width, *height)
    if size is not None and own is not None and size != own:
        hint = f"The columns width and height of this row say {own}. Give one of the two, or the same."
        raise InputError(f"{place}, column size", columns["size"], hint)
    return size or own


def _numbers(form: re.Pattern[str], value: object, place: str, hint: str) -> tuple[int, ...] | None:
    """Return the numbers of pixels in a cell; None for an empty one."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    found = form.fullmatch(text)
    if found is None:
        raise InputError(place, value, hint)
    return tuple(map(int, found.groups()))


@dataclass(frozen=True)
class TargetReference:
    """A target image that was a valid image when it was paired: its file, as configured, and sha256."""

    uri: str
    sha256: str


def pair_targets(
    prompts: Sequence[Prompt],
    *,
    folder: str | None,
    column: str | None,
    base: str,
    sizes: Sequence[tuple[int, int]] = (),
) -> tuple[TargetReference | None, ...]:
    """Return the target of each prompt, in the order of the file; None for a prompt without one.

    A column names the image of each row; null means no target. With a folder only, an image belongs to the caption in
    the file of its name, as x.png to x.txt; where there are no such files, images belong to the prompts by
    the index in their names, from 0 or from 1 without gaps: 0.png, image_0001.png, 2-a-red-circle.png; hidden files and
    files without an image's ending are left out. With neither, no prompt has a target.

    Args:
        folder: folder of the images, a plain path or an fsspec URL.
        column: column of the prompts with file names relative to ``folder``.
        base: folder of the prompt file, to which names are relative without ``folder``; empty is the working directory.
        sizes: width and height of the images that each is compared with; empty if unknown.

    Raises:
        InputError: numbers that differ, names without an index, a missing file, an incomplete image, too many pixels,
            another aspect ratio than the images have, or a name outside the folder.
    """
    if column is not None:
        _require_column(prompts, column)
        names = [_named_in_column(prompt, row, column) for row, prompt in enumerate(prompts, start=1)]
    elif folder is not None:
        images = _images_of(folder)
        names = list(_images_by_name(folder, images, prompts) or _images_by_index(folder, images, len(prompts)))
    else:
        return (None,) * len(prompts)
    parent = base if folder is None else folder
    keys = [(name, sizes[row] if sizes else None) for row, name in enumerate(names)]
    first = dict(reversed(list(zip(keys, enumerate(prompts, start=1), strict=True))))
    distinct = [key for key in dict.fromkeys(keys) if key[0] is not None]

    def refer(key: tuple[str | None, tuple[int, int] | None]) -> TargetReference:
        (name, size), (row, prompt) = key, first[key]
        return _refer(join_uri(parent, str(name)), _place(prompt, row), size)

    known = dict(zip(distinct, map_in_threads(refer, distinct), strict=True))
    return tuple(known.get(key) for key in keys)


def find_target(uri: str, stores: Sequence["ArtifactStore"], folders: Sequence[str] = ()) -> str | None:
    """Return where a stored row's target image is; None if it is nowhere that may be read for a table.

    A table may be a stranger's: what it names is read in the working directory, beside the storage roots and below
    `folders`, which the person's own configuration names, and nothing is fetched. Where such a folder was moved, the
    image is found in it by its name; who reads it compares its digest.
    """
    if "://" in uri or "::" in uri:
        below = any("://" in folder and uri.startswith(f"{folder.rstrip('/')}/") for folder in folders)
        return uri if below and "::" not in uri and ".." not in uri.split("/") else None
    found = find_input(uri, stores)
    if found is None or not os.path.exists(found):
        parts = Path(uri).parts
        names = (os.path.join(*parts[start:]) for start in range(1, len(parts)))
        moved = (os.path.join(folder, name) for name in names for folder in folders if "://" not in folder)
        found = next((each for each in moved if os.path.exists(each)), found)
    if found is None:
        return None
    place = os.path.realpath(os.path.expanduser(found))
    if any("://" not in each and place.startswith(f"{os.path.realpath(each).rstrip('/')}/") for each in folders):
        return found
    name = posixpath.normpath(uri)
    if os.path.isabs(name) or name.startswith(("..", "~")):
        return None
    try:
        for store in stores:
            store.refuse_link(os.path.abspath(found))
    except InputError:
        return None
    return found


def load_target(reference: TargetReference) -> Image.Image:
    """Load the image as 8-bit RGB, upright, transparent parts over white; InputError if it is not the paired one."""
    place = "data.targets"
    content = read_input_file(reference.uri, place=place)
    digest = hashlib.sha256(content).hexdigest()
    if digest != reference.sha256:
        where = reference.uri if "://" in reference.uri else Path(reference.uri).absolute()
        hint = f"Its sha256 was {reference.sha256} when the prompts were read. Put that file back as {where}, or "
        hint += "start the run again."
        raise InputError(f"{place}: {reference.uri}", f"sha256 {digest}", hint)
    with complete_image(reference.uri, place):
        image = open_image(content, f"{place}: {reference.uri}")
        image.load()
    return to_rgb(image, f"{place}: {reference.uri}")


def _place(prompt: Prompt, row: int) -> str:
    return f"data.targets: prompt {prompt.prompt_id} (row {row})"


def _require_column(prompts: Sequence[Prompt], column: str) -> None:
    found = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    if column not in found:
        hint = (
            f"The prompts have no such column; besides the prompt they have: {', '.join(found) or 'none'}. Name one of "
            "these, or set target_column and targets to null for prompts without target images."
        )
        raise InputError("data.target_column", column, hint)


def _named_in_column(prompt: Prompt, row: int, column: str) -> str | None:
    """Return the normalised file name in the prompt's column; None for null."""
    value = prompt.columns.get(column)
    if value is None:
        return None
    place = f"{_place(prompt, row)}, column {column}"
    empty = "Write the file name of an image there, or null for no target."
    return name_inside(value, place, folder="the folder of targets", empty=empty)


def _images_of(folder: str) -> list[str]:
    return [
        name
        for name in list_input_folder(folder, place="data.targets")
        if name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")
    ]


def _images_by_name(folder: str, images: Sequence[str], prompts: Sequence[Prompt]) -> tuple[str, ...] | None:
    """Return the image beside each prompt's own text file; None without such files, or if no image has their names."""
    files = [str(prompt.columns.get("file_name", "")) for prompt in prompts]
    if not all(file_ending(name) == ".txt" for name in files):
        return None
    named: dict[str, list[str]] = {}
    for name in sorted(images):
        named.setdefault(posixpath.splitext(name)[0], []).append(name)
    stems = [name.removesuffix(".gz")[: -len(".txt")] for name in files]
    if named.keys().isdisjoint(stems):
        return None
    for file, stem in zip(files, stems, strict=True):
        found = named.get(stem, [])
        if len(found) != 1:
            what = ", ".join(found) or f"no image {stem}.*"
            raise InputError(f"data.targets: {folder}", what, f"{file} has to have exactly one image of its name.")
    return tuple(named[stem][0] for stem in stems)


def _images_by_index(folder: str, names: Sequence[str], count: int) -> tuple[str, ...]:
    if len(names) != count:
        some = f" ({nearest_names('', names)})" if names else ""
        hint = f"The images pair with the {count} prompts by index: give exactly one per prompt, or name a column."
        raise InputError(f"data.targets: {folder}", f"{len(names)} images{some} for {count} prompts", hint)
    orders = _orders_by_index(names)
    if len(orders) != 1:
        why = "The names have two indices, which disagree" if orders else "The names do not number the images"
        hint = (
            f"{why}, so nothing says which prompt each belongs to. Name them 0.png, 1.png, 2.png, ... in the order of "
            "the prompts, or write the names into a column of the prompts and set target_column to it."
        )
        raise InputError(f"data.targets: {folder}", nearest_names("", names), hint)
    return orders.pop()


def _orders_by_index(names: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the orders of the files by the number that each name begins or ends with; what all have does not count."""
    if len(names) < 2:
        return {tuple(names)}
    parts = [posixpath.splitext(name)[0] for name in names]
    # Twice, since what all names begin with goes first, and then what they end with.
    for _ in range(2):
        # Without the first digits of numbers that differ.
        shared = len(posixpath.commonprefix(parts).rstrip("0123456789"))
        parts = [part[shared:][::-1] for part in parts]
    orders = set()
    for form in (r"\A[0-9]+", r"[0-9]+\Z"):
        found = {
            int(match[0]): name for name, part in zip(names, parts, strict=True) if (match := re.search(form, part))
        }
        # A year or a size in the names is no index.
        first = min(found, default=-1)
        if first in (0, 1) and sorted(found) == list(range(first, first + len(names))):
            orders.add(tuple(found[index] for index in sorted(found)))
    return orders


def _refer(uri: str, place: str, size: tuple[int, int] | None) -> TargetReference:
    content = read_input_file(uri, place=place)
    with complete_image(uri, place):
        image = open_image(content, f"{place}: {uri}")
        # Pillow verifies a PNG's checksums without decoding it; other formats have none.
        if image.format == "PNG":
            image.verify()
        else:
            image.load()
        if size is not None:
            # Pillow cannot read from an image after verifying it.
            require_aspect(upright_size(open_image(content, f"{place}: {uri}")), size, f"{place}: {uri}")
    return TargetReference(uri, hashlib.sha256(content).hexdigest())
