"""Small runs of both modalities, written through the real store, with values that a test can work out by hand."""

import copy
import hashlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from grpo_core.rollouts.streams import Stream
from tasks.runs.layout import SCORES_FILE, source_file
from tasks.runs.lookup import write_description
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import TableWriter, write_table
from tasks.storage.schemas import ADVANTAGES, IMAGES, METRICS, REWARDS, SCHEMA_VERSION, UPDATE_STEPS, rollout_schema

PROMPTS = ("a red square", "a blue square")
GROUP_SIZE = 4
LOGPROBS, MASK = [-0.5, -0.25, -8.0], [True, True, False]
STEP_LOGPROBS, WINDOW_START = [1.25, -0.5], 1
IMAGES_OF_ONE = {0: 0.2, 3: 0.8}
"""With both streams sample 3 is the second image of token sample 0: the denoising's rewards of both."""
SECONDS = {"rollouts": 4.0, "rewards": 2.0, "advantages": 1.0, "update": 3.0}


def colour(group: int, sibling: int) -> tuple[int, int, int]:
    return (40 * group + 10, 60 * sibling + 5, 77)


def png(rgb: tuple[int, int, int], side: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), rgb).save(buffer, "PNG")
    return buffer.getvalue()


def reward_of(group: int, sibling: int, shift: float) -> float | None:
    """Sibling 2 is the best, 1 the worst, 3 has none; the second group's are all equal."""
    if sibling == 3:
        return None
    return 0.5 + shift if group else (0.4, 0.1, 0.9)[sibling] + shift


def completion(group: int, sibling: int) -> str:
    return f"answer {sibling} of group {group}"


def iteration_of(prefix: str) -> int | None:
    """Of a prefix of sample names such as i000001.d02; None for held-out samples."""
    first = prefix.split(".")[0]
    return int(first[1:]) if first[1:].isdigit() else None


class RunMaker:
    """Writes stages one at a time, so that a run can stop anywhere."""

    def __init__(
        self,
        root: Path,
        name: str = "made",
        *,
        planned: int = 2,
        prompts: tuple[str, ...] = PROMPTS,
        side: int = 8,
        modality: Literal["image", "text"] = "image",
        streams: tuple[Stream, ...] = ("tokens",),
        datasets: tuple[str, ...] = ("default",),
        labels: tuple[str, ...] = ("ssim",),
        identity: dict[str, Any] | None = None,
        settings: str = "",
    ) -> None:
        self.store = ArtifactStore(str(root), name)
        self.prompts, self.side, self.datasets, self.labels = prompts, side, datasets, labels
        self.modality, self.streams, self.texts = modality, streams, modality == "text"
        self.policy = (0, "base" * 16)
        self.written: dict[tuple[int, int], str] = {}
        self.targets: dict[int, Path] = {}
        self.sources: dict[int, list[bytes]] = {}
        kind = "causal_lm" if self.texts else "glm_image" if "tokens" in streams else "diffusers"
        policy = (
            ""
            if kind == "glm_image"
            else f"policy:\n  kind: {kind}\n  train: [{'tokens' if self.texts else 'decoder'}]\n"
        )
        config = f"run:\n  name: {name}\n  iterations: {planned}\n{policy}{settings}".encode()
        described = {"name": name, "model_digest": "base" * 16, "schema_version": SCHEMA_VERSION}
        described |= {} if identity is None else identity
        self.first_prompt, self.provenance = 0, "{}"
        write_description(self.store, described, config)

    @property
    def folder(self) -> Path:
        return Path(self.store.path())

    def dataset(self, group: int) -> str:
        return self.datasets[group % len(self.datasets)]

    def commit(
        self, staged: Path, folder: str, seconds: float, metrics: dict[str, float], rounds: int = 1
    ) -> ArtifactRef:
        return commit_artifact(
            self.store,
            staged,
            folder,
            digest=hashlib.sha256(folder.encode()).hexdigest(),
            schema_version=SCHEMA_VERSION,
            rows=rounds * len(self.prompts) * GROUP_SIZE,
            seconds=seconds,
            metrics=metrics,
        )

    def _samples(self, *prefixes: str) -> list[tuple[int, int, str]]:
        groups, siblings = range(len(self.prompts)), range(GROUP_SIZE)
        return [
            (group, sibling, f"{prefix}.p{group:04d}.s{sibling:02d}")
            for prefix in prefixes
            for group in groups
            for sibling in siblings
        ]

    def rollouts(self, place: str, prefix: str, seed: int = 0) -> ArtifactRef:
        for content in (each for images in self.sources.values() for each in images):
            self.store.write_file(source_file(hashlib.sha256(content).hexdigest()), content)
        with self.store.staging() as staged:
            # No denoising step of an evaluation is noisy.
            recorded = [each for each in self.streams if each == "tokens" or iteration_of(prefix) is not None]
            schema = rollout_schema(self.modality, recorded)
            tables = {"part": schema} if self.texts else {"part": schema, "images": IMAGES}
            for kind, each in tables.items():
                writer = TableWriter(staged / f"{kind}-00000.parquet", each)
                for group in range(len(self.prompts)):
                    rows = [self._row(group, sibling, prefix, seed) for sibling in range(GROUP_SIZE)]
                    writer.write({name: [row.get(name) for row in rows] for name in each.names})
                writer.close()
            return self.commit(staged, f"{place}/rollouts", SECONDS["rollouts"], {"tokens": 16.0})

    def place(self, sibling: int, prefix: str) -> tuple[int, int]:
        if iteration_of(prefix) is not None and "tokens" not in self.streams:
            return 0, sibling
        return (0, 1) if self.is_uneven(prefix) and sibling == 3 else (sibling, 0)

    def is_uneven(self, name: str) -> bool:
        return len(self.streams) > 1 and iteration_of(name) is not None

    def _row(self, group: int, sibling: int, prefix: str, seed: int) -> dict[str, Any]:
        target = self.targets.get(group)
        return {
            "sample_id": f"{prefix}.p{group:04d}.s{sibling:02d}",
            "iteration": iteration_of(prefix),
            "group_id": f"{prefix}.p{group:04d}",
            "prompt_id": f"prompt{group + self.first_prompt}",
            "dataset": self.dataset(group),
            "sibling": sibling,
            "token_sample": self.place(sibling, prefix)[0],
            "image_number": self.place(sibling, prefix)[1],
            "denoising_logprobs": STEP_LOGPROBS,
            "window_start": WINDOW_START,
            "prompt": self.prompts[group],
            "columns": "{}",
            "sources": [hashlib.sha256(content).hexdigest() for content in self.sources.get(group, [])],
            # As the configuration names it where the run was started.
            "target_uri": str(target.relative_to(Path(self.store.root).parent)) if target else None,
            "target_sha256": hashlib.sha256(target.read_bytes()).hexdigest() if target else None,
            "token_ids": [1, 2, 3],
            "rollout_logprobs": LOGPROBS,
            "loss_mask": MASK,
            "length": 2,
            "max_length": 2 if self.texts else 3,
            "finished": not self.texts or sibling != 1,
            "height": self.side,
            "width": self.side,
            "seed": seed + group * GROUP_SIZE + sibling,
            "policy_version": self.policy[0],
            "policy_digest": self.policy[1],
            "completion": self.written.get((group, sibling), completion(group, sibling)),
            "image": {"bytes": png(colour(group, sibling), self.side), "path": f"{sibling}.png"},
        }

    def rewards(self, place: str, prefix: str, shift: float = 0.0) -> tuple[ArtifactRef, ...]:
        """Write the scores of every label; each takes less time than the one before."""
        values = [reward_of(group, sibling, shift) for group, sibling, _ in self._samples(prefix)]
        return tuple(
            self._scores(
                f"{place}/rewards/{label}", prefix, values, SECONDS["rewards"] / number, self._metrics(label, shift)
            )
            for number, label in enumerate(self.labels, start=1)
        )

    def guardrail(self, version: int, label: str, mean: float) -> ArtifactRef:
        values: list[float | None] = [mean] * len(self._samples("heldout"))
        metrics = {f"rewards/{label}/mean": mean, f"rewards/{label}/null": 0.0}
        return self._scores(f"evaluations/{version:06d}/guardrails/{label}", "heldout", values, 1.0, metrics)

    def _scores(
        self, folder: str, prefix: str, values: list[float | None], seconds: float, metrics: dict[str, float]
    ) -> ArtifactRef:
        columns = {
            "sample_id": [name for *_, name in self._samples(prefix)],
            "iteration": [iteration_of(prefix)] * len(values),
            "reward": [folder.rsplit("/", 1)[-1]] * len(values),
            "value": values,
            "raw": values,
            "failure": [None] * len(values),
            "seconds": [0.0] * len(values),
            "provenance": [self.provenance] * len(values),
        }
        with self.store.staging() as staged:
            write_table(staged / SCORES_FILE, REWARDS, columns)
            return self.commit(staged, folder, seconds, metrics)

    def _metrics(self, label: str, shift: float, rounds: int = 1) -> dict[str, float]:
        metrics = {"mean": 0.5 + shift, "null": float(rounds * len(self.prompts)), "failed": 0.0}
        return {f"rewards/{label}/{kind}": value for kind, value in metrics.items()}

    def _compared(self, stream: Stream, group: int, sibling: int, name: str, shift: float) -> list[float | None]:
        """The sample's reward by a stream; empty where it is not compared."""
        if not self.is_uneven(name):
            return [reward_of(group, sibling, shift)]
        if stream == "tokens":
            return [] if sibling == 3 else [reward_of(group, sibling, shift)]
        return [IMAGES_OF_ONE[sibling]] if sibling in IMAGES_OF_ONE else []

    def _rated(
        self, stream: Stream, group: int, sibling: int, name: str, value: float | None, *, dropped: bool
    ) -> dict[str, Any]:
        return {
            "sample_id": name,
            "iteration": iteration_of(name),
            "group_id": name.rsplit(".", 1)[0],
            "prompt_id": f"prompt{group}",
            "dataset": self.dataset(group),
            "stream": stream,
            "reward": value,
            "kl_penalty": None,
            "advantage": None if value is None or dropped else 2 * value - 1,
            "group_mean": 0.5,
            "group_std": 0.1,
            "dropped": dropped,
            "imputed": 0,
            "reward_breakdown": [{"reward": label, "value": value, "scaled": value} for label in self.labels],
        }

    def advantages(self, place: str, *prefixes: str, shift: float = 0.0) -> ArtifactRef:
        """Write the advantages of these sampling rounds; with more than one, groups without spread are dropped."""
        samples, redrawn = self._samples(*prefixes), len(prefixes) > 1
        metrics = {"reward": 0.5 + shift, "rounds": float(len(prefixes)), "groups_dropped": 0.0}
        if redrawn:
            metrics["groups_dropped"] = float(len(prefixes) * (len(self.prompts) - 1))
        if len(self.datasets) > 1:
            means = enumerate(self.datasets)
            metrics |= {f"datasets/{name}/reward": 0.5 + shift + index / 10 for index, name in means}
        if len(self.streams) > 1:
            metrics |= {"denoising/reward": 0.25 + shift, "denoising/reward_std_within_groups": 0.3}
        rows = [
            self._rated(stream, *sample, value, dropped=redrawn and sample[0] > 0)
            for stream in self.streams
            for sample in samples
            for value in self._compared(stream, *sample, shift)
        ]
        with self.store.staging() as staged:
            columns = {name: [row[name] for row in rows] for name in ADVANTAGES.names}
            write_table(staged / "advantages.parquet", ADVANTAGES, columns)
            return self.commit(staged, f"{place}/advantages", SECONDS["advantages"], metrics, len(prefixes))

    def update(self, version: int) -> ArtifactRef:
        with self.store.staging() as staged:
            for stream in self.streams:
                own = staged / stream
                own.mkdir()
                (own / "adapter_model.safetensors").write_bytes(b"weights of %d" % version)
                write_table(own / "update_steps.parquet", UPDATE_STEPS, {name: [] for name in UPDATE_STEPS.names})
            state = {"policy_version": version, "policy_digest": f"{version:064d}"}
            (staged / "training_state.json").write_text(json.dumps(state))
            metrics = {"kl": 0.01 * version, "entropy": 2.0, "grad_norm": 1.0}
            return self.commit(staged, f"policies/{version:06d}", SECONDS["update"], metrics)

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        path = self.folder / f"iteration_{iteration:06d}" / "metrics.parquet"
        columns = {"iteration": [iteration] * len(values), "metric": list(values), "value": list(values.values())}
        write_table(path, METRICS, columns)

    def iteration(self, number: int, rounds: int = 1) -> None:
        place, shift = f"iteration_{number:06d}", (number - 1) / 10
        prefixes = [f"i{number:06d}" + (f".d{draw:02d}" if draw > 1 else "") for draw in range(1, rounds + 1)]
        for draw, prefix in enumerate(prefixes, start=1):
            self.draw(place, draw, prefix, prefixes[:draw], shift=shift)
        self.update(number)
        metrics = {"num_tokens": 16.0 * (number - 1 + rounds)}
        for label in self.labels:
            metrics |= self._metrics(label, shift, rounds)
        scored = self.store.find(f"{place}/advantages" if rounds == 1 else f"{place}/round_{rounds:02d}/advantages")
        metrics |= scored.metrics
        self.metrics(number, metrics | {"kl": 0.01 * number, "entropy": 2.0, "grad_norm": 1.0})

    def draw(
        self, place: str, draw: int, prefix: str, prefixes: list[str], *, shift: float = 0.0, seed: int = 0
    ) -> None:
        folder = place if draw == 1 else f"{place}/round_{draw:02d}"
        self.rollouts(folder, prefix, seed)
        self.rewards(folder, prefix, shift)
        self.advantages(folder, *prefixes, shift=shift)

    def evaluation(self, version: int, *, shift: float, seed: int = 0) -> None:
        self.draw(f"evaluations/{version:06d}", 1, "heldout", ["heldout"], shift=shift, seed=seed)


_MADE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
_WHOLE: dict[str, RunMaker] = {}


def whole_run(root: Path, name: str = "made", **options: Any) -> RunMaker:
    """Two iterations of two, evaluated before and after; made once with the same options, and copied."""
    key = repr((name, options))
    if key not in _WHOLE:
        _WHOLE[key] = maker = RunMaker(Path(_MADE.name, str(len(_WHOLE))), name, **options)
        maker.evaluation(0, shift=0.0)
        for number in (1, 2):
            maker.iteration(number)
        maker.evaluation(2, shift=0.25)
    maker = copy.copy(_WHOLE[key])
    maker.store, maker.written, maker.targets, maker.sources = ArtifactStore(str(root), name), {}, {}, {}
    shutil.copytree(_WHOLE[key].folder, maker.folder)
    return maker


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(bytes(content))


def contents(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below a folder: paths, times of change, bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }
