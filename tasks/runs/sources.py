"""The images in prompts as a run keeps them: one file each, named by its digest, verified when it is read.

They are stored before they are sampled for, and again where one is damaged. Every stage reads them by the digests in
the rows of the rollouts.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_core.errors import InputError
from grpo_core.rollouts.images import SourceImage
from tasks.process import map_in_threads
from tasks.progress import log
from tasks.runs.layout import source_file
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import MAX_SOURCE_BYTES

# Reports read them without torch, and refused commands without polars.
if TYPE_CHECKING:
    import polars as pl

    from grpo_core.rollouts.actions import Sources
    from tasks.prompts.source_images import SourceReference


_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_sources(store: ArtifactStore, wanted: Mapping[str, str], runs: Iterable[str] = ()) -> dict[str, SourceImage]:
    """Read stored images by digest from any of these runs, verified; InputError names who has a missing one."""
    places = list(dict.fromkeys([store.run, *runs]))
    # Files of a bucket take long one after another.
    contents = map_in_threads(lambda named: _read(store, *named, places), list(wanted.items()))
    return {digest: SourceImage(digest, content) for digest, content in zip(wanted, contents, strict=True)}


def _read(store: ArtifactStore, digest: str, where: str, runs: Sequence[str]) -> bytes:
    found = "missing"
    if not _DIGEST.fullmatch(digest):
        raise missing_source(store, digest, where, "no sha256")
    earlier = (each for run in runs for each in store.earlier_runs(run))
    for run in (each for some in (runs, earlier) for each in some):
        content = store.read_shared(f"{run}/{source_file(digest)}", limit=MAX_SOURCE_BYTES)
        if content is not None:
            if sha256_of(content) == digest:
                return content
            found = f"sha256 {sha256_of(content)}"
    raise missing_source(store, digest, where, found)


def digests_in(table: "pl.DataFrame") -> dict[str, str]:
    """Return the digests that rows of rollouts name, each with the first sample that has it."""
    found: dict[str, str] = {}
    if "sources" in table.columns:
        for sample_id, digests in table.select("sample_id", "sources").iter_rows():
            for digest in digests or ():
                found.setdefault(digest, f"sample {sample_id}")
    return found


def sources_of(table: "pl.DataFrame", read: Mapping[str, SourceImage]) -> "Sources | None":
    """Return the images of each row of rollouts, from those that were read; None if no row has any."""
    rows = tuple(tuple(read[digest] for digest in digests or ()) for digests in table["sources"].to_list())
    return rows if any(rows) else None


def missing_source(store: ArtifactStore, digest: str, where: str, found: str) -> InputError:
    """Make the error for an image that is not stored as it should be."""
    hint = f"It is an image of {where}. Start the run again with the prompt file that has it, which restores it."
    return InputError(f"{store.run}/{source_file(digest)}", found, hint)


def sha256_of(content: bytes) -> str:
    """Return the digest that names a file of this content."""
    return hashlib.sha256(content).hexdigest()


def store_sources(
    store: ArtifactStore, named: Mapping[str, str], references: Mapping[str, "SourceReference"], known: set[str]
) -> None:
    """Make sure that the run has these images of prompts, and that each is valid; a damaged one is set aside.

    `named` says who has each, for errors; to `known`, digests that this process has stored or verified, they are added.
    InputError for an image that is neither stored nor in the prompts, or cannot be decoded.
    """
    wanted = {digest: where for digest, where in named.items() if digest not in known}

    def ensure(named: tuple[str, str]) -> None:
        digest, where = named
        content = store.read_file(source_file(digest))
        if content is not None and sha256_of(content) == digest:
            return
        if content is not None:
            store.quarantine([source_file(digest)], reason=f"it has sha256 {sha256_of(content)[:12]}")
            log(f"{store.run}/{source_file(digest)} is damaged and was set aside; it is read from the prompts again")
        reference = references.get(digest)
        if reference is None:
            raise missing_source(store, digest, where, "missing")
        content = reference.load()
        # The complete image, which may not have been decoded before: the error names its row.
        SourceImage(digest, content).open(reference.place)
        store.write_file(source_file(digest), content)

    map_in_threads(ensure, list(wanted.items()))
    known.update(wanted)
