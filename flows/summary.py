"""What a finished run tells: rewards first and last, time by stage, where to look."""

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from flows.preparation import Run
from flows.run_figures import RunFigures
from tasks.reports.iteration import IterationRecord
from tasks.reports.pictures import SheetRow, contact_sheet, read_pictures
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.targets import TargetReference, load_target

CONTACT_SHEET = "contact_sheet.png"


class TrainSummary(RunFigures):
    """The end of a run; `seconds.total` is this start's wall time, the stages' are as measured when each ran.

    Attributes:
        contact_sheet: picture of before and after, if there are held-out prompts.
        set_aside: what this start moved out of the way, and why.
    """

    contact_sheet: str | None
    set_aside: list[str]


def summarize(
    run: Run,
    policy: PolicyRef,
    iterations: Sequence[IterationRecord],
    heldout: Mapping[int, ArtifactRef],
    seconds: float,
) -> TrainSummary:
    """Gather the figures and draw the contact sheet."""
    rewards = [record.metrics["reward"] for record in iterations if "reward" in record.metrics]
    by_stage = {"total": seconds}
    for record in iterations:
        for name, value in record.metrics.items():
            if name.startswith("seconds/"):
                stage = name.removeprefix("seconds/")
                by_stage[stage] = by_stage.get(stage, 0.0) + value
    versions = sorted(heldout)
    sheet = _draw_sheet(run, heldout[versions[0]], heldout[versions[-1]]) if versions else None
    return TrainSummary(
        run=run.config.run.name,
        iterations=policy.version,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        heldout_before=heldout[versions[0]].metrics.get("reward") if versions else None,
        heldout_after=heldout[versions[-1]].metrics.get("reward") if versions else None,
        policy_digest=policy.digest,
        seconds=by_stage,
        folder=run.store.path(),
        contact_sheet=sheet,
        set_aside=run.store.reasons,
    )


def _draw_sheet(run: Run, before: ArtifactRef, after: ArtifactRef) -> str:
    store, columns = run.store, ["sample_id", "group_id", "prompt", "target_uri", "target_sha256"]
    sides = []
    with tempfile.TemporaryDirectory() as fetched:
        for name, advantages in (("before", before), ("after", after)):
            place = advantages.folder.rsplit("/", 1)[0]
            rollouts_ref = store.find(f"{place}/rollouts")
            assert rollouts_ref is not None, "an evaluation keeps its rollouts"
            rollouts = store.local_files(rollouts_ref, Path(fetched) / name / "rollouts")
            scored = store.local_files(advantages, Path(fetched) / name / "advantages")
            table = pl.read_parquet(sorted(rollouts.glob("*.parquet")), columns=columns).join(
                pl.read_parquet(scored / "advantages.parquet", columns=["sample_id", "reward"]),
                on="sample_id",
                maintain_order="left",
            )
            sides.append((table, read_pictures(rollouts, table["sample_id"].to_list())))
    rows = []
    for (key,), group in sides[0][0].group_by("group_id", maintain_order=True):
        later = sides[1][0].filter(pl.col("group_id") == key)
        first = group.row(0, named=True)
        rows.append(
            SheetRow(
                prompt=first["prompt"],
                target=load_target(TargetReference(first["target_uri"], first["target_sha256"]))
                if first["target_uri"]
                else None,
                before=[sides[0][1][sample] for sample in group["sample_id"]],
                after=[sides[1][1][sample] for sample in later["sample_id"]],
                reward_before=_mean(group["reward"]),
                reward_after=_mean(later["reward"]),
            )
        )
    buffer = io.BytesIO()
    contact_sheet(rows, title=f"{run.config.run.name}: held-out prompts").save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def _mean(rewards: pl.Series) -> float | None:
    value = rewards.mean()
    return float(value) if isinstance(value, int | float) else None
