"""Store the images in the prompts of a plan before it is sampled, and again where a stored file is damaged."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from grpo_core.images import SourceImage
from tasks.progress import log
from tasks.prompts.sources import SourceReference
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import source_file
from tasks.runs.sources import missing_source, sha256_of
from tasks.storage.artifacts.store import ArtifactStore

_THREADS = 16


def store_sources(
    store: ArtifactStore, plan: RolloutPlan, references: Mapping[str, SourceReference], known: set[str]
) -> None:
    """Make sure that the run has every image of a plan's prompts, and that it is valid; what is damaged is set aside.

    Args:
        references: the images of the prompts that were read, by digest.
        known: digests that this process has stored or verified, to which those of the plan are added.

    Raises:
        InputError: an image is neither stored nor in the prompts, or cannot be decoded.
    """
    wanted = {digest: where for digest, where in named_by(plan).items() if digest not in known}

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

    if wanted:
        # Files of a bucket take long one after another.
        with ThreadPoolExecutor(min(len(wanted), _THREADS)) as pool:
            for done in [pool.submit(copy_context().run, ensure, each) for each in wanted.items()]:
                done.result()
    known.update(wanted)


def named_by(plan: RolloutPlan) -> dict[str, str]:
    """Return the digests of the images of a plan's prompts, each with the first prompt that has it."""
    found: dict[str, str] = {}
    for group in plan.groups:
        for digest in group.sources:
            found.setdefault(digest, f"prompt {group.prompt_id}")
    return found
