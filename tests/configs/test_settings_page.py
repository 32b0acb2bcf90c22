"""docs/settings.md says every key of a configuration; coming_from_trl.md every field of TRL's."""

import re

from configs.schema import RunConfig
from tests.configs.settings_page import PAGE, SECTIONS, TRL_PAGE, page, trl_section


def test_the_pages_are_fresh() -> None:
    assert page() in PAGE.read_text(encoding="utf-8"), "run python -m tests.configs.settings_page"
    assert trl_section() in TRL_PAGE.read_text(encoding="utf-8"), "run python -m tests.configs.settings_page"


def test_every_section_is_there_and_every_key_has_an_effect() -> None:
    assert {title.partition(".")[0] for title in SECTIONS} == set(RunConfig.model_fields)
    assert [row for row in page().splitlines() if row.startswith("- ") and not re.search(r"[`)]: \S", row)] == []
