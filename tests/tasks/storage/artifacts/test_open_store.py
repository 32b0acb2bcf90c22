"""The folder for copies goes with a call: a child fills it, and a machine that does not have it keeps its own."""

import contextvars
import shutil
from pathlib import Path

import pytest

from configs.scoring import RewardSection
from configs.sections import StorageSection
from tasks.execution.call import StageCall, call_of, carry_out, carry_out_in
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess
from tasks.execution.stages import stage_named
from tasks.progress import listen
from tasks.storage.artifacts.open_store import described, open_store, open_store_elsewhere
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.progress import ProgressLog
from tests.tasks.execution.test_dispatch import reward_arguments
from tests.tasks.update.update_jobs import IMAGES


def scoring(store: ArtifactStore) -> tuple[StageCall, ArtifactRef]:
    """A call that reads an artifact of the bucket, as it comes out of the file that it travels in."""
    use_store(store)
    rollouts = IMAGES.collect()
    call = call_of(stage_named("score reward"), reward_arguments(rollouts, RewardSection(reward="jpeg")), store)
    return StageCall.model_validate_json(call.model_dump_json()), rollouts


def copies(folder: Path) -> set[str]:
    return {path.name for path in (folder / "contents").glob("*")}


def contents_of(store: ArtifactStore, reference: ArtifactRef) -> set[str]:
    manifest = store.manifest_at(store.path(reference.folder))
    assert manifest is not None
    return set(manifest.files.values())


def section(bucket: str, folder: Path) -> StorageSection:
    return StorageSection(root=f"{bucket}/runs", cache_dir=str(folder), cache_gib=0.5)


@pytest.mark.slow
def test_a_child_fills_the_folder_that_the_run_names(bucket: str, tmp_path: Path) -> None:
    given = section(bucket, tmp_path / "copies")
    store = open_store(given, "run")
    call, rollouts = scoring(store)
    shutil.rmtree(tmp_path / "copies")
    process = ChildProcess(child_command("stage"))
    try:
        made = carry_out_in(process, call, 600.0).reference()
    finally:
        process.end()
    assert isinstance(made, ArtifactRef)
    assert copies(tmp_path / "copies") == contents_of(store, rollouts) | contents_of(store, made)
    # Where the fixture lets the user's own cache be.
    assert not (tmp_path / "cache" / "grpo").exists()


def test_a_machine_without_that_folder_keeps_its_own(bucket: str, tmp_path: Path) -> None:
    store = open_store(section(bucket, tmp_path / "copies"), "run")
    call, rollouts = scoring(store)
    shutil.rmtree(tmp_path / "copies")
    (tmp_path / "copies").write_text("here it is a file")
    log = ProgressLog()

    def elsewhere() -> None:
        listen(log)
        assert carry_out(call).error is None
        assert carry_out(call).error is None

    contextvars.copy_context().run(elsewhere)
    assert copies(tmp_path / "cache" / "grpo") >= contents_of(store, rollouts)
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


def test_another_user_has_a_cache_of_his_own(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = described(open_store(StorageSection(root=bucket), "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    cache = open_store_elsewhere(section, "run").files.cache
    assert cache is not None
    assert cache.folder == tmp_path / "another" / "grpo"


def test_where_copies_are_kept_does_not_name_a_call(bucket: str, tmp_path: Path) -> None:
    call = StageCall(
        stage="score reward", storage=section(bucket, tmp_path / "copies"), run="run", roots=(), code="", arguments={}
    )
    moved = call.model_copy(update={"storage": call.storage.model_copy(update={"cache_dir": None, "cache_gib": 2.0})})
    assert moved.digest == call.digest
    other = call.model_copy(update={"storage": call.storage.model_copy(update={"root": f"{bucket}/other"})})
    assert other.digest != call.digest
