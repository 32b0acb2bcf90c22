"""Files of rollouts and a stored run that are drawn, and what it costs to write, read and score them again.

The rollouts are drawn, not sampled: ids of a large vocabulary by Zipf's law, log-probs with random last digits, texts
of one random word a token, and images of noise, which nothing can pack.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from configs.loader import read_config
from configs.scoring import RewardSection
from flows import rescore
from grpo_core.rollouts.images import encode_png
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.process import CHECKOUT
from tasks.rewards.score_rewards import score_reward_task
from tasks.runs.layout import IMAGES_FILE, ROLLOUTS, SamplingRound, iteration_folder
from tasks.runs.lookup import write_description
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.files import fsync_folder, hashes_of
from tasks.storage.parquet import TableWriter
from tasks.storage.schemas import IMAGE_ROLLOUTS, IMAGES, SCHEMA_VERSION, TEXT_ROLLOUTS
from tests.bench.page import Row, alternate

SIBLINGS, VOCABULARY = 8, 151_936
RUN, FILE = "stored", "part-00000.parquet"
STORED = ("answer", "format")
Columns = Mapping[str, Sequence[Any]]


def measure() -> Iterator[Row]:
    """What storage costs."""
    for tokens, groups in ((64, 128), (1_024, 16)):
        yield from measure_file(f"{SIBLINGS * groups:,} texts of {tokens} tokens", TEXT_ROLLOUTS, groups, tokens)
    yield from measure_file("64 images of 512 x 512, 256 tokens", IMAGE_ROLLOUTS, 8, 256, side=512)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), iterations=100, rows=1_000)
        other_weights = [{"reward": name, "weight": weight} for name, weight in zip(STORED, (0.9, 0.1), strict=True)]
        yield measure_rescoring(Path(folder), "other weights", other_weights)
        partial = {"reward": "format", "name": "partial", "settings": {"mode": "partial"}}
        yield measure_rescoring(Path(folder), "a new reward", [*other_weights, partial])


def measure_file(what: str, schema: pa.Schema, groups: int, tokens: int, side: int = 0) -> Iterator[Row]:
    """Measure files of rollouts: their bytes, and writing and reading them, verified, beside a copy of the same bytes.

    What is written is on the disk at the end, the copy too.
    """
    tables = {FILE: schema, **({IMAGES_FILE.format(0): IMAGES} if side else {})}
    drawn = list(draw_groups(schema, groups, tokens, side=side))
    with tempfile.TemporaryDirectory() as folder:
        staged, copies = Path(folder) / "staged", Path(folder) / "copies"
        copies.mkdir()

        def write() -> None:
            for name, each in tables.items():
                write_table(staged, each, drawn, name)
            fsync_folder(staged)

        def copy() -> None:
            for name in tables:
                shutil.copyfile(staged / name, copies / name)

        def write_copy() -> None:
            copy()
            for name in tables:
                with (copies / name).open("rb") as file:
                    os.fsync(file.fileno())

        def read() -> None:
            hashes_of(staged)
            for name in tables:
                pq.read_table(staged / name)

        write()
        size = sum((staged / name).stat().st_size for name in tables)
        count = sum(sum(columns["length"]) for columns in drawn)
        if not side:
            yield Row(what=what, unit="bytes/token", ours=(size / count,), at_most=12.0)
        for name, ours, theirs in (("write", write, write_copy), ("read", read, copy)):
            seconds, copied = alternate(5, ours, theirs)
            label, peer = f"{name} {what}", "a plain copy"
            yield Row(what=label, unit="s", ours=seconds, peer=peer, theirs=copied, at_most=2.0)


def measure_rescoring(root: Path, name: str, rewards: Sequence[Mapping[str, Any]]) -> Row:
    """Measure a rescoring in its flow, with report and page; nothing is reused from an earlier one."""
    summary = rescore(RUN, rewards=rewards, name=name.replace(" ", "-"), root=str(root), progress=False).summary
    what = f"re-score {summary.samples:,} rollouts with {name}"
    return Row(what=what, unit="s", ours=(summary.seconds["total"],), at_most=10.0)


def draw_groups(
    schema: pa.Schema, groups: int, tokens: int, *, iteration: int = 1, side: int = 0
) -> Iterator[dict[str, Sequence[Any]]]:
    """Draw groups of SIBLINGS rows, by column: half of `tokens` or more, and images of noise of this side."""
    generator = np.random.default_rng(iteration)
    weights = 1 / (np.arange(VOCABULARY) + 2.7)
    edges, chances = np.cumsum(weights / weights.sum()), np.log(weights / weights.sum())
    ids, letters = generator.permutation(VOCABULARY).astype(np.int32), list("abcdefghijklmnopqrstuvwxyz")
    words = ["".join(generator.choice(letters, generator.integers(2, 7))) for _ in range(5_000)]
    for group in range(groups):
        drawn = generator.random((SIBLINGS, tokens))
        lengths = generator.integers(tokens // 2, tokens + 1, SIBLINGS).tolist()
        ranks = [np.searchsorted(edges, row[:size]) for row, size in zip(drawn, lengths, strict=True)]
        texts = [" ".join(words[rank % len(words)] for rank in row) for row in ranks]
        name = f"i{iteration:06d}.p{group:04d}"
        same = {
            "iteration": iteration,
            "group_id": name,
            "prompt_id": f"{group:016x}",
            "dataset": "default",
            "prompt": f"Sort the letters of {texts[0][:40]}",
            "columns": f'{{"answer": "{texts[0][:20]}"}}',
            "prompt_length": 20,
            "max_length": tokens,
            "temperature": 1.0,
            "policy_version": iteration - 1,
            "policy_digest": "0" * 64,
            "height": side,
            "width": side,
        }
        logprobs = [(chances[row] * generator.random(len(row))).astype(np.float32) for row in ranks]
        noise = generator.integers(0, 256, (SIBLINGS if side else 0, side, side, 3), dtype=np.uint8)
        known = {key: [value] * SIBLINGS for key, value in same.items()} | {
            "sample_id": [f"{name}.s{sibling:02d}" for sibling in range(SIBLINGS)],
            "sibling": range(SIBLINGS),
            "token_ids": pa.array([ids[row] for row in ranks]),
            "rollout_logprobs": pa.array(logprobs),
            "loss_mask": pa.array([np.ones(size, dtype=bool) for size in lengths]),
            "length": lengths,
            "finished": [size < tokens for size in lengths],
            "seed": generator.integers(0, 2**62, SIBLINGS),
            "completion": texts,
            "image": [{"bytes": encode_png(Image.fromarray(each)), "path": f"{name}.png"} for each in noise],
        }
        yield {name: known.get(name, [None] * SIBLINGS) for name in (*schema.names, "image")}


def write_table(
    folder: Path, schema: pa.Schema, groups: Iterator[Columns] | Sequence[Columns], name: str = FILE
) -> tuple[str, int]:
    """Write a file of rollouts; return its digest and its rows."""
    writer = TableWriter(folder / name, schema)
    for columns in groups:
        writer.write(columns)
    return writer.close(), writer.rows


def write_run(root: Path, iterations: int, rows: int) -> None:
    """Store a run of texts of up to 16 tokens with scores and advantages, through the code of their stages."""
    store = ArtifactStore(str(root), RUN)
    config = read_config(CHECKOUT / "configs" / "tiny_text.yaml", [f"run.name={RUN}", f"storage.root={root}"])
    described = yaml.safe_dump(config.model_dump(mode="json")).encode()
    write_description(store, {"schema_version": SCHEMA_VERSION}, described)
    use_store(store)
    mix = tuple(RewardSection(reward=name, weight=0.5) for name in STORED)
    for number in range(1, iterations + 1):
        folder, title = iteration_folder(number), f"iteration {number}"
        with store.staging() as staged:
            digest, count = write_table(
                staged, TEXT_ROLLOUTS, draw_groups(TEXT_ROLLOUTS, rows // SIBLINGS, 16, iteration=number)
            )
            rollouts = commit_artifact(
                store,
                staged,
                f"{folder}/{ROLLOUTS}",
                digest=digest,
                schema_version=SCHEMA_VERSION,
                rows=count,
                seconds=0.0,
                metrics={},
            )
        scored = {
            each.label: score_reward_task.fn(rollouts, each, f"{folder}/rewards", title, config.placement)
            for each in mix
        }
        rounds = (SamplingRound(rollouts, scored),)
        compute_advantages_task.fn(rounds, config.streams, mix, config.advantages, folder, title)
