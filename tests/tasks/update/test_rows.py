"""Which stored rows an update trains: those with an advantage in its stream."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from configs.placement import PlacementSection
from configs.sections import LoraSection
from configs.training import ParitySection
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.ragged import RaggedRows, RaggedTokens
from grpo_core.rollouts.streams import Stream
from tasks.execution.resources import resource, run_resources
from tasks.models.resident import ResidentPolicy
from tasks.runs.layout import PART_FILE
from tasks.runs.stored_streams import read_tokens
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.schemas import ADVANTAGES, IMAGE_ROLLOUTS
from tasks.update.rows import read_training_rows
from tests.tasks.advantages.test_compute_advantages import commit_rows
from tests.tasks.update.update_jobs import (
    IMAGES,
    TEXTS,
    UPDATE,
    Modality,
    advantages_of,
    alone,
    changed,
    commit,
    job_of,
)

POLICY = PolicyRef(version=0, digest="d" * 64)


def rollouts(store: ArtifactStore, names: list[str], iteration: int = 1) -> ArtifactRef:
    """Tokens [1], [1, 2], ... with log-probs of -1 each."""
    rows = len(names)
    lengths = range(1, rows + 1)
    columns = {
        "sample_id": names,
        "prompt": ["a cup"] * rows,
        "token_ids": [[*range(1, length + 1)] for length in lengths],
        "rollout_logprobs": [[-1.0] * length for length in lengths],
        "loss_mask": [[True] * length for length in lengths],
        "finished": [True] * rows,
        "max_length": [9] * rows,
        "temperature": [1.0] * rows,
        "top_k": [0] * rows,
        "top_p": [1.0] * rows,
        "min_p": [0.0] * rows,
        "height": [32] * rows,
        "width": [32] * rows,
        "num_inference_steps": [2] * rows,
        "guidance_scale": [1.0] * rows,
        "policy_version": [0] * rows,
        "policy_digest": [POLICY.digest] * rows,
    }
    return commit_rows(store, f"iteration_{iteration:06d}/rollouts", IMAGE_ROLLOUTS, columns)


def advantages(
    store: ArtifactStore, values: list[tuple[str, Stream, float | None]], reward: float | None = 0.5
) -> ArtifactRef:
    names, streams, numbers = zip(*values, strict=True)
    columns = {"sample_id": names, "stream": streams, "advantage": numbers, "reward": [reward] * len(values)}
    return commit_rows(store, "iteration_000009/advantages", ADVANTAGES, columns)


def read(
    store: ArtifactStore, parts: list[ArtifactRef], scores: ArtifactRef, folder: Path, stream: Stream = "tokens"
) -> RaggedRows:
    family = policy_family("glm_image")
    return read_training_rows(store, parts, scores, POLICY, family, folder, stream=stream, max_staleness=0).rows


def test_rows_with_an_advantage_in_the_stream_and_no_others(store: ArtifactStore, tmp_path: Path) -> None:
    drawn = rollouts(store, ["a", "b", "c", "d"])
    scores = advantages(
        store, [("a", "tokens", 1.0), ("a", "denoising", 7.0), ("b", "denoising", 8.0), ("c", "tokens", None)]
    )
    rows = read(store, [drawn], scores, tmp_path)
    assert rows.sample_ids == ("a",)
    assert rows.advantages.tolist() == [1.0]


def test_tables_of_several_rounds_are_read_as_one(store: ArtifactStore, tmp_path: Path) -> None:
    parts = [rollouts(store, ["a", "b"]), rollouts(store, ["c"], 2)]
    scores = advantages(store, [("a", "tokens", 1.0), ("b", "tokens", None), ("c", "tokens", 3.0)])
    rows = read(store, parts, scores, tmp_path)
    assert rows.sample_ids == ("a", "c")
    assert rows.advantages.tolist() == [1.0, 3.0]
    assert (rows.max_length, rows.rollout_logprobs.values.tolist()) == (9, [-1.0, -1.0])
    rows = read(store, [rollouts(store, ["a"])], advantages(store, [("a", "tokens", None)]), tmp_path)
    assert (len(rows), rows.max_length) == (0, 9)


def test_without_advantages_or_rewards_an_update_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    drawn, scores = rollouts(store, ["a"]), advantages(store, [("a", "tokens", 1.0)])
    with pytest.raises(ValueError, match="denoising"):
        read(store, [drawn], scores, tmp_path, "denoising")
    drawn, scores = rollouts(store, ["a"]), advantages(store, [("a", "tokens", None)], reward=None)
    with pytest.raises(ValueError, match="null"):
        read(store, [drawn], scores, tmp_path)


# An order of magnitude below the default: fp32 on the tiny models differs by 7e-6 nats at most.
STRICT = UPDATE.model_copy(
    update={"micro_batch_size": 4, "parity": ParitySection(max_difference=5e-5, mean_difference=5e-6)}
)
SLOW = pytest.mark.slow
CHOICES = [
    pytest.param(
        TEXTS, {"use_rslora": True, "use_dora": True, "modules_to_save": ("norm",)}, id="dora, a whole module"
    ),
    pytest.param(TEXTS, {"init_lora_weights": "pissa", "use_dora": True}, id="pissa, dora", marks=SLOW),
    pytest.param(TEXTS, {"init_lora_weights": "olora"}, id="olora", marks=SLOW),
    pytest.param(IMAGES, {"use_dora": True, "modules_to_save": ("lm_head", "norm")}, id="images, dora", marks=SLOW),
    pytest.param(IMAGES, {"init_lora_weights": "pissa"}, id="images, pissa", marks=SLOW),
]


@pytest.mark.parametrize(("modality", "choice"), CHOICES)
def test_a_choice_of_peft_passes_the_gate_and_resumes(
    modality: Modality, choice: dict[str, Any], store: ArtifactStore, tmp_path: Path
) -> None:
    """Two versions, each from its own rollouts, and the second once more in a process that begins with it."""
    adapted = changed(modality, lora=LoraSection(rank=4, alpha=8.0, **choice))
    update = STRICT.model_copy(update={"epochs": 1})
    with run_resources():
        rollouts = adapted.collect()
        job = job_of(adapted, rollouts, advantages_of(rollouts), update=update)
        policy = commit(store, job, tmp_path / "first", alone(job, tmp_path / "first"))
        rollouts = adapted.collect(policy)
        job = job_of(adapted, rollouts, advantages_of(rollouts), policy=policy, update=update)
        second = alone(job, tmp_path / "second")
    with run_resources():
        assert alone(job, tmp_path / "again") == second
    # The first step is taken on unchanged weights, which are those of the reference.
    assert policy.checkpoint.metrics["kl"] < second.metrics["kl"]
    assert second.policy.digest != policy.digest


@pytest.mark.parametrize("modality", [TEXTS, pytest.param(IMAGES, marks=SLOW)], ids=["texts", "images"])
def test_another_attention_passes_the_gate(modality: Modality, store: ArtifactStore, tmp_path: Path) -> None:
    eager = changed(modality, attn_implementation="eager")
    rollouts = eager.collect()
    alone(job_of(eager, rollouts, advantages_of(rollouts), update=STRICT), tmp_path / "eager")
    policy = resource(ResidentPolicy).at(
        PolicyRef(version=0, digest=eager.spec().digest), eager.spec(), eager.rollout, PlacementSection(devices="cpu")
    )
    assert {
        module.config._attn_implementation
        for name, module in policy.components["tokens"].trained.model.named_modules()
        if name.endswith("self_attn")
    } == {"eager"}


def test_the_support_of_kept_rows_is_found_in_one_search_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, searches, real = [f"s{number:03d}" for number in range(100)], list[int](), pc.is_in

    def counted(values: Any, wanted: Any) -> Any:
        searches.append(len(values))
        return real(values, wanted)

    monkeypatch.setattr(pc, "is_in", counted)
    # The support of the token of row 7 is 7 and 8.
    rows = {
        "sample_id": names,
        "prompt": ["a cup"] * 100,
        "token_ids": [[number] for number in range(100)],
        "rollout_logprobs": [[-1.0]] * 100,
        "loss_mask": [[True]] * 100,
        "support_ids": [[number, number + 1] for number in range(100)],
        "support_counts": [[2]] * 100,
        "finished": [True] * 100,
        "temperature": [1.0] * 100,
        "prompt_length": [*range(100)],
    }
    table = pa.table(rows, schema=pa.schema([(name, IMAGE_ROLLOUTS.field(name).type) for name in rows]))
    for part, start in enumerate((0, 60)):
        pq.write_table(table.slice(start, 60), tmp_path / PART_FILE.format(part), row_group_size=25)
    kept = pl.DataFrame(table).filter(pl.col("sample_id").is_in([*names[5:40], *names[58:63], names[99]]))
    tokens = read_tokens(kept.drop("support_ids"), [tmp_path], tmp_path, 1)
    assert isinstance(tokens.actions, RaggedTokens)
    chosen = [*range(5, 40), *range(58, 63), 99]
    read = tokens.actions.select([*range(len(chosen))]).support
    assert read is not None
    assert read.ids.tolist() == [each for number in chosen for each in (number, number + 1)]
    assert read.counts.tolist() == [[2]] * len(chosen)
    assert searches == [60, 40]
    assert tokens.prompt_lengths.tolist() == chosen
