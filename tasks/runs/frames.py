"""The tables of a run as polars frames, for scripts and notebooks: every file verified, nothing changed."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rewards.images import decode_stored
from grpo_core.streams import STREAMS
from tasks.prompts.files import nearest_names
from tasks.runs.layout import ADVANTAGES, IMAGES, REWARDS, ROLLOUTS, evaluation_folder, iteration_folder
from tasks.runs.lookup import find_run, spans
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.advantages import STREAM, read_advantages

if TYPE_CHECKING:
    from configs.schema import RunConfig

IMAGE = "image"
_IMAGE_TYPE = pl.Struct({"bytes": pl.Binary, "path": pl.String})

_SHOWN = (
    *("iteration", "sample_id", "group_id", "dataset", "prompt_id", "prompt", "columns", "policy_version", "seed"),
    *("finished", "width", "height", "completion", IMAGE),
)
"""Columns of a sample that people look at, as far as its modality has them."""


def open_run(name: str | Path, *, root: str = "runs") -> "StoredRun":
    """Open a run to read its tables, whether it is finished, stopped half-way or still running.

    Args:
        name: a run under the storage root, or the path or URL of its folder.
        root: where runs are stored: a folder or any fsspec URL.

    Raises:
        InputError: there is no such run, with the nearest names.
    """
    return StoredRun(find_run(str(name), root))


class StoredRun:
    """The tables of one run. Each method reads the files again, so it sees what a running training has added.

    All methods raise InputError for a damaged file, and for an iteration or column that the run does not have.

    Attributes:
        name: name of the run.
        folder: path or URL of its folder.
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
        """Return a row per sample of every sampling round, as it is stored.

        Args:
            iterations: numbers to read; None for all.
            columns: names of the columns to read; None for all. `image` is read only where it is named, and joined.
        """
        return self._table(self._iterations(iterations), ROLLOUTS, columns)

    def rewards(self, *, iterations: Iterable[int] | None = None) -> pl.DataFrame:
        """Return a row per sample and reward: value, raw measure, failure, seconds and provenance."""
        return self._table(self._iterations(iterations), REWARDS, None)

    def advantages(self, *, iterations: Iterable[int] | None = None) -> pl.DataFrame:
        """Return a row per sample and stream: combined reward, advantage, statistics, breakdown by reward.

        `stream` says whose actions the advantage is for. Of tokens there is a row per draft, that of its first
        rendering; of denoising steps one per rendering that is compared with others.
        """
        return self._advantages(self._iterations(iterations))

    def samples(
        self, *, prompt: str | None = None, iterations: Iterable[int] | None = None, images: bool = True
    ) -> pl.DataFrame:
        """Return what people look at: prompts with images or texts, reward, advantage, and each reward's value.

        Where two streams are trained, reward and advantage are those of the sample's first stream, tokens before
        denoising, and each stream's advantages are a column too: `advantages/tokens`, `advantages/denoising`.

        Args:
            prompt: text that the prompt contains, in upper or lower case; None for all prompts.
            iterations: numbers to read; None for all.
            images: whether to read the images, which :meth:`decode` decodes.
        """
        return self._samples(self._iterations(iterations), prompt, images=images)

    def heldout(
        self, *, prompt: str | None = None, policies: Iterable[int] | None = None, images: bool = True
    ) -> pl.DataFrame:
        """Return the same for the held-out samples of the run's evaluations; `policy_version` says whose they are.

        Args:
            prompt: text that the prompt contains, in upper or lower case; None for all prompts.
            policies: policy versions to read; None for all that were evaluated.
            images: whether to read the images.
        """
        stored = RunReader(self._store).evaluations()
        chosen = _chosen(policies, stored, f"held-out policies of {self.name}")
        return self._samples([evaluation_folder(version) for version in chosen], prompt, images=images)

    @staticmethod
    def decode(images: pl.Series) -> list[Image.Image | None]:
        """Return the images of a frame's column `image` in RGB; None for one that `grpo prune` deleted.

        Raises:
            InputError: an image is incomplete.
        """
        cells = enumerate(images.to_list())
        return [None if cell is None else decode_stored(cell["bytes"], f"row {row}") for row, cell in cells]

    def _iterations(self, chosen: Iterable[int] | None) -> list[str]:
        stored = RunReader(self._store).iterations()
        return [iteration_folder(number) for number in _chosen(chosen, stored, f"iterations of {self.name}")]

    def _table(self, folders: Sequence[str], stage: str, columns: Sequence[str] | None) -> pl.DataFrame:
        """Read a stage of these folders; None reads all columns but images."""

        def select(table: pl.LazyFrame) -> pl.LazyFrame:
            known = table.collect_schema().names()
            for name in columns or ():
                if name not in known:
                    raise InputError("columns", name, f"The {stage} have no such column: {nearest_names(name, known)}.")
            return table.select(list(columns) if columns else pl.exclude(IMAGE))

        return _joined([select(table).collect() for table in self._scan(folders, stage)])

    def _advantages(self, folders: Sequence[str], columns: Sequence[str] | None = None) -> pl.DataFrame:
        return _joined([pl.DataFrame(read_advantages(files, columns)) for files in self._files(folders, ADVANTAGES)])

    def _samples(self, folders: Sequence[str], prompt: str | None, *, images: bool) -> pl.DataFrame:
        def select(table: pl.LazyFrame) -> pl.LazyFrame:
            known = table.collect_schema().names()
            if prompt is not None:
                # Also of upper case: neither side of the comparison is a pattern.
                table = table.filter(pl.col("prompt").str.to_lowercase().str.contains(prompt.lower(), literal=True))
            return table.select([name for name in _SHOWN if name in known and (images or name != IMAGE)])

        samples = _joined([select(table).collect() for table in self._scan(folders, ROLLOUTS)])
        if samples.is_empty():
            return samples
        advantages = self._advantages(folders, ("sample_id", "iteration", "reward", "advantage"))
        values = self._table(folders, REWARDS, ("sample_id", "iteration", "reward", "value"))
        # The names of held-out samples are those of any other policy's too, and their iteration is its version.
        keys = ["sample_id", "iteration"]
        for table in (*_rated(advantages, keys), _one_column_each(values, keys)):
            if not table.is_empty():
                samples = samples.join(table, on=keys, how="left", maintain_order="left")
        return samples

    def _scan(self, folders: Sequence[str], stage: str) -> Iterator[pl.LazyFrame]:
        """Yield a stage's tables one at a time, with the images of rollouts, to be collected before the next."""
        for files in self._files(folders, stage):
            images = [path for path in files if path.match(IMAGES)]
            table = pl.scan_parquet([path for path in files if path not in images])
            if stage == ROLLOUTS and not images:
                # Of texts, or pruned.
                pruned = "defect" in table.collect_schema().names()
                table = table.with_columns(pl.lit(None, _IMAGE_TYPE).alias(IMAGE)) if pruned else table
            elif images:
                table = table.join(
                    pl.scan_parquet(images).select("sample_id", IMAGE),
                    on="sample_id",
                    how="left",
                    maintain_order="left",
                )
            yield table

    def _files(self, folders: Sequence[str], stage: str) -> Iterator[list[Path]]:
        """Yield the files of a stage's tables, to be read before the next; remote ones are copied first."""
        reader = RunReader(self._store)
        for folder in folders:
            for artifact in _artifacts(reader, folder, stage):
                with tempfile.TemporaryDirectory() as fetched:
                    found = reader.find(artifact)
                    files = None if found is None else reader.verified_folder(found, Path(fetched))
                    if reader.damages:
                        raise _damaged(self.name, reader.damages[0].place, reader.damages[0].reason)
                    if files is not None:
                        yield sorted(files.glob("*.parquet"))


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


def _rated(advantages: pl.DataFrame, keys: list[str]) -> Iterator[pl.DataFrame]:
    """Yield reward and advantage of each sample by its first stream, and of several streams the advantages of each."""
    if advantages.is_empty():
        return
    place = pl.col(STREAM).replace_strict({stream: number for number, stream in enumerate(STREAMS)})
    yield advantages.filter(place == place.min().over(keys)).drop(STREAM)
    if advantages[STREAM].n_unique() > 1:
        named = advantages.with_columns(pl.format("advantages/{}", STREAM).alias(STREAM))
        yield named.pivot(STREAM, index=keys, values="advantage", maintain_order=True)


def _one_column_each(values: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Return a column `rewards/<label>` per reward."""
    if values.is_empty():
        return values
    named = values.with_columns(pl.format("rewards/{}", "reward").alias("reward"))
    return named.pivot("reward", index=keys, values="value", maintain_order=True)


def _joined(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    # Rows of other windows of noisy steps have other columns.
    return pl.concat(tables, how="diagonal") if tables else pl.DataFrame()


def _chosen(chosen: Iterable[int] | None, stored: Sequence[int], what: str) -> list[int]:
    wanted = list(stored) if chosen is None else list(chosen)
    for number in wanted:
        if number not in stored:
            raise InputError(what, number, f"Stored are {spans(stored)}.")
    return wanted


def _damaged(run: str, place: str, reason: str) -> InputError:
    hint = "Start the run again with its own command, which makes it again, or choose other iterations."
    return InputError(f"{run}/{place}", reason, hint)
