from pathlib import Path

import pytest

from tasks.reports.metric_titles import METRICS, metric_rows, metric_title
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import whole_run

OF_THE_CONFIGURATION = (
    "rewards/answer/mean",
    "rewards/answer/std",
    "rewards/answer/null",
    "rewards/answer/failed",
    "datasets/sums/reward",
    "guardrails/jpeg",
)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("rewards/ssim/mean", "ssim: mean"),
        ("rewards/a/b/null", "a/b: images without a score"),
        ("rewards/{label}/std", "{label}: standard deviation"),
        ("guardrails/a/b", "a/b (guardrail)"),
        ("guardrails/{noun}", "{noun} (guardrail)"),
        ("datasets/a/b/reward", "a/b: reward"),
        ("datasets/{noun}/reward", "{noun}: reward"),
        ("rewards/ssim/median", "rewards/ssim/median"),
        ("rewards/mean", "rewards/mean"),
        ("new_metric", "new_metric"),
        ("denoising/kl", "KL to the reference, denoising"),
        ("denoising/clip_ratio/region_mean", "clipped noisy steps, denoising"),
        ("clip_ratio/region_mean", "clipped tokens"),
        ("denoising/datasets/signs/reward", "signs: reward, denoising"),
        ("denoising/", "denoising/"),
    ],
)
def test_labels_may_be_any_words_and_an_unknown_name_is_its_own_title(name: str, title: str) -> None:
    assert metric_title(name)[0] == title


def test_every_metric_of_a_run_has_a_title_in_words(tmp_path: Path) -> None:
    shown = read_run(RunReader(whole_run(tmp_path).store)).shown
    assert shown is not None
    for name in {*shown.metrics, *OF_THE_CONFIGURATION, *(name for name in METRICS if "{" not in name)}:
        text, image = metric_title(name, "completion"), metric_title(name, "image")
        for title, meaning in (text, image, metric_title(name, "image", "denoising")):
            assert meaning
            assert not set("/_{}") & set(title)
            assert not set("{}") & set(meaning)
        assert "image" not in "".join(text)
        assert "completion" not in "".join(image)
    titles = [row["title"] for row in METRICS.values()]
    assert len(set(titles)) == len(titles)


def test_the_reward_and_plotted_metrics_come_first() -> None:
    rows = metric_rows({"a": 1.0, "kl": 2.0, "reward": 3.0}, "image")
    assert [(name, value) for _, _, name, value in rows] == [("reward", 3.0), ("kl", 2.0), ("a", 1.0)]


def test_a_second_stream_s_metrics_follow_those_of_the_first() -> None:
    rows = metric_rows({"denoising/kl": 1.0, "kl": 2.0, "denoising/reward": 3.0, "reward": 4.0}, "image")
    assert [name for _, _, name, _ in rows] == ["reward", "denoising/reward", "kl", "denoising/kl"]
