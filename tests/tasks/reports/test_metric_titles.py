from pathlib import Path

from tasks.reports.metric_titles import _TITLES, metric_title
from tasks.reports.page import CHARTED
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import whole_run


def test_a_rewards_name_may_hold_anything() -> None:
    assert metric_title("rewards/ssim/mean").title == "ssim: mean"
    assert metric_title("rewards/a/b/null").title == "a/b: images without a score"
    assert metric_title("rewards/ssim/failed").title == "ssim: images it could not score"
    assert metric_title("rewards/{label}/std").title == "{label}: standard deviation"


def test_a_name_that_is_not_known_stands_for_itself() -> None:
    for name in ("rewards/ssim/median", "rewards/mean", "new_figure"):
        assert metric_title(name).title == name


def test_every_figure_of_a_run_has_a_title_in_words(tmp_path: Path) -> None:
    shown = read_run(RunReader(whole_run(tmp_path).store)).shown
    assert shown is not None
    for name in {*shown.metrics, *CHARTED}:
        title = metric_title(name)
        assert title.meaning
        assert "/" not in title.title
        assert "_" not in title.title


EMITTED = (
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "groups_dropped",
    "groups_kept",
    "frac_groups_dropped",
    "rounds",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "mismatch/mean_weight",
    "mismatch/masked_fraction",
    "staleness/mean",
    "staleness/max",
    "rows_left_out",
    "advantage/mean",
    "advantage/std",
    "kl_penalty",
    "importance_ratio/mean",
    "optimizer_steps",
    "policy_loss",
    "rewards/answer/mean",
    "rewards/answer/std",
    "rewards/answer/null",
    "rewards/answer/failed",
    "datasets/sums/reward",
    "guardrails/jpeg",
)


def test_a_run_that_writes_has_no_images_and_one_that_draws_no_completions() -> None:
    for name in (*EMITTED, *_TITLES):
        written, drawn = metric_title(name, "completion"), metric_title(name, "image")
        for title in (written, drawn):
            assert title.meaning
            assert not set("/_{}") & set(title.title)
            assert not set("{}") & set(title.meaning)
        assert "image" not in written.title + written.meaning
        assert "completion" not in drawn.title + drawn.meaning
    assert metric_title("completions/mean_length", "completion").title == "tokens a completion"


def test_titles_are_told_apart() -> None:
    titles = [metric_title(name).title for name in _TITLES]
    assert len(set(titles)) == len(titles)


def test_a_guardrails_name_may_hold_anything() -> None:
    assert metric_title("guardrails/a/b").title == "a/b, a guardrail"
    assert metric_title("guardrails/{noun}").title == "{noun}, a guardrail"


def test_a_datasets_name_may_hold_anything() -> None:
    assert metric_title("datasets/a/b/reward").title == "a/b: reward"
    assert metric_title("datasets/{noun}/reward").title == "{noun}: reward"
