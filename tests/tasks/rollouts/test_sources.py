"""Images in prompts as a run keeps them: stored once, named by every row, verified, and read by an update."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.prompts.source_images import SourceReference
from tasks.rollouts.collect_rollouts import collect_rollouts_task, draw_baseline_task
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import source_file
from tasks.runs.sources import read_sources, sources_of, store_sources
from tasks.runs.stored_streams import StatesWriter, read_denoising
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.rows import read_training_rows
from tests.flows.conftest import heard_of
from tests.tasks.reports.made_runs import flip_last_byte
from tests.tasks.rollouts.both_streams import PLACEMENT, made_group, random_states
from tests.tasks.rollouts.both_streams import plan as plan_of_images
from tests.tasks.stage_calls import png, round_of, table_of
from tests.tasks.update.update_jobs import ABOUT_IMAGES, advantages_table

A, B = SourceImage.of(png(1)), SourceImage.of(png(2))
IMAGES = {each.digest: each for each in (A, B)}
OF_PROMPTS: tuple[tuple[SourceImage, ...], ...] = ((A,), (), (B, A))


def reference(image: SourceImage) -> SourceReference:
    return SourceReference(
        image.digest, ImageSize(6, 4), "data.prompts: set.jsonl, line 1", "1.png", lambda: image.content
    )


REFERENCES = {digest: reference(image) for digest, image in IMAGES.items()}


def plan(images: Sequence[tuple[SourceImage, ...]] = OF_PROMPTS) -> RolloutPlan:
    prompts = [
        Prompt(f"id{place}", f"where is the {('red', 'blue', 'green')[place]} circle?", {}, tuple(map(reference, each)))
        for place, each in enumerate(images)
    ]
    return round_of([DrawnPrompt("default", prompt, None) for prompt in prompts], shared_noise=False)


def policy() -> PolicyRef:
    return PolicyRef(version=0, digest=ABOUT_IMAGES.spec().digest)


def collect(planned: RolloutPlan) -> ArtifactRef:
    return collect_rollouts_task.fn(policy(), planned, ABOUT_IMAGES.spec(), ABOUT_IMAGES.rollout, False, PLACEMENT)


def stored(store: ArtifactStore) -> dict[str, bytes]:
    folder = Path(store.path("sources"))
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


class TestStoring:
    def test_each_is_stored_once_as_the_file_that_it_is(self, store: ArtifactStore) -> None:
        known: set[str] = set()
        store_sources(store, plan(((A,), (A, A), ())).named_sources, REFERENCES, known)
        assert stored(store) == {A.digest: A.content}
        before = Path(store.path(source_file(A.digest))).stat().st_mtime_ns
        store_sources(store, plan().named_sources, REFERENCES, known)
        assert stored(store) == {image.digest: image.content for image in (A, B)}
        # Another start verifies, and needs the prompts no more.
        store_sources(store, plan().named_sources, {}, set())
        assert Path(store.path(source_file(A.digest))).stat().st_mtime_ns == before
        assert known == {A.digest, B.digest}

    def test_a_damaged_one_is_set_aside_and_restored_from_the_prompts(self, store: ArtifactStore) -> None:
        store_sources(store, plan().named_sources, REFERENCES, set())
        path = Path(store.path(source_file(A.digest)))
        flip_last_byte(path)
        damaged = path.read_bytes()
        _, heard = heard_of(lambda: store_sources(store, plan().named_sources, REFERENCES, set()))
        assert path.read_bytes() == A.content
        assert [each.read_bytes() for each in Path(store.path("quarantine")).rglob(A.digest)] == [damaged]
        assert A.digest in heard.lines[0]

    def test_what_the_prompts_lost_too_is_refused(self, store: ArtifactStore) -> None:
        with pytest.raises(InputError, match="prompt id2") as caught:
            store_sources(store, plan(((), (), (B,))).named_sources, {}, set())
        assert (caught.value.place, caught.value.value) == (f"run/{source_file(B.digest)}", "missing")

    def test_one_that_cannot_be_decoded_is_refused_with_its_row_and_not_stored(self, store: ArtifactStore) -> None:
        broken = SourceImage.of(A.content[:-30])
        with pytest.raises(InputError, match=r"set\.jsonl, line 1"):
            store_sources(store, plan(((broken,),)).named_sources, {broken.digest: reference(broken)}, set())
        assert stored(store) == {}


class TestReading:
    def test_a_file_of_the_run_itself_or_of_the_run_of_the_rollouts(self, store: ArtifactStore) -> None:
        store_sources(store, plan().named_sources, REFERENCES, set())
        wanted = {A.digest: "sample s"}
        assert read_sources(store, wanted) == {A.digest: A}
        other = ArtifactStore(store.root, "other")
        assert read_sources(other, wanted, ["run"])[A.digest].content == A.content
        store.give_to("run~1", ["sources"])
        assert read_sources(other, wanted, ["run"])[A.digest].content == A.content
        assert read_sources(store, wanted)[A.digest].content == A.content

    def test_a_flipped_byte_is_refused_with_the_digest_and_the_row(self, store: ArtifactStore) -> None:
        store_sources(store, plan().named_sources, REFERENCES, set())
        flip_last_byte(Path(store.path(source_file(B.digest))))
        assert read_sources(store, {A.digest: "sample s"}) == {A.digest: A}
        with pytest.raises(InputError, match=r"sample s.*restores it") as caught:
            read_sources(store, {B.digest: "sample s"})
        assert caught.value.place == f"run/{source_file(B.digest)}"
        assert str(caught.value.value).startswith("sha256 ")

    def test_several_are_read_at_once(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store_sources(store, plan().named_sources, REFERENCES, set())
        real, at_once = ArtifactStore.read_shared, threading.Barrier(2)

        def awaited(*arguments: Any, **options: Any) -> bytes | None:
            at_once.wait(timeout=30)
            return real(*arguments, **options)

        monkeypatch.setattr(ArtifactStore, "read_shared", awaited)
        assert read_sources(store, {A.digest: "sample s", B.digest: "sample t"}) == IMAGES

    def test_rows_without_images_among_others(self) -> None:
        table = pl.DataFrame({"sources": [[A.digest], [], None, [B.digest, A.digest]]})
        assert sources_of(table, IMAGES) == ((A,), (), (), (B, A))
        assert sources_of(table[1:3], IMAGES) is None


class TestStages:
    def test_rollouts_name_them_and_an_update_reads_them(self, store: ArtifactStore, tmp_path: Path) -> None:
        planned = plan()
        store_sources(store, planned.named_sources, REFERENCES, set())
        rollouts = collect(planned)
        table = table_of(store, rollouts)
        assert table["sources"].to_list() == [[A.digest]] * 2 + [[]] * 2 + [[B.digest, A.digest]] * 2
        names = table["sample_id"].to_list()
        advantages = advantages_table(rollouts, {(names[row], "tokens"): 1.0 for row in (1, 2, 5)})
        family = policy_family("vision_lm")

        def read() -> TokenBatch:
            rows = read_training_rows(
                store, [rollouts], advantages, policy(), family, tmp_path, stream="tokens", max_staleness=0
            ).rows
            return rows.actions

        assert read().sources == ((A,), (), (B, A))
        flip_last_byte(Path(store.path(source_file(A.digest))))
        with pytest.raises(InputError, match=f"sample {names[1]}"):
            read()

    def test_collecting_refuses_what_was_not_stored(self, store: ArtifactStore) -> None:
        with pytest.raises(InputError, match="prompt id0"):
            collect(plan())

    def test_denoising_steps_and_their_drafts_have_them(self, tmp_path: Path) -> None:
        request = plan_of_images(images_of_samples=(1, 1), prompts=1).request(plan_of_images(prompts=1).groups[0])
        states = {name: random_states(seed, (2, 2), torch.float16) for seed, name in enumerate(request.sample_ids)}
        with_states = made_group(request, states)
        writer = StatesWriter(tmp_path / "rollouts")
        writer.write(with_states)
        writer.close()
        table = pl.DataFrame(
            {
                "sample_id": request.sample_ids,
                "prompt": [request.prompt] * 2,
                "window_start": [0, 0],
                "width": [1, 1],
                "height": [1, 1],
                "denoising_logprobs": [[0.0, 0.0]] * 2,
                "token_ids": [[1], [2]],
                "loss_mask": [[True], [True]],
                "temperature": [1.0, 1.0],
            }
        )
        actions = read_denoising(table, [tmp_path / "rollouts"], tmp_path, 2, ((A,), (B, A))).actions
        assert actions.sources == actions.drafts.sources == ((A,), (B, A))


def test_baselines_name_them_too(store: ArtifactStore, tmp_path: Path) -> None:
    planned = plan_of_images(prompts=1)
    (tmp_path / "target.png").write_bytes(B.content)
    target = {"target_uri": str(tmp_path / "target.png"), "target_sha256": B.digest, "sources": (A.digest,)}
    (group,) = planned.groups
    planned = planned.model_copy(update={"groups": (group.model_copy(update=target),)})
    baseline = draw_baseline_task.fn("blank", planned, PLACEMENT)
    assert table_of(store, baseline)["sources"].to_list() == [[A.digest]]
