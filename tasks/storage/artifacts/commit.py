"""Write artifacts: files are staged and moved, the manifest is last; delete files of one under a tombstone.

The tombstone is the artifact's manifest without the names of these files; it says what was deleted and why. It is
written first, so a killed process leaves a valid artifact, and pruning again deletes the files that are left.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tasks.storage.artifacts.files import ArtifactFiles, ReadCache, default_cache
from tasks.storage.artifacts.reference import (
    MANIFEST_ENDING,
    ArtifactRef,
    Manifest,
    PrunedArtifactError,
    StaleReferenceError,
    read_manifest,
)
from tasks.storage.artifacts.run_folder import RunFolder
from tasks.storage.files import (
    files_below,
    fsync_folder,
    fsync_path,
    hashes_of,
    is_local,
    move_folder,
    write_file_atomically,
)
from tasks.storage.roots import translate_remote_errors

_REPLACED = "another result of the same stage took its place"
_CUT_SHORT = "a file is missing or changed, or its writing was cut short"
# Filesystems that read as fast as a copy of them would.
_WITHOUT_CACHE = {"file", "memory"}


class ArtifactWriter(RunFolder):
    """The artifacts of one run, each a folder with a manifest next to it; a folder without a manifest is no artifact.

    Attributes:
        files: reads and verifies the files below the root.
    """

    def __init__(self, root: str, run: str, cache: ReadCache | None = None) -> None:
        """Point at a run as :class:`RunFolder` does.

        Args:
            root: a folder or any fsspec URL.
            cache: copies of files that are read from a remote root; None for the one in the user's cache folder.
        """
        super().__init__(root, run)
        protocol = self.filesystem.protocol
        near = _WITHOUT_CACHE & ({protocol} if isinstance(protocol, str) else set(protocol))
        self.files = ArtifactFiles(self.filesystem, cache or (None if near else default_cache()))

    def manifest_path(self, place: str) -> str:
        """Return where the manifest of the artifact in this folder of the filesystem is."""
        return f"{place}{MANIFEST_ENDING}"

    def manifest_at(self, place: str) -> Manifest | None:
        """Read the manifest of the artifact in this folder of the filesystem; None if it is missing or damaged."""
        content = self._read(self.manifest_path(place))
        try:
            return None if content is None else read_manifest(content)
        except (ValueError, TypeError):
            return None

    def valid_manifest_at(self, place: str) -> Manifest | None:
        """Read the manifest of an artifact whose files are all there and unchanged; None if there is none."""
        manifest = self.manifest_at(place)
        return manifest if manifest is not None and self.files.damage(place, manifest) is None else None

    def matching_manifest(self, place: str, reference: ArtifactRef) -> Manifest | str:
        """Read the manifest that the reference means, or return why there is none in this folder of the filesystem."""
        name = self.manifest_path(reference.folder.rsplit("/", 1)[-1])
        content = self._read(self.manifest_path(place))
        if content is None:
            return f"{name} is missing"
        try:
            manifest = read_manifest(content)
        except (ValueError, TypeError) as error:
            return f"{name} is damaged ({error})"
        if not manifest.matches(reference):
            return f"{name} has sha256 {manifest.sha256[:12]}, not {reference.sha256[:12]}"
        return manifest

    def damage(self, place: str, reference: ArtifactRef) -> str | None:
        """Return what is wrong with the artifact in this folder of the filesystem; None if it matches the reference."""
        manifest = self.matching_manifest(place, reference)
        return manifest if isinstance(manifest, str) else self.files.damage(place, manifest)

    def find(self, folder: str) -> ArtifactRef | None:
        """Return the valid artifact in this folder of the run if there is one; it may be pruned (`pruned_reason`)."""
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.valid_manifest_at(self.path(folder))
        try:
            return None if manifest is None else manifest.reference(f"{self.run}/{folder}")
        except (ValueError, TypeError):
            return None

    def commit(
        self,
        staged: Path,
        folder: str,
        *,
        digest: str,
        schema_version: int,
        rows: int,
        seconds: float,
        metrics: dict[str, float],
        peak_memory: int | None = None,
        synced: Mapping[str, str] | None = None,
    ) -> ArtifactRef:
        """Move staged files to their place and then write the manifest that makes them an artifact.

        An artifact in that place is moved away, never overwritten. If another writer of the stage was first and has the
        same result, its artifact is kept and returned.

        Args:
            staged: folder with the files.
            folder: of the run, where they go.
            digest, schema_version, rows, seconds, metrics, peak_memory: fields of the reference.
            synced: what `fsync` returned; None if nothing is synced.

        Raises:
            StorageError: a disk or a bucket refuses it.
            StaleReferenceError: the run does not request it any more.
        """
        if self.requested is not None and self.read_file(self.requested) is None:
            reason = "the run has its result or continues with another configuration, so the request is withdrawn"
            raise StaleReferenceError(f"{self.run}/{folder}: {reason}")
        described: dict[str, Any] = {
            "digest": digest,
            "schema_version": schema_version,
            "rows": rows,
            "seconds": seconds,
            "metrics": metrics,
        }
        if peak_memory is not None:
            described["peak_memory"] = peak_memory
        manifest = Manifest(described, self.fsync(staged, synced))
        assert manifest.content, "a metric that is not finite is refused before anything is moved"
        with translate_remote_errors(self.filesystem, self.root), self.commit_lock():
            place = self.path(folder)
            standing = self.manifest_at(place)
            if standing is not None and standing.equals_in_result(manifest):
                if self.files.damage(place, standing) is None:
                    return standing.reference(f"{self.run}/{folder}")
                # References to it stay valid if only its files have to be written again.
                manifest = standing if standing.files == manifest.files else manifest
            self.clear_place(folder)
            if is_local(self.filesystem):
                move_folder(staged, Path(place))
            else:
                for name, file in files_below(staged).items():
                    self.put_file(file, f"{place}/{name}", manifest.files[name])
            self.write_manifest(folder, manifest, staged.parent)
        return manifest.reference(f"{self.run}/{folder}")

    def fsync(self, staged: Path, synced: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the sha256 of every staged file by its name; below a local root they are on the disk then.

        Args:
            synced: what an earlier call returned; these files have not changed since, and are not read again.
        """
        return (fsync_folder if is_local(self.filesystem) else hashes_of)(staged, synced or {})

    def put_file(self, file: Path, path: str, sha256: str) -> None:
        """Put a synced local file into its place in one step."""
        if not is_local(self.filesystem):
            self.filesystem.put_file(str(file), path)
            self.files.keep(path, file, sha256)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        fsync_path(target.parent)

    def write_manifest(self, folder: str, manifest: Manifest, scratch: Path) -> None:
        """Write or replace the manifest of an artifact of the run in one step; the caller has the commit lock."""
        self.require_commit_lock()
        path = self.manifest_path(self.path(folder))
        write_file_atomically(self.filesystem, path, manifest.content, scratch=scratch)

    def clear_place(self, folder: str, *, reason: str | None = None) -> None:
        """Move what is in the place of an artifact of the run to `quarantine/`, with the reason if it is known."""
        # The manifest moves first: without it the folder is no artifact.
        present = [path for path in (self.manifest_path(folder), folder) if self.filesystem.exists(self.path(path))]
        if not present:
            return
        if reason is None:
            reason = _CUT_SHORT if self.valid_manifest_at(self.path(folder)) is None else _REPLACED
        self.quarantine(present, reason=reason)


LINEAGE = "lineage"
"""Entry of run.json and of tombstones: a digest of what made the run's policies and rollouts."""
IMAGES_REMOVED, STATES_REMOVED = "images", "states"
"""What a tombstone says was deleted from rollouts."""
AND = " and "
"""Between several things that were deleted."""


def removed_by(pruned: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what was deleted from an artifact, by its tombstone's entries; nothing without a tombstone."""
    return tuple(str(pruned.get("removed", "files")).split(AND)) if pruned is not None else ()


def delete_files(
    store: ArtifactWriter, reference: ArtifactRef, names: Collection[str], *, pruned: Mapping[str, Any]
) -> None:
    """Delete files of an artifact of the run; those that an interrupted deletion left are deleted too.

    Args:
        names: of the files within the artifact's folder.
        pruned: what is deleted and why, as JSON values.

    Raises:
        StaleReferenceError: the artifact there does not match the reference, or one of its other files is damaged.
        StorageError: a disk or a bucket refuses it.
    """
    place = store.path(reference.folder)
    with store.staging() as scratch, translate_remote_errors(store.filesystem, store.root), store.commit_lock():
        manifest = store.matching_manifest(place, reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        kept = {name: sha256 for name, sha256 in manifest.files.items() if name not in names}
        if damage := store.files.damage(place, manifest, kept):
            raise StaleReferenceError(f"{reference.uri}: {damage}")
        if manifest.pruned != pruned or len(kept) < len(manifest.files):
            deleted = {name: sha256 for name, sha256 in manifest.files.items() if name in names}
            manifest = Manifest(manifest.described, kept, pruned, {**manifest.deleted, **deleted})
            store.write_manifest(reference.folder, manifest, scratch)
        for name in left_over(store, reference.folder, manifest):
            store.filesystem.rm_file(f"{place}/{name}")


def left_over(store: ArtifactWriter, folder: str, manifest: Manifest) -> list[str]:
    """Return the deleted files of an artifact that are still there, since the process that deleted them was killed."""
    return [name for name in manifest.deleted if store.filesystem.exists(store.path(f"{folder}/{name}"))]


def pruned_error(store: ArtifactWriter, place: str, reference: ArtifactRef, manifest: Manifest) -> PrunedArtifactError:
    """Make the error for an artifact whose files were deleted, with a hint what to do.

    Args:
        place: the artifact's folder in the filesystem.
    """
    said = {name: value for name, value in (manifest.pruned or {}).items() if name != LINEAGE}
    hint = (
        f"Its files were deleted by `{said.get('by', 'grpo prune')}`. Choose one that is kept; or, to have it made "
        f"again, remove {store.manifest_path(place)} and start the run again."
    )
    return PrunedArtifactError(reference.uri, said, hint)
