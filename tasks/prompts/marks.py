"""Where the images stand in a prompt: `<image>` marks as verl writes them, and image blocks as TRL does.

A plain text keeps its marks. In messages each mark becomes a block, so that a policy finds blocks only; a block that
has its image in it, as the processors of transformers take it, is split into the block and the image.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo_core.errors import InputError
from grpo_core.rollouts.messages import IMAGE_MARK, read_messages, refuse_messages, write_messages

_PAYLOADS = ("image", "path", "url", "image_url", "bytes")


class MarkedPrompt(NamedTuple):
    """A prompt in which every image is a mark of a plain text or a block `{"type": "image"}` of messages."""

    text: str  # the prompt; messages are JSON
    marks: int  # how many images it says it has; 0 also where it leaves their place open
    payloads: tuple[object, ...]  # the image of each block that has one in it


def mark_images(text: str, place: str) -> MarkedPrompt:
    """Find the marks and image blocks of a prompt; InputError for what is no message, or images for some blocks."""
    messages = read_messages(text)
    if messages is None:
        return MarkedPrompt(text, text.count(IMAGE_MARK), ())
    refuse_messages(messages, place, images=True)
    if all(isinstance(message["content"], str) and IMAGE_MARK not in message["content"] for message in messages):
        return MarkedPrompt(text, 0, ())
    payloads: list[object] = []
    written = [{**message, "content": _blocks(message["content"], payloads)} for message in messages]
    given = tuple(payload for payload in payloads if payload is not None)
    if given and len(given) < len(payloads):
        hint = "Give every image block its image, or none and a column of images."
        raise InputError(place, f"{len(given)} images in {len(payloads)} image blocks", hint)
    return MarkedPrompt(write_messages(written), len(payloads), given)


def require_match(prompt: MarkedPrompt, images: int, place: str) -> None:
    """Raise InputError for another number of marks than of images; no mark leaves the place to the policy."""
    if prompt.marks not in ({0, images} if images else {0}):
        hint = f"Write {IMAGE_MARK} (or an image block) once per image, or never: then the images come before the text."
        raise InputError(place, f"{prompt.marks} marks for {images} images", hint)


def _blocks(content: str | list[dict[str, Any]], payloads: list[object]) -> list[dict[str, str]]:
    """Return a message's content as blocks of text and image, and add each image block's image, or None."""
    found: list[dict[str, str]] = []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if block["type"] == "text":
            for part in _split(block["text"]):
                found.append(part)
                payloads += [None] * (part["type"] == "image")
        else:
            found.append({"type": "image"})
            payloads.append(next((block[name] for name in _PAYLOADS if block.get(name) is not None), None))
    return found


def _split(text: str) -> Iterator[dict[str, str]]:
    """Yield the text between marks, unless it is empty, and an image block for each mark."""
    for number, part in enumerate(text.split(IMAGE_MARK)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}
