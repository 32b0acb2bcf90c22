"""One reward over stored samples: what is asked, what is kept, and what happens when it cannot answer."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.placement import PlacementSection
from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.errors import FailedSamplesError, InputError
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.execution.child_process import ChildProcesses
from tasks.execution.resources import resource
from tasks.metrics import LOGGED
from tasks.rewards.score_rewards import NeededScores, StoredScores, samples_to_score, score_reward_task
from tasks.runs.layout import SCORES_FILE, SamplingRound
from tasks.runs.samples import with_extra
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.grpo_core.rewards.conftest import refused
from tests.tasks.reports.made_runs import GROUP_SIZE, RunMaker, colour, png

PLACE = "iteration_000001"


@pytest.fixture
def maker(tmp_path: Path) -> RunMaker:
    maker = RunMaker(tmp_path / "runs", modality="text", datasets=("poems", "sums"))
    use_store(maker.store)
    maker.rollouts(PLACE, "i000001")
    return maker


@pytest.fixture
def requested(tmp_path: Path) -> Path:
    """Where the functions note what they were asked, a line a sample."""
    return tmp_path / "asked.txt"


def function(tmp_path: Path, requested: Path, body: str) -> dict[str, object]:
    """A user's function with `value` of each completion left to the body; the settings that name it."""
    source = f"""
    import math, os
    def score(prompts, completions, **columns):
        values = []
        for text in completions:
            with open({str(requested)!r}, "a") as file:
                print(text, file=file)
            values.append(value(text, {str(tmp_path)!r}))
        return values
    def value(text, folder):
        {body}
    """
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(source))
    return {"function": f"{path}:score"}


def rollouts_of(maker: RunMaker) -> ArtifactRef:
    return maker.store.find(f"{PLACE}/rollouts")


def score(
    maker: RunMaker, section: RewardSection, earlier: tuple[ArtifactRef, ...] = (), folder: str = f"{PLACE}/rewards"
) -> ArtifactRef:
    placement = PlacementSection(devices="cpu")
    return score_reward_task.fn(rollouts_of(maker), section, folder, "iteration 1", placement, earlier)


def needed(maker: RunMaker, section: RewardSection, *tables: ArtifactRef) -> NeededScores:
    return StoredScores(maker.store, rollouts_of(maker), tables).needed(section)


def rows(store: ArtifactStore, reference: ArtifactRef) -> list[dict[str, Any]]:
    return pl.read_parquet(store.local_files(reference) / SCORES_FILE).to_dicts()


def values(store: ArtifactStore, reference: ArtifactRef) -> list[float | None]:
    return [row["value"] for row in rows(store, reference)]


SIBLING = "return float(text.split()[1]) / 10"
"""Of `answer 2 of group 1`: .2."""


def section(settings: Mapping[str, object], **fields: Any) -> RewardSection:
    return RewardSection(reward="function", name="mine", settings=dict(settings), **fields)


@pytest.mark.slow
def test_batches_and_processes_change_nothing(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    settings = function(tmp_path, requested, SIBLING)
    plain = score(maker, section(settings))
    assert values(maker.store, plain) == pytest.approx([0.0, 0.1, 0.2, 0.3] * 2)
    one_by_one = score(maker, section(settings, batch_size=1))
    side_by_side = score(maker, section(settings, batch_size=1, processes=2))
    resource(ChildProcesses).close()
    assert plain.digest == one_by_one.digest == side_by_side.digest
    # Each of the three asked every sample once.
    assert sorted(requested.read_text().splitlines()) == sorted(
        [f"answer {sibling} of group {group}" for group in range(2) for sibling in range(GROUP_SIZE)] * 3
    )


def test_what_a_function_reports_is_a_metric_of_its_table(maker: RunMaker, tmp_path: Path) -> None:
    """Two calls report 0 and 1, one of them another metric twice, and one nothing that is a number."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions, log_metric, **columns):\n"
        "    group = float(completions[0].split()[-1])\n"
        "    log_metric('share', group)\n"
        "    log_metric('broken', float('nan'))\n"
        "    if group:\n"
        "        log_metric('late', 1.0)\n"
        "        log_metric('late', 4.0)\n"
        "    return [0.5] * len(completions)\n"
    )
    first = score(maker, section({"function": f"{path}:score"}, batch_size=1))
    assert {name: value for name, value in first.metrics.items() if name.startswith(LOGGED)} == {
        "logged/share": 0.5,
        "logged/late": 2.5,
    }
    # Nothing is called for scores that are known.
    again = score(maker, section({"function": f"{path}:score"}), (first,), folder="again")
    assert not any(name.startswith(LOGGED) for name in again.metrics)


def test_what_a_function_reports_about_samples_is_a_column_of_them(maker: RunMaker, tmp_path: Path) -> None:
    """A number, a text, one of both, and nothing for a sample whose score fails."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completions, log_extra, **columns):\n"
        "    numbers = [float(text.split()[1]) for text in completions]\n"
        "    log_extra('sibling', numbers)\n"
        "    log_extra('text', [text.upper() for text in completions])\n"
        "    log_extra('either', [None, 2, 'three', [4]])\n"
        "    log_extra('parts', [[number] for number in numbers])\n"
        "    log_extra('sample_id', numbers)\n"
        "    return [0.5] * len(completions)\n"
    )
    done = score(maker, section({"function": f"{path}:score"}, batch_size=1))
    place = maker.store.local_files(done) / SCORES_FILE
    ids = [f"i000001.p{group:04d}.s{sibling:02d}" for group in range(2) for sibling in range(GROUP_SIZE)]
    samples = with_extra(pl.DataFrame({"sample_id": ids}), {"mine": [place]})
    assert samples["extra/mine/sibling"].to_list() == [0.0, 1.0, 2.0, 3.0] * 2
    assert samples["extra/mine/text"][5] == "ANSWER 1 OF GROUP 1"
    assert samples["extra/mine/either"].to_list() == [None, "2", "three", "[4]"] * 2
    assert samples["extra/mine/parts"].to_list() == ["[0.0]", "[1.0]", "[2.0]", "[3.0]"] * 2
    # A table that is made of known scores has them too.
    again = score(maker, section({"function": f"{path}:score"}), (done,), folder="again")
    repeated = {"mine": [maker.store.local_files(again) / SCORES_FILE]}
    assert with_extra(pl.DataFrame({"sample_id": ids}), repeated).equals(samples)
    path.write_text("def score(completions, log_extra, **columns):\n    log_extra('few', [1])\n    return [0.5] * 4\n")
    error = refused(lambda: score(maker, section({"function": f"{path}:score"}, batch_size=1)))
    assert "log_extra" in error.place
    assert error.value == "1 values of few"


def test_what_is_known_is_not_asked_again_and_what_failed_is(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    once = function(
        tmp_path, requested, 'return math.nan if "2 of group 1" in text and not os.path.exists(folder + "/up") else 0.5'
    )
    first = score(maker, section(once, max_failures=0.2))
    (failed,) = [row for row in rows(maker.store, first) if row["failure"]]
    assert (failed["sample_id"], failed["value"]) == ("i000001.p0001.s02", None)
    figures = {"failed": 1.0, "null": 1.0, "mean": 0.5, "std": 0.0}
    assert first.metrics == pytest.approx({f"rewards/mine/{kind}": value for kind, value in figures.items()})
    missing = needed(maker, section(once), first)
    assert missing == NeededScores(section(once), None, (first,), 1)
    requested.unlink()
    (tmp_path / "up").touch()
    second = score(maker, section(once), missing.earlier)
    assert requested.read_text().splitlines() == ["answer 2 of group 1"]
    assert values(maker.store, second) == [0.5] * 8
    assert needed(maker, section(once), second).stored == second
    requested.unlink()
    assert score(maker, section(once), (second,)).digest == second.digest
    assert not requested.exists()


def test_code_that_changes_while_it_scores_has_no_scores(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    """Nobody knows which of both made them."""
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    edit = "__import__('pathlib').Path(folder, 'helper.py').write_text('VALUE = 1.0')"
    body = f"from helper import VALUE; {edit}; return VALUE"
    mine = section(function(tmp_path, requested, body))
    with pytest.raises(InputError, match=r"It changed while it was used: helper\.py\. Nothing was kept"):
        score(maker, mine)
    assert maker.store.find(f"{PLACE}/rewards/{mine.label}") is None


def test_other_settings_or_another_function_are_other_scores(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    settings = function(tmp_path, requested, SIBLING)
    done = score(maker, section(settings))
    assert needed(maker, section(settings, weight=3.0, clamp=(0.0, 0.1)), done).stored == done
    by_group = section({**settings, "by_group": True})
    assert needed(maker, by_group, done) == NeededScores(by_group, None, (), 8)
    function(tmp_path, requested, "return 0.25")
    assert needed(maker, section(settings), done) == NeededScores(section(settings), None, (), 8)


POEMS, SUMS = [0.0, 0.1, 0.2, 0.3] + [None] * 4, [None] * 4 + [0.0, 0.1, None, 0.3]


def test_what_is_scored_stays_scored_under_another_scope(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    """Group 0 is of the data set poems, group 1 of sums, where the function cannot score sibling 2."""
    body = f'return math.nan if "2 of group 1" in text else {SIBLING.removeprefix("return ")}'
    mine = section(function(tmp_path, requested, body), max_failures=0.5)
    scopes = {name: mine.model_copy(update={"datasets": (name,)}) for name in ("poems", "sums")}
    poems = score(maker, scopes["poems"])
    assert values(maker.store, poems) == pytest.approx(POEMS)
    assert len(requested.read_text().splitlines()) == 4
    assert [row["provenance"] is None for row in rows(maker.store, poems)] == [False] * 4 + [True] * 4
    assert poems.metrics["rewards/mine/failed"] == 0.0

    # A wider scope scores what is new in it; a null out of scope is no score, and no failure either.
    wider = needed(maker, mine, poems)
    assert wider == NeededScores(mine, None, (poems,), 4)
    requested.unlink()
    everything = score(maker, mine, wider.earlier, "rescored/everything")
    assert requested.read_text().splitlines() == [f"answer {sibling} of group 1" for sibling in range(4)]
    assert values(maker.store, everything) == pytest.approx([*POEMS[:4], *SUMS[4:]])

    # A narrower one scores nothing, except what had failed; of two tables each gives what it has.
    requested.unlink()
    assert needed(maker, scopes["poems"], everything) == NeededScores(scopes["poems"], None, (everything,), 0)
    assert score(maker, scopes["poems"], (everything,), "rescored/poems").digest == poems.digest
    assert not requested.exists()
    assert needed(maker, scopes["poems"], everything, poems).stored == poems
    narrower = needed(maker, scopes["sums"], everything)
    assert narrower == NeededScores(scopes["sums"], None, (everything,), 1)
    sums = score(maker, scopes["sums"], narrower.earlier, "rescored/sums")
    assert requested.read_text().splitlines() == ["answer 2 of group 1"]
    assert values(maker.store, sums) == pytest.approx(SUMS)
    assert needed(maker, mine, poems, sums) == NeededScores(mine, None, (poems, sums), 1)

    # Nobody in scope: a table without any score is what is needed.
    nobody = mine.model_copy(update={"where": {"kind": ("sign",)}})
    assert needed(maker, nobody, poems) == NeededScores(nobody, None, (poems,), 0)
    empty = score(maker, nobody, folder="rescored/nobody")
    assert values(maker.store, empty) == [None] * 8
    assert needed(maker, nobody, poems, empty).stored == empty


def test_siblings_are_scored_again_where_a_score_depends_on_them() -> None:
    samples = pl.DataFrame({"sample_id": ["a", "b", "c"], "group_id": ["g", "g", "h"]})
    samples = samples.with_columns(dataset=pl.lit("default"), columns=pl.lit("{}"))
    assert samples_to_score(RewardSection(reward="diversity"), samples, {"a", "c"}) == {"a", "b"}
    assert samples_to_score(RewardSection(reward="jpeg"), samples, {"a", "c"}) == {"b"}


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reward_that_fails_too_often_stops(maker: RunMaker, tmp_path: Path, requested: Path, processes: int) -> None:
    broken = section(function(tmp_path, requested, "return math.inf"), batch_size=1, processes=processes)
    with pytest.raises(FailedSamplesError, match=r"reward mine: 4 of 8 .*max_failures 0\.1.*i000001\.p0000\.s00.*inf"):
        score(maker, broken)
    resource(ChildProcesses).close()
    # One group is a batch at least; with processes the next one was already on its way.
    assert len(requested.read_text().splitlines()) == (4 if processes == 0 else 8)
    assert maker.store.find(f"{PLACE}/rewards/mine") is None
    assert maker.store.find(f"{PLACE}/rollouts") is not None


@pytest.mark.slow
def test_an_error_in_a_process_is_told_as_in_the_run_itself(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    settings = function(tmp_path, requested, 'return "much"')
    told = [str(refused(score, maker, section(settings, processes=processes))) for processes in (0, 1)]
    resource(ChildProcesses).close()
    assert told[0] == told[1]
    assert "mine.py" in told[0]


@pytest.mark.slow
def test_a_process_that_dies_is_started_again_once(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    dies = 'died = folder + "/died"; os.path.exists(died) or (open(died, "w").close(), os._exit(9)); return 0.5'
    once = function(tmp_path, requested, dies)
    assert values(maker.store, score(maker, section(once, processes=1))) == [0.5] * 8
    always = function(tmp_path, requested, "os._exit(9)")
    error = refused(score, maker, section(always, processes=1))
    assert (error.place, error.value) == ("rewards.mine.processes", 1)
    resource(ChildProcesses).close()


def advantages(maker: RunMaker, *sections: RewardSection) -> pl.DataFrame:
    sampled = SamplingRound(rollouts_of(maker), {each.label: score(maker, each) for each in sections})
    made = compute_advantages_task.fn((sampled,), ("tokens",), sections, AdvantagesSection(), PLACE, "iteration 1")
    return pl.read_parquet(maker.store.local_files(made) / "advantages.parquet")


def test_a_failed_sample_takes_the_mean_of_its_siblings(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    settings = function(tmp_path, requested, 'return math.nan if "2 of group 0" in text else float(text.split()[1])')
    mine = section(settings, max_failures=0.2)
    (tmp_path / "other").mkdir()
    other = function(tmp_path / "other", requested, "return 1.0")
    beside = RewardSection(reward="function", name="beside", settings=other)
    table = advantages(maker, mine, beside)
    assert table["reward"].to_list() == pytest.approx([1.0, 2.0, 1.0 + 4 / 3, 4.0, 1.0, 2.0, 3.0, 4.0])
    assert table["imputed"].to_list() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert table["reward_breakdown"][2].to_list() == [
        {"reward": "mine", "value": None, "scaled": pytest.approx(4 / 3)},
        {"reward": "beside", "value": 1.0, "scaled": 1.0},
    ]


def test_failures_are_a_share_of_the_samples_in_scope(maker: RunMaker, tmp_path: Path, requested: Path) -> None:
    settings = function(tmp_path, requested, "return math.nan")
    with pytest.raises(FailedSamplesError, match="of 4 samples"):
        score(maker, section(settings, datasets=("poems",), max_failures=0.9))


def test_a_function_of_images_without_tokens_gets_no_ids(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(prompts, completions, completion_ids=None, **columns):\n"
        "    assert completion_ids is None\n"
        "    return [image.getpixel((0, 0))[0] / 255 for image in completions]\n"
    )
    maker = RunMaker(tmp_path / "runs", streams=("denoising",))
    use_store(maker.store)
    rollouts = maker.rollouts(PLACE, "i000001")
    section = RewardSection(reward="function", settings={"function": f"{tmp_path / 'mine.py'}:score", "factory": False})
    scored = score_reward_task.fn(rollouts, section, f"{PLACE}/rewards", "t", PlacementSection())
    table = pl.read_parquet(maker.store.local_files(scored) / SCORES_FILE)
    assert table["value"].to_list() == [red / 255 for red in (10, 50) for _ in range(GROUP_SIZE)]


def test_relative_targets_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the folder in which the run was started, here and in the processes that score."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "0.png").write_bytes(png(colour(0, 0)))
    maker = RunMaker(tmp_path / "runs")
    use_store(maker.store)
    monkeypatch.chdir(tmp_path)
    maker.targets = {0: tmp_path / "0.png"}
    rollouts = maker.rollouts(PLACE, "i000001")
    monkeypatch.chdir(tmp_path / "elsewhere")
    similar = RewardSection(reward="mse")
    scored = score_reward_task.fn(rollouts, similar, f"{PLACE}/rewards", "t", PlacementSection())
    found = values(maker.store, scored)
    assert found[0] == 1
    assert found[GROUP_SIZE:] == [None] * GROUP_SIZE
    (tmp_path / "0.png").unlink()
    error = refused(lambda: score_reward_task.fn(rollouts, similar, "other", "t", PlacementSection()))
    assert (error.place, error.value) == ("data.targets", "0.png")
