from pathlib import Path

from tasks.reports.artifact_reader import ArtifactReader
from tasks.reports.metric_titles import metric_title
from tasks.reports.page import CHARTED
from tasks.reports.run_view import read_run
from tests.tasks.reports.made_runs import whole_run


def test_a_rewards_name_may_hold_anything() -> None:
    assert metric_title("rewards/ssim/mean").title == "ssim: mean"
    assert metric_title("rewards/a/b/null").title == "a/b: pictures it does not apply to"
    assert metric_title("rewards/{label}/std").title == "{label}: standard deviation"


def test_a_name_that_is_not_known_stands_for_itself() -> None:
    for name in ("rewards/ssim/median", "rewards/mean", "new_figure"):
        assert metric_title(name).title == name


def test_every_figure_of_a_run_has_a_title_in_words(tmp_path: Path) -> None:
    shown = read_run(ArtifactReader(whole_run(tmp_path).store)).shown
    assert shown is not None
    for name in {*shown.metrics, *CHARTED}:
        title = metric_title(name)
        assert title.meaning
        assert "/" not in title.title
        assert "_" not in title.title
