"""docs/denoising.md: the classes that it lists, and the defaults that it states."""

import re
from pathlib import Path

import pytest

import configs
from configs.training import DenoisingUpdateSection, ParitySection, UpdateSection
from grpo_core.policies.diffusers.pipeline_class import TRIED, find_pipeline_class
from grpo_core.streams import STREAMS

PAGE = (Path(configs.__file__).parent.parent / "docs" / "denoising.md").read_text(encoding="utf-8")


def listed(name: str) -> list[str]:
    return re.findall(r"\w+", PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0])


def test_the_tried_pipelines_are_listed() -> None:
    assert listed("classes") == list(TRIED)


@pytest.mark.slow
def test_the_listed_pipelines_are_those_that_fit() -> None:
    import diffusers

    found = {name: find_pipeline_class(name) for name in sorted(dir(diffusers)) if name.endswith("Pipeline")}
    fitting = [name for name, described in found.items() if described is not None and described.problem is None]
    assert sorted(listed("classes") + listed("expected")) == fitting


def test_the_stated_defaults_are_those_of_the_sections() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    stated = {row[0].replace("`", ""): row[1:] for row in rows if len(row) == 3}
    sections = (UpdateSection(), DenoisingUpdateSection())
    assert [float(each) for each in stated["learning_rate"]] == [section.learning_rate for section in sections]
    assert [float(each) for each in stated["clip_range"]] == [section.clip_range for section in sections]
    assert stated["kl_estimator"] == [section.kl_estimator for section in sections]
    for name, in_fp32 in (("parity.max_difference, mean_difference in fp32", True), ("the same in 16 bits", False)):
        written = dict(zip(STREAMS, stated[name], strict=True))
        for stream, text in written.items():
            tolerance = ParitySection().tolerance(stream, in_fp32=in_fp32)
            assert [float(each) for each in text.split(",")] == [tolerance.max_difference, tolerance.mean_difference]
