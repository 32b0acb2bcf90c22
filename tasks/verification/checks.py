"""What reading alone shows: checksums of every file, and whether the tables of a sampling round belong together."""

from collections.abc import Iterator, Sequence

from grpo_core.errors import InputError
from tasks.progress import progress_of
from tasks.runs.layout import (
    ADVANTAGES,
    ADVANTAGES_FILE,
    GUARDRAILS,
    IMAGES,
    PARTS,
    REWARDS,
    ROLLOUTS,
    SCORES_FILE,
    SOURCES,
    source_file,
)
from tasks.runs.reader import RunReader
from tasks.runs.sources import sha256_of
from tasks.storage.artifacts.commit import IMAGES_REMOVED, removed_by
from tasks.storage.artifacts.reference import MANIFEST_ENDING
from tasks.storage.files import MAX_SOURCE_BYTES, matching
from tasks.storage.parquet import read_columns


def stored_artifacts(reader: RunReader) -> list[str]:
    """List the folders of all artifacts of a run, those in quarantine left out."""
    store = reader.store
    root = store.path()
    found = [path.split(f"{root}/", 1)[-1] for path in store.filesystem.find(root) if path.endswith(MANIFEST_ENDING)]
    names = [name.removesuffix(MANIFEST_ENDING) for name in found]
    return sorted(name for name in names if not name.startswith((".", "quarantine/")))


def check_artifacts(reader: RunReader, artifacts: Sequence[str]) -> list[str]:
    """Verify every file of these artifacts, and the joins of their tables; return what is wrong."""
    report = progress_of("checksums and joins", len(artifacts))
    problems: list[str] = []
    by_round: dict[str, list[str]] = {}
    for folder in artifacts:
        by_round.setdefault(_round_of(folder), []).append(folder)
    for done, folder in enumerate(artifacts, start=1):
        found = reader.find(folder)
        if found is not None and reader.verify(found, only=found.manifest.files) and folder.endswith(f"/{ROLLOUTS}"):
            problems += _unjoined(reader, folder, by_round[_round_of(folder)])
        report(done)
    return [*(f"{each.place}: {each.reason}" for each in reader.damages), *problems]


def _round_of(folder: str) -> str:
    """Return the folder of the sampling round, or of the evaluation, that an artifact belongs to."""
    place = folder.rpartition("/")[0]
    return place.rpartition("/")[0] if place.endswith((f"/{REWARDS}", f"/{GUARDRAILS}")) else place


def check_sources(reader: RunReader) -> list[str]:
    """Verify the images in prompts, each of which is named by its content."""
    problems = []
    for digest in reader.names(SOURCES):
        content = reader.store.read_file(source_file(digest), limit=MAX_SOURCE_BYTES)
        if content is not None and (found := sha256_of(content)) != digest:
            problems.append(f"{source_file(digest)}: it has sha256 {found[:12]}: another image, or a damaged one")
    return problems


def _unjoined(reader: RunReader, rollouts: str, siblings: Sequence[str]) -> Iterator[str]:
    place = rollouts.rpartition("/")[0]
    samples = _ids(reader, rollouts, PARTS)
    if len({*samples}) < len(samples):
        yield f"{rollouts}: {len(samples) - len({*samples})} sample ids are there twice"
    if IMAGES_REMOVED not in removed_by(reader.pruned.get(rollouts)):
        # Texts have none.
        has_images = matching(reader.store.filesystem, reader.store.path(rollouts), IMAGES)
        images = _ids(reader, rollouts, IMAGES) if has_images else []
        if images and {*images} != {*samples}:
            yield f"{rollouts}: {_first_lonely(images, samples)} is not in both rows and images"
    for folder in siblings:
        if folder.startswith((f"{place}/{REWARDS}/", f"{place}/{GUARDRAILS}/")):
            scored = _ids(reader, folder, SCORES_FILE)
            if sorted(scored) != sorted(samples):
                yield f"{folder}: {_first_lonely(scored, samples)} is not in both scores and rollouts"
        # Advantages cover the sampling rounds before them too.
        elif folder == f"{place}/{ADVANTAGES}" and (lonely := sorted({*samples} - {*_ids_of_round(reader, folder)})):
            yield f"{folder}: {lonely[0]} of {rollouts} is not in it"


def _ids_of_round(reader: RunReader, advantages: str) -> list[str]:
    return _ids(reader, advantages, ADVANTAGES_FILE)


def _first_lonely(one: Sequence[str], other: Sequence[str]) -> str:
    return min({*one} ^ {*other}, default="a sample id that is there twice")


def _ids(reader: RunReader, folder: str, pattern: str) -> list[str]:
    store = reader.store
    try:
        ids: list[str] = read_columns(store.filesystem, store.path(folder), pattern, ("sample_id",))[0].to_pylist()
    except (InputError, OSError, ValueError, IndexError, KeyError) as error:
        reader.report_damage(folder, f"it cannot be read ({error})")
        return []
    return ids
