"""A storage root on this machine, below which no path is followed through a link that leads out of its run.

A run folder may be somebody else's, copied or unpacked with whatever links it contains. The root itself may be a link,
or lie below one. A link in a run may lead to another place in that run, and a link next to the runs to one of them.
What a person changes while a command works is not defended against: who can do that can do the command's work too.
"""

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import InputError, raise_all

_REPORTED = 10  # links of a folder that one error names


class SpecialFileError(OSError):
    """A pipe, a socket or a device is in the place of a file of a run; reading it could wait for ever."""


class LinkError(InputError):
    """A path below a storage root leads through a link out of its run; `place` is the link, `value` its end."""


def _guarded(name: str) -> Callable[..., Any]:
    operation: Callable[..., Any] = getattr(LocalFileSystem, name)

    @functools.wraps(operation)
    def guarded(self: "RootFileSystem", path: Any, *arguments: Any, **options: Any) -> Any:
        # An entry of a listing is not followed.
        checked = path if isinstance(path, os.DirEntry) else self.inside(path)
        return operation(self, checked, *arguments, **options)

    return guarded


class RootFileSystem(LocalFileSystem):
    """The files below a storage root: what reads, lists, writes or deletes them refuses links as the module says.

    Paths outside of the root are left alone: files of this process are copied to and from there.
    """

    cachable = False

    def __init__(self, root: str) -> None:
        """Open the root, an absolute path that need not exist."""
        super().__init__()
        self.root = root.rstrip("/")

    info, ls, isdir, isfile = map(_guarded, ("info", "ls", "isdir", "isfile"))
    mkdir, makedirs, cp_file, get_file = map(_guarded, ("mkdir", "makedirs", "cp_file", "get_file"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self.inside(path)
        with contextlib.suppress(FileNotFoundError):
            kind = os.stat(path).st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                raise SpecialFileError(errno.EINVAL, "it is a pipe, a socket or a device, and no file", path)
        return super()._open(path, mode, **options)

    def exists(self, path: str, **options: Any) -> bool:
        """Return whether there is something at a path."""
        # fsspec counts a path with any error as one where nothing is.
        return os.path.exists(self.inside(path))

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        super().rm_file(self.inside(path, deleting=True))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or a folder with all that is in it."""
        super().rm(self.inside(path, deleting=True), recursive=recursive, maxdepth=maxdepth)

    def inside(self, path: str, *, deleting: bool = False) -> str:
        """Return an absolute path, below the root or elsewhere; LinkError if a link on the way leads where it must not.

        With `deleting`, every link below the run's folder is refused, also one to another place in the run.
        """
        place, path = self.root, path.rstrip("/")
        if not path.startswith(f"{place}/"):
            return path
        for depth, name in enumerate(path[len(place) + 1 :].split("/")):
            place = f"{place}/{name}"
            try:
                linked = stat.S_ISLNK(os.lstat(place).st_mode)
            except (OSError, ValueError):
                # There is nothing further down, or the operation says why it cannot be reached.
                break
            if linked and ((deleting and depth) or not self._stays(place, depth)):
                raise _refused(place)
        return path

    def _stays(self, link: str, depth: int) -> bool:
        """Return whether a link next to the runs ends below the root, or one in a run below the run's folder."""
        top = self.root if depth == 0 else "/".join(link.split("/")[:-depth])
        return os.path.realpath(link).startswith(f"{os.path.realpath(top)}/")

    def refuse_links(self, folder: str) -> None:
        """Raise InputError for the links in a folder that must not be followed, the first ten, before it is used."""
        raise_all(islice(self._links(self.inside(folder)), _REPORTED))

    def _links(self, folder: str) -> Iterator[LinkError]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            # Who reads it gets the reason.
            return
        for entry in entries:
            try:
                if entry.is_symlink():
                    self.inside(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    yield from self._links(entry.path)
            except LinkError as error:
                yield error


def _refused(link: str) -> LinkError:
    hint = "This link leads out of the run, so it is not followed. Remove it, or put what it leads to in its place."
    return LinkError(link, os.path.realpath(link), hint)
