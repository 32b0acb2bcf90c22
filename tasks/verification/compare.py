"""A stored artifact next to the same one computed again: every value that differs, in the order of what reads them.

Not compared is what two starts of the same stage measure, and what says where or by which packages a file was written:
columns in `tasks.storage.parquet.MEASURED`, and `_OF_PLACE` here. Seconds and peaks of memory of a stage stand in its
manifest, which is no part of this. Row groups, compression, the number of files that the rows or tensors are cut into,
and the bytes of PNG files make no difference.
"""

import filecmp
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import fsspec
import polars as pl

from grpo_core.rollouts.streams import STREAMS
from tasks.models.initial import COPIES, OPTIMIZER_FILE, WEIGHT_FILES, weights_digest
from tasks.runs.layout import (
    ADVANTAGES_FILE,
    EXTRA_FILE,
    IMAGES,
    PARTS,
    SCORES_FILE,
    STATE_FILE,
    STATES,
)
from tasks.storage.files import files_below, read_bounded
from tasks.storage.parquet import STREAM
from tasks.verification.records import Difference, Level
from tasks.verification.tables import Follows, Table, compare_table
from tasks.verification.tensors import compare_states, compare_tensors, norm_of
from tasks.verification.values import Side, UnreadableError

_STEPS_FILE, _DIGEST = "update_steps.parquet", "policy_digest"

_OF_PLACE = frozenset(
    {
        *("peft_version", "transformers_version", "_diffusers_version"),
        *("base_model_name_or_path", "_name_or_path"),
    }
)
"""Entries of configurations beside weights that say which packages wrote them, and where the base model was then."""

_ROLLOUTS, _IMAGES = Table(PARTS), Table(IMAGES)
_OTHERS = (
    Table(SCORES_FILE),
    Table(EXTRA_FILE),
    Table(ADVANTAGES_FILE, ("sample_id", STREAM)),
)
_LOCAL = fsspec.filesystem("file")


def compare_artifacts(
    stored: Path, computed: Path, *, previous: Path | None = None, without: Collection[str] = ()
) -> tuple[Difference, ...]:
    """Compare a stored artifact with the same one computed again, value by value.

    Distances are in units in the last place of float32 at the largest magnitude of the column: of log-probs, losses and
    the KL at least at 1, of pixels at 255, where a level has 65,536 of them. Those of weights, their copies and the
    optimizer's state are shares of what the update changed, ||computed - stored|| / ||computed - previous|| over all
    tensors of a stream, in units of 2^-23: another version in the place of one has a distance of about 2^23. Before the
    first version there is no checkpoint. Moments begin at zero, and so do the matrices B of most adapters: their norm
    is then the change. Other weights have changed by about the learning rates of all steps times the root of their
    number, as the steps of Adam and its kind do.

    Args:
        stored: local folder with the verified files of rollouts, of scores, of advantages, or of a policy version.
        computed: the same of the artifact that was computed again.
        previous: the checkpoint that the update began with, of policies; None for the first one.
        without: patterns of files that are not compared, as those that `grpo prune` has deleted.

    Returns:
        A difference for each column, and for all weights, all states or all moments of a stream; none if every value is
        the same bits. Those that others follow from come first. A file that cannot be read is a difference.
    """
    return tuple(_Comparison(stored, computed, previous, without).differences())


class _Comparison:
    def __init__(self, stored: Path, computed: Path, previous: Path | None, without: Collection[str]) -> None:
        self._stored, self._computed, self._previous = stored, computed, previous
        self._left = {
            name
            for name in {*files_below(stored), *files_below(computed)}
            if not any(fnmatchcase(name, pattern) for pattern in without)
        }

    def differences(self) -> Iterator[Difference]:
        follows: Follows = {}
        yield from self._table(_ROLLOUTS, follows)
        if (states := self._take(STATES)) is not None:
            yield from compare_states(*states, follows)
        for table in (_IMAGES, *_OTHERS):
            yield from self._table(table, follows)
        streams = [stream for stream in STREAMS if any(name.startswith(f"{stream}/") for name in self._left)]
        for stream in streams:
            yield from self._weights(stream)
        yield from self._optimizers(streams)
        yield from self._json(STATE_FILE)
        for name in sorted(name for name in self._left if name.endswith(".json")):
            yield from self._json(name)
        for stream in streams:
            yield from self._table(Table(f"{stream}/{_STEPS_FILE}", ("optimizer_step",)), follows)
        for name in sorted(self._left):
            yield from self._bytes(name)

    def _take(self, *patterns: str) -> tuple[Side, Side] | None:
        """Return both sides' files of these patterns, which are then done; None if they are the same bytes."""
        left = sorted(self._left)
        # A name may have characters of a pattern.
        names = [name for each in patterns for name in left if name == each or fnmatchcase(name, each)]
        self._left -= set(names)
        stored, computed = self._sides(names)
        return None if _same_bytes(stored, computed) else (stored, computed)

    def _sides(self, names: Sequence[str]) -> tuple[Side, Side]:
        def side(of: Any, folder: Path) -> Side:
            return Side(of, folder, [path for name in names if (path := folder / name).is_file()])

        return side("stored", self._stored), side("computed", self._computed)

    def _table(self, table: Table, follows: Follows) -> Iterator[Difference]:
        if (sides := self._take(table.pattern)) is None:
            return
        yield from _missing(table.pattern, *sides) or compare_table(table, *sides, follows)

    def _weights(self, stream: str) -> Iterator[Difference]:
        """Yield the differences of a component's weights and their copies."""
        for copy in ("", *COPIES):
            folder = f"{stream}/{copy}".rstrip("/")
            patterns = [f"{folder}/{pattern}" for pattern in WEIGHT_FILES]
            if (sides := self._take(*patterns)) is None:
                continue
            if missing := _missing(folder, *sides):
                yield from missing
                continue
            previous = self._before(folder, WEIGHT_FILES) or self._before(stream, WEIGHT_FILES)
            change = None if previous else self._first_change(stream, sides[1])
            found = compare_tensors(folder, *sides, previous or _NONE, change=change)
            yield from () if found is None else (found,)

    def _before(self, folder: str, patterns: Collection[str]) -> Side | None:
        """Return the files of these patterns in a folder of the version before; None without any."""
        if self._previous is None:
            return None
        files = [path for pattern in patterns for path in sorted((self._previous / folder).glob(pattern))]
        return Side("stored", self._previous, files) if files else None

    def _first_change(self, stream: str, computed: Side) -> float:
        """Return about how much the first update has changed the weights."""
        matrices, entries = norm_of(computed, lambda name: "lora_B" in name)
        try:
            steps = pl.read_parquet(self._computed / stream / _STEPS_FILE, columns=["learning_rate"])
            by_steps = float(steps["learning_rate"].sum()) * math.sqrt(entries)
        except FileNotFoundError:
            by_steps = math.inf
        return min(matrices or math.inf, by_steps)

    def _optimizers(self, streams: Sequence[str]) -> Iterator[Difference]:
        for stream in streams:
            name = f"{stream}/{OPTIMIZER_FILE}"
            if (sides := self._take(name)) is None:
                continue
            previous = self._before(stream, [OPTIMIZER_FILE]) or _NONE
            found = None if _missing(name, *sides) else compare_tensors(stream, *sides, previous, kind_of=_moment)
            yield from _missing(name, *sides) or filter(None, [found])

    def _json(self, name: str) -> Iterator[Difference]:
        """Yield the first entry in which two files of JSON differ, with the number of all."""
        if (sides := self._take(name)) is None or name.endswith(".index.json"):
            return
        if missing := _missing(name, *sides):
            yield from missing
            return
        try:
            theirs, ours = map(_entries, sides)
        except UnreadableError as error:
            yield error.difference(name)
            return
        if theirs.get(_DIGEST) == json.dumps(weights_digest(self._stored)):
            # It follows from the weights.
            ours[_DIGEST] = theirs[_DIGEST]
        names = list({**ours, **theirs})
        if differ := [each for each in names if theirs.get(each, _NO_ENTRY) != ours.get(each, _NO_ENTRY)]:
            said = [entries.get(differ[0], _NO_ENTRY) for entries in (theirs, ours)]
            place = f"{name}, {differ[0]}"
            yield Difference(place=place, stored=said[0], computed=said[1], count=len(differ), total=len(names))

    def _bytes(self, name: str) -> Iterator[Difference]:
        if (sides := self._take(name)) is not None:
            said = [f"{each.files[0].stat().st_size} bytes" if each.files else "no such file" for each in sides]
            yield Difference(place=name, stored=said[0], computed=said[1], count=1, total=1)


_NONE, _NO_ENTRY = Side("stored", Path(), ()), "no such entry"


def _same_bytes(stored: Side, computed: Side) -> bool:
    names = [[path.relative_to(each.folder) for path in each.files] for each in (stored, computed)]
    pairs = zip(stored.files, computed.files, strict=False)
    return names[0] == names[1] and all(filecmp.cmp(*pair, shallow=False) for pair in pairs)


def _missing(place: str, stored: Side, computed: Side) -> tuple[Difference, ...]:
    if stored.files and computed.files:
        return ()
    said = ["files" if each.files else "no files" for each in (stored, computed)]
    return (Difference(place=place, stored=said[0], computed=said[1], count=1, total=1),)


def _moment(name: str) -> str:
    return name.rpartition("|")[2]


def _entries(side: Side) -> dict[str, str]:
    """Return the values in a file of JSON as text, by the names and numbers that lead to them."""
    found: dict[str, str] = {}

    def add(path: str, value: object) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if name not in _OF_PLACE:
                    add(f"{path}.{name}" if path else str(name), inner)
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            # peft keeps the names of layers in sets.
            found[path] = json.dumps(sorted(value))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                add(f"{path}[{number}]", inner)
        else:
            found[path] = json.dumps(value)

    with side.reading():
        add("", json.loads(read_bounded(_LOCAL, str(side.files[0]))))
    return found


DEFAULT_TOLERANCE = 256.0
"""Largest distance that is rounding, in units in the last place of float32 where the allowance is 1.

Two iterations of each tiny configuration, computed again with torch's default instructions in place of AVX-512 and with
those of MKL and oneDNN before AVX, stage by stage from the stored inputs: none of 66,268 tokens differs, their
log-probs by at most 47 units (4.5e-5 nats), those of denoising steps by 100 (1.2e-5), norms of gradients by 68, scores
by 408 (2.4e-5, SSIM), advantages not at all, states by one unit of float16, 39 of 6,291,456 levels of pixels by one,
weights by 0.12 % of an update, moments by 0.002 %. A log-prob that is moved by 1e-3 nats is at 524 and more, up to -32.
"""


def level_of(differences: Sequence[Difference], tolerance: float) -> Level:
    """Return how equal two artifacts are.

    Args:
        differences: those that `compare_artifacts` returned.
        tolerance: largest distance that counts as rounding, where a difference's allowance is 1; 0 for none.
    """
    if not differences:
        return "equal"
    # A token is never rounding: what is sampled after it is another text or image.
    within = (each.largest is not None and each.largest <= tolerance * each.allowance for each in differences)
    return "rounding" if tolerance > 0 and all(within) else "differs"
