"""What every section of a configuration is, and the kinds of its fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Digits = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NAME_MEND = "Letters, digits, dots, dashes and underscores, the first a letter or digit; 100 at most."
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class Section(BaseModel):
    """Unknown keys and wrong types are refused; numbers are never read from strings, nor NaN from anything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
