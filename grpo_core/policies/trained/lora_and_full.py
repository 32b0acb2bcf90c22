"""What of a model is trained: every weight outside the frozen parts, adapters over a frozen base, or nothing."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.component import merged_adapters
from grpo_core.policies.trained.model import CPU, TrainedModel, copied, refuse_differing
from grpo_core.policies.trained.quantization import is_quantized
from grpo_core.policies.trained.settings import ADAPTER_FILE, MOVING, PLACE, LoraSettings, TrainingChoice
from grpo_core.policies.trained.whole import FULL_WEIGHTS, expected_warnings, tied_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

WEIGHTS_FILE = "model.safetensors"


def train_model(
    base: Any,
    choice: TrainingChoice,
    *,
    base_name: str,
    default_targets: str | None = None,
    own_frozen: tuple[str, ...] = (),
    initial_state: Callable[[], dict[str, Tensor]] | None = None,
) -> TrainedModel:
    """Add adapters to a model of transformers or diffusers, or unfreeze its weights; it is changed in place.

    Args:
        base_name: folder or hub name, written into saved adapters for peft to find the base again.
        default_targets: regular expression, or peft's `all-linear`, if the choice names no targets.
        own_frozen: prefixes of the names of parameters that this kind of policy never trains.
        initial_state: reads the initial weights again, for full weights; None keeps a copy of them in CPU memory.

    Raises:
        InputError: adapter targets or frozen names that match nothing, or nothing that would be trained.
    """
    if choice.lora is not None:
        return LoraModel(base, choice, base_name, default_targets)
    return FullModel(base, choice, own_frozen, initial_state)


class FrozenModel(TrainedModel):
    """A model of which nothing is trained: a part of the environment that another component is trained in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.requires_grad_(False), TrainingChoice(lora=None))

    def save(self, folder: Path) -> None:
        """Refuse: there is nothing to write."""
        raise ValueError("nothing of this model is trained")

    def load(self, folder: Path | None) -> None:
        """Refuse: there is nothing to load."""
        raise ValueError("nothing of this model is trained")


class FullModel(TrainedModel):
    """Every weight outside the frozen parts is trained; the reference's values of these are swapped in for its use."""

    def __init__(
        self,
        model: nn.Module,
        choice: TrainingChoice,
        own_frozen: tuple[str, ...],
        initial_state: Callable[[], dict[str, Tensor]] | None,
    ) -> None:
        left_alone = _matching(model, choice.frozen) if choice.frozen is not None else set()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name.startswith(own_frozen) or name in left_alone))
        super().__init__(model, choice)
        if not self.trainable_parameters():
            raise InputError("policy.frozen", choice.frozen, "It leaves nothing to train; narrow it.")
        start = copied(model.state_dict(), CPU) if initial_state is None else {}
        self._initial_state = initial_state or (lambda: start)
        if choice.reference == "cpu":
            self._reference_device = CPU
        if choice.reference != "none":
            self.copies["reference"] = self._current(self._reference_device)

    def save(self, folder: Path) -> None:
        """Write the weights, in one file or in shards as transformers or diffusers names them, and config.json."""
        save: Any = self.model.save_pretrained
        # transformers would store some models under the names of their first release, which are not the parameters'.
        own = {"save_original_format": False} if "save_original_format" in inspect.signature(save).parameters else {}
        save(folder, **own)

    def load(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""
        if folder is None:
            state = self._initial_state()
        else:
            state = {}
            for shard in sorted(path for pattern in FULL_WEIGHTS for path in folder.glob(pattern)):
                state.update(load_file(shard))
        # Of tied weights only one is stored.
        tied = (getattr(self.model, "all_tied_weights_keys", None) or {}).keys() - state.keys()
        expected = {name: value for name, value in self.model.state_dict().items() if name not in tied}
        refuse_differing(state, expected, "policy", "The stored weights are for another model.")
        self.model.load_state_dict(state, strict=False)


def _matching(model: nn.Module, pattern: str) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    matching = {name for name in names if re.fullmatch(pattern, name)}
    if not matching:
        some = ", ".join(names[:: max(1, len(names) // 4)][:4])
        hint = f"It has to match a parameter's full name; parameters are called {some}."
        raise InputError("policy.frozen", pattern, hint)
    return matching


class LoraModel(TrainedModel):
    """Adapters over a frozen base.

    The reference is the base with the adapters off, or, where adapters change the model from the start (a stored
    adapter, pissa, olora) or the reference was refreshed, with earlier values of the adapters, on the same device.
    """

    model: "PeftModel"
    has_reference = True

    def __init__(self, base: nn.Module, choice: TrainingChoice, base_name: str, default_targets: str | None) -> None:
        settings = choice.lora
        assert settings is not None, "adapters were chosen"
        if choice.adapter is None:
            config = _new_config(base, settings, default_targets)
        else:
            config = _stored_config(choice.adapter, settings)
        adapted = _with_adapters(base, config, choice)
        # It imports peft, which takes seconds; most of what imports this package builds no adapters.
        from grpo_core.policies.trained.adapter_products import use_bfloat16_products

        use_bfloat16_products(adapted)
        if settings.init_lora_weights in MOVING and (tied := tied_layers(adapted)):
            hint = (
                f"It moves a part of the weights of {', '.join(tied)} into an adapter, and other modules use them too "
                "(tied embeddings); name other layers in policy.lora.targets, or set it to true."
            )
            raise InputError("policy.lora.init_lora_weights", settings.init_lora_weights, hint)
        saved = adapted.peft_config["default"]
        saved.base_model_name_or_path, saved.revision = choice.hub or (base_name, None)
        # The model card says nothing about this policy, and its template is compiled at every save.
        adapted.create_or_update_model_card = lambda output_dir: None
        super().__init__(adapted, choice)
        self._initial = copied(self._state(), CPU)
        if choice.adapter is not None:
            self._start_from(choice.adapter)
        self._starts_as_base = choice.starts_as_base
        if not self._starts_as_base:
            self.keep("reference")

    def _start_from(self, folder: Path) -> None:
        state = load_file(folder / ADAPTER_FILE)
        hint = "Its weights do not fit the model; give an adapter of this model."
        refuse_differing(state, self._initial, PLACE, hint, str(folder))
        self._initial = {name: value.to(self._initial[name].dtype) for name, value in state.items()}
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            self.load(None)

    def _state(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        state: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return state

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)

    def load(self, folder: Path | None) -> None:
        """Load the adapters of `folder`; None restores the initial ones."""
        from peft import set_peft_model_state_dict

        state = self._initial if folder is None else load_file(folder / ADAPTER_FILE)
        # peft would load only the matching part, and the policy would mix two versions.
        hint = "The stored adapter is for another model, rank or targets; set policy as it was for that adapter."
        refuse_differing(state, self._initial, "policy.lora", hint)
        set_peft_model_state_dict(self.model, state)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Add adapters to the weights inside, where that is exact enough; make what else depends on them alone once."""
        from grpo_core.policies.trained.adapter_products import kept_factors

        with merged_adapters(self.model), kept_factors(self.model):
            yield

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Give the base with the adapters off, or with the reference's values of them."""
        with super().reference() if "reference" in self.copies else self.model.disable_adapter():
            yield self.model

    def load_reference(self, folder: Path | None) -> None:
        """Load the adapters of `folder` for the reference; None: the policy that training starts from."""
        if folder is None and self._starts_as_base:
            self.copies.pop("reference", None)
        else:
            super().load_reference(folder)


def _other_linear_layers(model: nn.Module) -> list[str]:
    """Return the names of layers that are linear by class and never called, or return something else: some routers."""
    linear = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))
    # A quantized layer would cast its bias to the dtype of its weight when it is tried.
    tried = ((name, each) for name, each in linear if not is_quantized(each))
    own = (name for name, each in tried if type(each).forward is not nn.Linear.forward and not _is_linear(each))
    sources = {kind: _forward_of(kind) for kind in {type(each) for each in model.modules()}}
    read = (f"{name}.{part}" for name, each in model.named_modules() for part in _only_read(each, sources[type(each)]))
    return [*own, *(name.lstrip(".") for name in read)]


def _only_read(module: nn.Module, source: str) -> list[str]:
    """Return the linear layers whose weight a module multiplies itself: an adapter would count only while merged."""
    linear = [re.escape(name) for name, each in module.named_children() if isinstance(each, nn.Linear)]
    read = (name for name in linear if re.search(rf"self\.{name}\.weight\b(?!\.(dtype|device))", source))
    # One that is called, or handed to what calls it, is mentioned as it is.
    return [name for name in read if not re.search(rf"self\.{name}\b(?!\.)", source)]


def _forward_of(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


@torch.no_grad()
def _is_linear(layer: nn.Linear) -> bool:
    try:
        returned = layer(layer.weight.new_zeros(1, layer.in_features))
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False
    return isinstance(returned, Tensor) and returned.shape == (1, layer.out_features)


def _new_config(base: nn.Module, settings: LoraSettings, default_targets: str | None) -> "LoraConfig":
    # Importing peft takes seconds, and most of what imports this package builds no adapters.
    from peft import LoraConfig

    targets = default_targets if settings.targets is None else settings.targets
    if targets is None:
        raise ValueError("neither the settings nor default_targets say which layers get an adapter")
    left_out = _other_linear_layers(base)
    if settings.targets is not None and (matched := [each for each in left_out if re.fullmatch(targets, each)]):
        hint = f"{matched[0]} is never called or returns more than a product: no adapter fits; narrow the expression."
        raise InputError("policy.lora.targets", targets, hint)
    whole = settings.modules_to_save
    if unknown := set(whole or ()) - {name.rpartition(".")[2] for name, _ in base.named_modules()}:
        hint = "The model has no module of this name; give the last part of a module's name, such as lm_head."
        raise InputError("policy.lora.modules_to_save", sorted(unknown), hint)
    named = (each for name, each in base.named_modules() if name.rpartition(".")[2] in (whole or ()))
    if any(is_quantized(part) for each in named for part in each.modules()):
        hint = "Quantized weights cannot be trained whole; add the name to policy.quantization.skip_modules."
        raise InputError("policy.lora.modules_to_save", list(whole or ()), hint)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        exclude_modules=left_out or None,
        lora_dropout=0.0,
        bias="none",
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        modules_to_save=None if whole is None else list(whole),
        init_lora_weights=settings.init_lora_weights,
    )


def _stored_config(folder: Path, settings: LoraSettings) -> "LoraConfig":
    from peft import LoraConfig

    config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    config.inference_mode, config.init_lora_weights = False, settings.init_lora_weights
    # The base has been compared; peft would warn of each other spelling of its name.
    config.base_model_name_or_path = None
    return config


def _with_adapters(base: nn.Module, config: "LoraConfig", choice: TrainingChoice) -> "PeftModel":
    from peft import get_peft_model

    if any(parameter.is_meta for parameter in base.parameters()):
        # There are no values to be decomposed.
        config = replace(config, init_lora_weights=True)
    with torch.random.fork_rng(devices=[]), expected_warnings():
        torch.manual_seed(choice.seed)
        try:
            return get_peft_model(base, config)
        except (ValueError, re.error) as error:
            if choice.adapter is not None:
                hint = f"It is no adapter of what policy.train names ({error}); give one of that."
                raise InputError(PLACE, str(choice.adapter), hint) from error
            hint = f"Give a regular expression over the model's layer names ({error})."
            raise InputError("policy.lora.targets", config.target_modules, hint) from error
