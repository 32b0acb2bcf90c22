"""The folder for copies goes with a call; a machine that cannot write there uses the one in the user's cache."""

import contextvars
import shutil
from pathlib import Path

import pytest

from configs.scoring import RewardSection
from configs.sections import StorageSection
from tasks.execution.call import StageCall, call_of, carry_out
from tasks.execution.stages import stage_named
from tasks.progress import listen
from tasks.storage.artifacts.store import described, open_store, use_store
from tests.progress import ProgressLog
from tests.tasks.execution.test_dispatch import reward_arguments
from tests.tasks.update.update_jobs import IMAGES


def section(bucket: str, folder: Path) -> StorageSection:
    return StorageSection(root=f"{bucket}/runs", cache_dir=str(folder), cache_gib=0.5)


@pytest.mark.slow
def test_a_machine_without_that_folder_keeps_its_own(bucket: str, tmp_path: Path) -> None:
    store = open_store(section(bucket, tmp_path / "copies"), "run")
    use_store(store)
    rollouts = IMAGES.collect()
    made = call_of(stage_named("score reward"), reward_arguments(rollouts, RewardSection(reward="jpeg")), store)
    # As it comes out of the file that it travels in.
    call = StageCall.model_validate_json(made.model_dump_json())
    shutil.rmtree(tmp_path / "copies")
    (tmp_path / "copies").write_text("here it is a file")
    log = ProgressLog()

    def elsewhere() -> None:
        listen(log)
        assert carry_out(call).error is None
        assert carry_out(call).error is None

    contextvars.copy_context().run(elsewhere)
    manifest = store.manifest_at(store.path(rollouts.folder))
    assert manifest is not None
    assert {path.name for path in (tmp_path / "cache/grpo/contents").iterdir()} >= set(manifest.files.values())
    (line,) = [line for line in log.lines if "cache_dir" in line]
    assert str(tmp_path / "copies") in line


def test_only_a_folder_that_was_chosen_goes_with_a_call(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = section(bucket, tmp_path / "copies")
    assert described(open_store(chosen, "run")) == chosen
    usual = chosen.model_copy(update={"cache_dir": None})
    assert described(open_store(usual, "run")) == usual
    monkeypatch.chdir(tmp_path)
    relative = described(open_store(section(bucket, Path("beside")), "run"))
    assert relative.cache_dir == str(tmp_path / "beside")
    here = StorageSection(root=str(tmp_path), cache_dir=str(tmp_path / "copies"))
    assert described(open_store(here, "run")) == StorageSection(root=f"file://{tmp_path}")


def test_where_copies_are_kept_does_not_name_a_call(bucket: str, tmp_path: Path) -> None:
    call = StageCall(
        stage="score reward", storage=section(bucket, tmp_path / "copies"), run="run", roots=(), code="", arguments={}
    )
    moved = call.model_copy(update={"storage": call.storage.model_copy(update={"cache_dir": None, "cache_gib": 2.0})})
    assert moved.digest == call.digest
    other = call.model_copy(update={"storage": call.storage.model_copy(update={"root": f"{bucket}/other"})})
    assert other.digest != call.digest
