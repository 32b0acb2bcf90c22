"""Change what a run has stored, and make again every checksum, digest and reference that says what it was.

Afterwards reading finds nothing wrong. Keys of later stages still contain the digests that their stages had read.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from grpo_core.rollouts.streams import STREAMS, Modality
from tasks.models.initial import COPIES, OPTIMIZER_FILE, component_folder, copy_digests, weights_digest
from tasks.runs import layout
from tasks.runs.lookup import CONFIG_FILE, read_description, write_description
from tasks.runs.stored_streams import state_digests
from tasks.storage import schemas
from tasks.storage.artifacts.reference import MANIFEST_ENDING, ArtifactRef, Manifest, PolicyRef
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import LINEAGE, ArtifactStore
from tasks.storage.files import dump_checked, hashes_of, load_checked
from tasks.storage.parquet import TableWriter, joint_digest, part_digests, values_digest
from tasks.storage.prefect_results import FOLDER, encode_reference

Row = dict[str, Any]
Change = Callable[[list[Row]], object]
"""Changes the rows of a table in place, or removes some."""


def opened(run: Path) -> ArtifactStore:
    """The store of a run's folder."""
    return ArtifactStore(str(run.parent), run.name)


def manifest_of(run: Path, folder: str) -> Manifest:
    """The valid manifest of an artifact."""
    store = opened(run)
    found = store.inspect(store.path(folder))
    assert isinstance(found, Manifest), found
    return found


def resealed(run: Path, folder: str, **changes: Any) -> None:
    """Write an artifact's manifest for the files as they are, and every record that refers to it.

    `changes` are fields of the manifest, `metrics` those that are others.
    """
    store, content = opened(run), run / folder
    before = store.manifest_at(store.path(folder))
    assert before is not None
    metrics = {**before.described["metrics"], **changes.pop("metrics", {})}
    described = {**before.described, "digest": digest_of(content), "metrics": metrics, **changes}
    after = Manifest(described, hashes_of(content), before.pruned, before.deleted)
    with store.staging() as scratch:
        store.write_manifest(folder, after, scratch)
    _refer(run, after.reference(f"{run.name}/{folder}"))


def digest_of(content: Path) -> str:
    """The digest that the stage which writes such an artifact would give it."""
    if (content / layout.STATE_FILE).exists():
        policy = policy_in(content)
        state = json.loads((content / layout.STATE_FILE).read_text())
        streams = [stream for stream in STREAMS if stream in state["optimizer_steps"]]
        moments = [component_folder(content, stream) / OPTIMIZER_FILE for stream in streams]
        weights = " ".join([policy.digest, *(str(policy.copies.get(name)) for name in COPIES)])
        named = [weights, *map(sha256_of, moments), (content / layout.STATE_FILE).read_text()]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()
    tables = [path for pattern in (layout.PARTS, layout.IMAGES) for path in sorted(content.glob(pattern))]
    written = [part_digests(path) for path in tables or content.glob("*.parquet")]
    if tables and "policy_version" not in pq.read_schema(tables[0]).names:
        # Of baselines, whose tables are written at once.
        written = [[joint_digest(each)] for each in written]
    digests = [digest for each in written for digest in each]
    states = [digest for path in sorted(content.glob(layout.STATES)) for digest in state_digests(path)]
    return joint_digest([*digests, *states])


def policy_in(content: Path) -> PolicyRef:
    """The version in the folder of a checkpoint, by its weights."""
    state = json.loads((content / layout.STATE_FILE).read_text())
    return PolicyRef(version=state["policy_version"], digest=weights_digest(content), copies=copy_digests(content))


def sha256_of(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _refer(run: Path, after: ArtifactRef) -> None:
    """Let the records of the run and of its root name an artifact that has changed."""
    for path in (*(run / FOLDER).glob("*.json"), *(run.parent / FOLDER).glob("*.json")):
        record = load_checked(path.read_bytes())
        ((kind, value),) = record["result"].items()
        checkpoint = value if kind == "$artifact" else value["checkpoint"]
        if checkpoint is None or checkpoint["uri"] != after.uri:
            continue
        reference: ArtifactRef | PolicyRef = after
        if kind == "$policy":
            reference = policy_in(run / after.folder).model_copy(update={"checkpoint": after})
        path.write_bytes(dump_checked({**record, "result": encode_reference(reference)}))


def edited(run: Path, folder: str, change: Change, name: str = layout.PART_FILE.format(0), **changes: Any) -> None:
    """Change rows of a table as its stage would have written them, batch by batch, and seal it again."""
    path = run / folder / name
    table = pq.read_table(path)
    schema = _schema_of(table.column_names)
    rows, digests, edges = table.to_pylist(), part_digests(path), [0]
    groups = [row["sample_id"].rpartition(".s")[0] for row in rows]
    if len(digests) > 1:
        edges += [index for index in range(1, len(groups)) if groups[index] != groups[index - 1]]
    batches = [rows[first:last] for first, last in zip(edges, [*edges[1:], len(rows)], strict=True)]
    assert [values_digest(_table(batch, schema)) for batch in batches] == digests, "written as its stage wrote it"
    writer = TableWriter(path, schema)
    for batch in batches:
        change(batch)
        writer.write({each: [row[each] for row in batch] for each in schema.names})
    writer.close()
    resealed(run, folder, **changes)


def _table(rows: list[Row], schema: pa.Schema) -> pa.Table:
    """The table that a writer makes of a batch."""
    return pa.table([pa.array([row[field.name] for row in rows], field.type) for field in schema], schema=schema)


def _schema_of(names: list[str]) -> pa.Schema:
    """The schema of the project with these columns: a file does not have the names of the elements of its lists."""
    streams = [each for count in range(3) for each in itertools.combinations(STREAMS, count)]
    rollouts = [
        schemas.rollout_schema(modality, each, with_start=start, with_previews=previews)
        for modality in get_args(Modality)
        for each in streams
        for start, previews in itertools.product((False, True), repeat=2)
    ]
    known = (schemas.ADVANTAGES, schemas.REWARDS, schemas.IMAGES, schemas.BASELINES, *rollouts)
    return next(each for each in known if each.names == names)


def configured(run: Path, change: Callable[[dict[str, Any]], object], *, identity: bool = False) -> None:
    """Change the stored configuration, with its sha256 in run.json; with `identity` also the settings there."""
    store = opened(run)
    settings, described = yaml.safe_load((run / CONFIG_FILE).read_bytes()), dict(read_description(store))
    change(settings)
    if identity:
        change(described["identity"]["settings"])
        named = {name: value for name, value in described["identity"].items() if name not in ("inputs", "heldout")}
        described[LINEAGE] = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    write_description(store, described, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())


def repointed(run: Path, version: int) -> None:
    """Let every row that a policy version sampled name the weights that are stored."""
    digest = policy_in(run / layout.policy_folder(version)).digest

    def change(rows: list[Row]) -> None:
        for row in rows:
            if row["policy_version"] == version:
                row["policy_digest"] = digest

    for manifest in sorted(run.rglob(f"{layout.ROLLOUTS}{MANIFEST_ENDING}")):
        folder = manifest.relative_to(run).as_posix().removesuffix(MANIFEST_ENDING)
        if (
            not folder.startswith(QUARANTINE)
            and "policy_version" in pq.read_schema(run / folder / layout.PART_FILE.format(0)).names
        ):
            edited(run, folder, change)


@contextlib.contextmanager
def unchanged(run: Path, folder: str) -> Iterator[None]:
    """Restore an artifact, its manifest and the records of it at the end."""
    kept = run.parent.parent / "kept"
    names = (folder, f"{folder}{MANIFEST_ENDING}")
    shutil.copytree(run / folder, kept / folder)
    shutil.copy(run / names[1], kept / names[1])
    try:
        yield
    finally:
        shutil.rmtree(run / folder)
        for name in names:
            (kept / name).rename(run / name)
        shutil.rmtree(kept)
        resealed(run, folder)
