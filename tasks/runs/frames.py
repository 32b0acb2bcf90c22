"""The tables of a run as polars frames, for scripts and notebooks: every file verified, nothing changed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import decode_stored
from tasks.prompts.files import nearest_names
from tasks.runs.layout import ADVANTAGE_COLUMN, ADVANTAGES, REWARDS, ROLLOUTS, evaluation_folder, iteration_folder
from tasks.runs.lookup import find_run, spans
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.runs.samples import IMAGE, join_samples, scan_table, tables_of
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, Read
from tasks.storage.files import scratch_folder
from tasks.storage.parquet import read_advantages

if TYPE_CHECKING:
    from configs.schema import RunConfig


_SHOWN = (
    *("iteration", "sample_id", "group_id", "dataset", "prompt_id", "prompt", "columns", "policy_version", "seed"),
    "sources",
    *("finished", "width", "height", "completion", IMAGE),
)
"""Columns of a sample that people look at; those that its modality lacks are left out."""


def open_run(name: str | Path, *, root: str = "runs") -> "StoredRun":
    """Open a run by its name below `root`, or the path or URL of its folder, whether it is finished or still running.

    InputError has the nearest names if there is none.
    """
    return StoredRun(find_run(str(name), root))


class StoredRun:
    """The tables of one run. Each method reads the files again, so it sees what a running training has added.

    All methods raise InputError for a damaged file, and for an iteration or column that the run does not have. Without
    iterations or policies all are read. `folder` is the path or URL of the run's folder.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self.name, self.folder = store.run, store.path()

    def config(self) -> "RunConfig":
        """Return the configuration that the run was made with."""
        # It checks rewards, which imports torch.
        from tasks.runs.stored import stored_config

        return stored_config(self._store)

    def metrics(self) -> pl.DataFrame:
        """Return a row per iteration and a column per metric, null where it was not measured.

        `heldout_reward` is that of the policy that the iteration made.
        """
        view = read_run(RunReader(self._store))
        for damage in view.damages:
            raise _damaged(self.name, damage.place, damage.reason)
        rows = [{"iteration": each.iteration, **dict(sorted(each.metrics.items()))} for each in view.iterations]
        return pl.DataFrame(rows, schema_overrides={"iteration": pl.Int32}, infer_schema_length=None)

    def rollouts(
        self, *, iterations: Iterable[int] | None = None, columns: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Return a row per sample of every sampling round, all or these columns; `image` only where it is named."""
        return self._table(self._iterations(iterations), ROLLOUTS, columns)

    def rewards(self, *, iterations: Iterable[int] | None = None) -> pl.DataFrame:
        """Return a row per sample and reward: value, raw measure, failure, seconds and provenance."""
        return self._table(self._iterations(iterations), REWARDS, None)

    def advantages(self, *, iterations: Iterable[int] | None = None) -> pl.DataFrame:
        """Return a row per sample and stream: combined reward, advantage, statistics, breakdown by reward.

        `stream` says whose actions the advantage is for. Of tokens there is a row per token sample, that of its
        first image; of denoising steps one per image that is compared with others.
        """
        return self._joined_tables(
            self._iterations(iterations), ADVANTAGES, lambda part: pl.DataFrame(read_advantages(tables_of(part)))
        )

    def samples(
        self, *, prompt: str | None = None, iterations: Iterable[int] | None = None, images: bool = True
    ) -> pl.DataFrame:
        """Return what people look at: prompts with images or texts, reward, advantage, and each reward's value.

        Where two streams are trained, reward and advantage are those of the sample's first stream, tokens before
        denoising, and each stream's advantages are a column too: `advantages/tokens`, `advantages/denoising`. With
        `prompt`, only prompts that contain it, in upper or lower case. :meth:`decode` decodes the images.
        """
        return self._samples(self._iterations(iterations), prompt, images=images)

    def heldout(
        self, *, prompt: str | None = None, policies: Iterable[int] | None = None, images: bool = True
    ) -> pl.DataFrame:
        """Return the same for the held-out samples of the run's evaluations; `policy_version` says whose they are."""
        stored = RunReader(self._store).evaluations()
        chosen = _chosen(policies, stored, f"held-out policies of {self.name}")
        return self._samples([evaluation_folder(version) for version in chosen], prompt, images=images)

    @staticmethod
    def decode(images: pl.Series) -> list[Image.Image | None]:
        """Return the images of a frame's column `image` in RGB; None for one that `grpo prune` deleted."""
        cells = enumerate(images.to_list())
        return [None if cell is None else decode_stored(cell["bytes"], f"row {row}") for row, cell in cells]

    def _iterations(self, chosen: Iterable[int] | None) -> list[str]:
        stored = RunReader(self._store).iterations()
        return [iteration_folder(number) for number in _chosen(chosen, stored, f"iterations of {self.name}")]

    def _table(self, folders: Sequence[str], stage: str, columns: Sequence[str] | None) -> pl.DataFrame:
        """Read a stage of these folders; None reads all columns but images."""

        def load(part: Path) -> pl.DataFrame:
            table = scan_table(part, images=columns is not None and IMAGE in columns)
            known = table.collect_schema().names()
            for name in columns or ():
                if name not in known:
                    raise InputError("columns", name, f"The {stage} have no such column: {nearest_names(name, known)}.")
            return table.select(list(columns) if columns else pl.exclude(IMAGE)).collect()

        return self._joined_tables(folders, stage, load)

    def _samples(self, folders: Sequence[str], prompt: str | None, *, images: bool) -> pl.DataFrame:
        lowered = pl.col("prompt").str.to_lowercase()
        # Also of upper case: neither side of the comparison is a pattern.
        where = None if prompt is None else lowered.str.contains(prompt.lower(), literal=True)
        columns = [name for name in _SHOWN if images or name != IMAGE]
        tables = []
        for folder in folders:
            with self._reading(folder) as (found, read):
                scores = [(each.folder.rsplit("/", 1)[-1], each) for each in found(REWARDS)]
                tables.append(
                    join_samples(read, found(ROLLOUTS), scores, found(ADVANTAGES), columns, where, extra=True)
                )
        samples = _joined(tables).select(pl.exclude("dropped", "streams"))
        streams = [name for name in samples.columns if name.startswith(ADVANTAGE_COLUMN)]
        return samples if len(streams) > 1 else samples.drop(streams)

    def _joined_tables(self, folders: Sequence[str], stage: str, load: Callable[[Path], pl.DataFrame]) -> pl.DataFrame:
        """Load a stage's artifacts of these folders one after another; remote ones are copied first."""
        tables = []
        for folder in folders:
            with self._reading(folder) as (found, read):
                tables += [load(read(reference)) for reference in found(stage)]
        return _joined(tables)

    @contextlib.contextmanager
    def _reading(self, folder: str) -> Iterator[tuple[Callable[[str], list[ArtifactRef]], Read]]:
        """Give two functions: which artifacts of a stage the folder has, and where one of them can be read."""
        reader = RunReader(self._store)

        def require_undamaged() -> None:
            for damage in reader.damages:
                raise _damaged(self.name, damage.place, damage.reason)

        def found(stage: str) -> list[ArtifactRef]:
            artifacts = [reader.find(each) for each in _artifacts(reader, folder, stage)]
            require_undamaged()
            return [each.reference for each in artifacts if each is not None]

        with scratch_folder() as fetched:

            def read(reference: ArtifactRef) -> Path:
                if (artifact := reader.find(reference.folder)) is not None:
                    reader.verify(artifact)
                require_undamaged()
                return reader.local_folder(reference, fetched)

            yield found, read


def _artifacts(reader: RunReader, folder: str, stage: str) -> Iterator[str]:
    """Yield the artifacts of a stage; only the last advantages, which cover the rounds before them."""
    scored = reader.scored_rounds(folder)
    rounds = scored or reader.rounds(folder)
    if stage == ADVANTAGES:
        yield from (f"{each}/{ADVANTAGES}" for each in scored[-1:])
    for each in rounds:
        if stage == ROLLOUTS:
            yield f"{each}/{ROLLOUTS}"
        if stage == REWARDS:
            yield from (f"{each}/{REWARDS}/{label}" for label in reader.artifact_names(f"{each}/{REWARDS}"))


def _joined(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    # Rows of other windows of noisy steps have other columns; what a function reports may change its type.
    return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()


def _chosen(chosen: Iterable[int] | None, stored: Sequence[int], what: str) -> list[int]:
    wanted = list(stored) if chosen is None else list(chosen)
    for number in wanted:
        if number not in stored:
            raise InputError(what, number, f"Stored are {spans(stored)}.")
    return wanted


def _damaged(run: str, place: str, reason: str) -> InputError:
    hint = "Start the run again with its own command, which makes it again, or choose other iterations."
    return InputError(f"{run}/{place}", reason, hint)
