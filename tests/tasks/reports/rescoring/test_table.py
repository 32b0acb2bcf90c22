from tasks.reports.rescoring.compare import compare
from tasks.reports.rescoring.table import HEADINGS, advantage_rows, reward_rows
from tests.tasks.reports.rescoring.made_samples import made


def test_a_row_a_reward_with_both_sides() -> None:
    rewards = {"before:old": [0.1, 0.3], "after:new": [0.5, None]}
    rows = list(reward_rows(compare(made("aa", [0.1, 0.2], [0.4, 0.3], rewards=rewards))))
    assert rows[0] == (
        "combined",
        "0.150 → 0.350",
        "0.071 → 0.071",
        "0.0% → 0.0%",
        "0.0% → 0.0%",
        "-1.000 / -1.000",
        "-1.000 / -1.000",
    )
    assert rows[1] == ("new (added)", "0.500", "none", "100.0%", "50.0%", "", "none / none")
    assert rows[2] == ("old (removed)", "0.200", "0.141", "0.0%", "0.0%", "", "1.000 / 1.000")
    assert {len(row) for row in rows} == {len(HEADINGS)}


def test_advantages_in_words() -> None:
    advantages = ([1.0, -1.0, 0.0, None], [-1.0, 0.0, 1.0, 1.0])
    rows = dict(advantage_rows(compare(made("aaaa", [0.1] * 4, [0.2] * 4, advantages=advantages)).advantages))
    assert rows["sign turned"] == "100.0% of 1 that are not zero on either side"
    assert rows["zero, no longer so"] == "100.0% of 1 that were zero"
    assert rows["became zero"] == "50.0% of 2 that were not"
    assert rows["on one side only"] == "0 before, 1 after"
