"""A run in a bucket, on a real server of the S3 protocol."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.loader import read_config
from configs.placement_sections import StorageSection
from flows.preflight.inputs import require_inputs
from grpo_core.errors import InputError, InputErrors
from tasks.storage.artifacts import commit as committing
from tasks.storage.artifacts import files as artifact_files
from tasks.storage.artifacts.files import s3_tag
from tasks.storage.artifacts.open_store import open_store
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tests.s3_server import S3Server
from tests.tasks.storage import s3_runs
from tests.tasks.storage.made_artifacts import FILES, FOLDER, REPOSITORY, commit
from tests.tasks.storage.s3_runs import PART_0, read, reasons

store = s3_runs.store


class TestArtifacts:
    def test_artifact_is_written_found_and_read(self, store: ArtifactStore, tmp_path: Path) -> None:
        store.require_writable()
        reference = commit(store)
        other_machine = ArtifactStore(f"s3://{store.root}", "run")
        assert other_machine.find(FOLDER) == reference
        assert read(other_machine, tmp_path / "fetched", reference) == FILES
        names = sorted(store.filesystem.find(store.path()))
        kept = sorted([*(f"{FOLDER}/{name}" for name in FILES), f"{FOLDER}.manifest.json"])
        assert names == [store.path(name) for name in kept]

    def test_listing_shows_what_another_machine_wrote_a_moment_ago(self, store: ArtifactStore) -> None:
        assert store.filesystem.glob(store.path("*/*.json")) == []
        commit(ArtifactStore(f"s3://{store.root}", "run"))
        (found,) = store.filesystem.glob(store.path("*/*.json"))
        assert found.endswith("rollouts.manifest.json")

    @pytest.mark.parametrize("damage", ["changed", "deleted"])
    def test_damage_is_noticed_though_the_cache_holds_the_file(
        self, store: ArtifactStore, tmp_path: Path, damage: str
    ) -> None:
        reference = commit(store)
        assert read(store, tmp_path / "1", reference) == FILES
        if damage == "changed":
            store.filesystem.pipe_file(store.path(PART_0), b"FIRST PART")
        else:
            store.filesystem.rm_file(store.path(PART_0))
        with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet (has sha256|is missing)"):
            store.local_files(reference, tmp_path / "2")
        assert ["part-00000.parquet" in reason for reason in reasons(store)] == [True]
        assert store.find(FOLDER) is None
        again = commit(store)
        assert read(store, tmp_path / "3", again) == FILES

    def test_another_runs_artifact_comes_home_without_being_read(
        self, store: ArtifactStore, s3: S3Server, tmp_path: Path
    ) -> None:
        reference = commit(store)
        other, before = ArtifactStore(f"s3://{store.root}", "other"), len(s3.requests())
        home = other.restore_artifact(reference)
        assert home == reference.model_copy(update={"uri": f"other/{FOLDER}"})
        assert other.find(FOLDER) == home
        assert [each for each in s3.requests(before) if each.startswith("GET") and "part-" in each] == []
        assert read(other, tmp_path / "fetched", home) == FILES

    def test_a_file_in_parts_has_the_tag_that_is_computed(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        smallest = 5 * 2**20
        for module in (artifact_files, committing):
            monkeypatch.setattr(module, "PART", smallest)
        with store.staging() as staged:
            with (staged / "weights").open("wb") as stream:
                stream.truncate(2 * smallest + 5)
            expected = s3_tag(staged / "weights")
            store.commit(staged, "policies/000001", digest="d", schema_version=1, rows=0, seconds=0.0, metrics={})
        found = store.filesystem.info(store.path("policies/000001/weights"))
        assert found["ETag"].strip('"') == expected
        assert expected.endswith("-3")


class TestCache:
    def test_a_file_is_read_from_the_bucket_once(self, store: ArtifactStore, s3: S3Server, tmp_path: Path) -> None:
        reference = commit(store)
        other = ArtifactStore(f"s3://{store.root}", "run")
        assert other.files.cache is not None
        other.files.cache.folder = tmp_path / "another machine"
        before = len(s3.requests())
        assert other.restore_artifact(reference) == reference
        for number in range(3):
            assert read(other, tmp_path / str(number), reference) == FILES
        assert other.restore_artifact(reference) == reference
        fetched = [each for each in s3.requests(before) if each.startswith("GET") and FOLDER in each]
        assert len([each for each in fetched if "part-" in each]) == len(FILES)

    def test_its_writer_does_not_read_it_at_all(self, store: ArtifactStore, s3: S3Server, tmp_path: Path) -> None:
        before = len(s3.requests())
        assert read(store, tmp_path / "fetched", commit(store)) == FILES
        assert [each for each in s3.requests(before) if each.startswith("GET") and "part-" in each] == []


class TestConfiguration:
    def problems(self, bucket: str, **storage: object) -> list[str]:
        config = read_config(REPOSITORY / "configs/tiny.yaml", [f"storage.root={bucket}/runs", "run.name=run"])
        section = config.storage.model_copy(update=storage)
        with pytest.raises(InputErrors) as caught:
            require_inputs(config.model_copy(update={"storage": section}))
        return [str(error) for error in caught.value.errors]

    def test_a_wrong_root_is_told_before_the_work_begins(self, bucket: str, tmp_path: Path) -> None:
        (told,) = self.problems(bucket, root="s3://key:secret@bucket/runs")
        assert told.startswith("storage.root: got 's3://***@bucket/runs'.")
        (told,) = self.problems(bucket, root=f"{bucket}-absent/runs")
        assert "There is no such bucket" in told
        (tmp_path / "file").write_text("")
        (told,) = self.problems(bucket, cache_dir=str(tmp_path / "file"))
        assert told.startswith("storage.cache_dir")

    def test_the_cache_is_the_one_that_is_asked_for(self, bucket: str, tmp_path: Path) -> None:
        section = StorageSection(root=bucket, cache_dir=str(tmp_path / "copies"), cache_gib=0.5)
        store = open_store(section, "run")
        reference = commit(store)
        assert read(store, tmp_path / "fetched", reference) == FILES
        assert len([path for path in (tmp_path / "copies" / "contents").rglob("*") if path.is_file()]) == len(FILES)
        assert store.files.cache is not None
        assert store.files.cache.limit == 2**29
        assert open_store(StorageSection(root=str(tmp_path)), "run").files.cache is None


def test_without_its_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from grpo_core.errors import InputError\n"
        "from tasks.storage.artifacts.store import ArtifactStore\n"
        "try:\n    ArtifactStore('s3://bucket/runs', 'run')\n"
        "except InputError as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True, env={**os.environ}
    )
    assert "storage.root: got 's3://bucket/runs'. Install s3fs, which the extra s3" in told.stdout


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("s3://AKIAEXAMPLE:abc/def+secret@bucket/runs", "s3://***@bucket/runs"),
        ("s3://AKIAEXAMPLE@bucket", "s3://***@bucket"),
        ("sftp://user:secret@host:22/runs", "sftp://***@host:22/runs"),
        ("simplecache::s3://k:secret@bucket/runs", "simplecache::s3://***@bucket/runs"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(root: str, shown: str) -> None:
    with pytest.raises(InputError, match="leave them out of the URL") as caught:
        ArtifactStore(root, "run")
    assert caught.value.value == shown
    assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
    assert "AKIAEXAMPLE" not in str(caught.value)


def test_other_signs_in_a_url_are_no_credentials(tmp_path: Path) -> None:
    assert ArtifactStore(f"file://{tmp_path}/a@b:c", "run").root == f"{tmp_path}/a@b:c"
    assert ArtifactStore("memory://bucket:80/a@b", "run").root.endswith("bucket:80/a@b")
