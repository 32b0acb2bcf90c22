"""What a rescoring is asked for where no command line is: the form of Prefect's UI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from configs.loader import validated
from configs.sections import Name, Section
from flows.rescoring.request import RescorePlan, RescoreRequest, plan_rescore


class RescoreForm(Section):
    """Stored rollouts scored with other rewards or weights."""

    sources: tuple[str, ...] = Field(min_length=1, description="runs under the storage root, or paths of their folders")
    rewards: str = Field(min_length=1, description="YAML file with `rewards:`, where the flow runs")
    name: Name = Field(description="of the rescoring: a folder below rescored/ of each run")
    iterations: str | None = Field(None, description="which, as A-B; null: all")
    root: str = Field("runs", min_length=1, description="where runs are kept, a folder or any fsspec URL")


def read_form(values: Mapping[str, Any]) -> RescorePlan:
    """The values of a form -> what is done for it.

    Raises:
        InputError, InputErrors: with the key, the value and the hint.
    """
    form = validated(RescoreForm, values)
    return plan_rescore(RescoreRequest(form.sources, Path(form.rewards), form.name, form.root, form.iterations))
