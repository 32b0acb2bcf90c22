"""Whether what stands in a place is a whole artifact; what is not is put aside."""

from tasks.storage.artifacts.files import ArtifactFiles
from tasks.storage.artifacts.manifest import Manifest, read_manifest
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.filesystem.read_cache import ReadCache, default_cache
from tasks.storage.filesystem.run_folder import RunFolder

MANIFEST_ENDING = ".manifest.json"
_WHOLE = "another result of the same stage took its place"
_CUT_SHORT = "it is not whole: a file is missing or changed, or its writing was cut short"
# They read as fast as a copy of them would.
_WITHOUT_CACHE = ("file", "memory")


class ValidFolder(RunFolder):
    """A run whose artifacts are looked at only as far as they are what their manifests say."""

    def __init__(self, root: str, run: str, cache: ReadCache | None = None) -> None:
        """Point at a run; nothing is written yet.

        Args:
            root: a folder or any fsspec URL.
            run: its name.
            cache: copies of what is read from a remote root; by default in the user's cache folder.

        Raises:
            InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
        """
        super().__init__(root, run)
        protocol = self.filesystem.protocol
        near = set(_WITHOUT_CACHE) & ({protocol} if isinstance(protocol, str) else set(protocol))
        self.files = ArtifactFiles(self.filesystem, cache or (None if near else default_cache()))

    def manifest_path(self, place: str) -> str:
        """Where the manifest of the artifact in this folder of the filesystem is."""
        return f"{place}{MANIFEST_ENDING}"

    def manifest_at(self, place: str) -> Manifest | None:
        """The manifest of the artifact in this folder of the filesystem; None where it is missing or damaged."""
        content = self._read(self.manifest_path(place))
        try:
            return None if content is None else read_manifest(content)
        except (ValueError, TypeError):
            return None

    def valid_manifest_at(self, place: str) -> Manifest | None:
        """The manifest of the whole artifact in this folder of the filesystem, if there is one."""
        manifest = self.manifest_at(place)
        return manifest if manifest is not None and self.files.damage(place, manifest) is None else None

    def matching_manifest(self, place: str, reference: ArtifactRef) -> Manifest | str:
        """The manifest that the reference means, or why what is there is another."""
        name = self.manifest_path(reference.folder.rsplit("/", 1)[-1])
        content = self._read(self.manifest_path(place))
        if content is None:
            return f"{name} is missing"
        try:
            manifest = read_manifest(content)
        except (ValueError, TypeError) as error:
            return f"{name} is damaged ({error})"
        if not manifest.answers(reference):
            return f"{name} has sha256 {manifest.sha256[:12]}, not {reference.sha256[:12]}"
        return manifest

    def damage(self, place: str, reference: ArtifactRef) -> str | None:
        """What is wrong with the artifact in this folder of the filesystem; None when it is what the reference says."""
        manifest = self.matching_manifest(place, reference)
        return manifest if isinstance(manifest, str) else self.files.damage(place, manifest)

    def clear_place(self, folder: str, *, reason: str | None = None) -> None:
        """Set aside what stands in this place of the run, and beside it its manifest."""
        place = self.path(folder)
        present = [
            path
            for path in (self.manifest_path(folder), folder)  # without its manifest the folder counts for nothing
            if self.filesystem.exists(self.path(path))
        ]
        if present:
            self.set_aside(present, reason=reason or (_WHOLE if self.valid_manifest_at(place) else _CUT_SHORT))
