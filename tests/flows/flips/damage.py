"""Files as a failing disk leaves them: a bit changed, or the end missing."""

import os
import random
from collections.abc import Iterator
from pathlib import Path


def rotten(content: bytes, chance: random.Random) -> bytes:
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def rot(path: Path, chance: random.Random) -> None:
    """Change one bit in the place, which leaves the times of the file."""
    before = path.stat()
    path.write_bytes(rotten(path.read_bytes(), chance))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cuts(path: Path) -> Iterator[int]:
    """Cut the file short, to one size after the other; whole again afterwards."""
    whole = path.read_bytes()
    for size in sorted({0, len(whole) // 2, len(whole) - 1}):
        path.write_bytes(whole[:size])
        yield size
    path.write_bytes(whole)
