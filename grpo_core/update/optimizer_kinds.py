"""The optimizers by name: the class of each, the settings that it has, and how many moments it keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

OptimizerKind = Literal[
    "adamw",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "sgd",
    "adafactor",
    "muon",
    "lion",
    "lion_8bit",
]
OptimizerValue = float | int | str | bool
IN_TORCH, IN_BITSANDBYTES = "torch.optim", "bitsandbytes.optim"
DEFAULTS: Mapping[str, Any] = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8})


@dataclass(frozen=True)
class Optimizer:
    """A kind of optimizer.

    Attributes:
        name: of the class in its library.
        own: arguments that `update.optimizer_kwargs` may have, with the defaults here.
        shared: those of DEFAULTS that it has.
        moments: tensors of the parameter's size that it keeps.
        matrices: it has steps for matrices only.
    """

    library: str
    name: str
    own: Mapping[str, OptimizerValue | None] = field(default_factory=dict)
    shared: tuple[str, ...] = ("betas", "eps")
    moments: int = 2
    matrices: bool = False

    def make(self, groups: Any, learning_rate: float, given: Mapping[str, Any], **more: Any) -> Any:
        """Build it for groups of parameters; `given` has values by the names in `own` and `shared`."""
        chosen = {name: value for name, value in self.own.items() if value is not None}
        values = chosen | {name: value for name, value in given.items() if name in {*self.own, *self.shared}}
        return getattr(import_module(self.library), self.name)(groups, lr=learning_rate, **values, **more)

    def unfit(self, kind: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
        """Yield each setting that it does not have: name, value and hint; `given` are betas and eps."""
        for name, default in DEFAULTS.items():
            if name not in self.shared and given[name] != default:
                yield name, given[name], f"{kind} has none; leave it out."
        known = ", ".join(self.own)
        for name in own.keys() - self.own.keys():
            hint = f"{kind} has {known}." if known else f"{kind} has no arguments of its own; leave it out."
            yield f"optimizer_kwargs.{name}", own[name], hint


OPTIMIZERS: Mapping[OptimizerKind, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(IN_TORCH, "AdamW"),
        "adamw_8bit": Optimizer(IN_BITSANDBYTES, "AdamW8bit"),
        "paged_adamw": Optimizer(IN_BITSANDBYTES, "PagedAdamW"),
        "paged_adamw_8bit": Optimizer(IN_BITSANDBYTES, "PagedAdamW8bit"),
        "sgd": Optimizer(IN_TORCH, "SGD", {"momentum": 0.9, "dampening": None, "nesterov": None}, shared=(), moments=1),
        # Its eps are two, of other meanings.
        "adafactor": Optimizer(IN_TORCH, "Adafactor", {"beta2_decay": None, "d": None}, shared=(), moments=0),
        # Its steps are then as long as AdamW's at the same learning rate.
        "muon": Optimizer(
            IN_TORCH,
            "Muon",
            {"momentum": None, "nesterov": None, "ns_steps": None, "adjust_lr_fn": "match_rms_adamw"},
            shared=(),
            moments=1,
            matrices=True,
        ),
        "lion": Optimizer(IN_BITSANDBYTES, "Lion", shared=("betas",), moments=1),
        "lion_8bit": Optimizer(IN_BITSANDBYTES, "Lion8bit", shared=("betas",), moments=1),
    }
)
