"""What a run records of its code is a stranger's text."""

from pathlib import Path

from flows.verification.causes import changed_functions


def test_a_recorded_commit_is_no_option_of_git(tmp_path: Path) -> None:
    file = tmp_path / "written"
    assert changed_functions(f"--output={file}", ["README.md"]) == []
    assert not file.exists()
