"""Causal language models as a kind of policy; their libraries are imported on first use."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CONFIG_FILE, CausalLMSettings, refuse_missing_folder
from grpo_core.policies.pipeline_files import find_model_file
from grpo_core.policies.protocol import PolicyFamily, first_numbers, numbered_prompt, read_settings
from grpo_core.policies.trained.quantization import QuantizationSettings, stored_quantization
from grpo_core.streams import Modality, Stream

if TYPE_CHECKING:
    import torch

    from grpo_core.policies.causal_lm.policy import CausalLMPolicy
    from grpo_core.policies.sizes import ModelSizes
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.streams import ImageSize

PROMPT_TOKENS = 512
"""Assumed number of ids of the longest prompt, where the prompts or the tokenizer are not here."""

UNTRIED = "the model has no small copy to be tried on; a run tries it with its weights before it samples"
"""What a person should know about such a model."""

_AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration fields that announce an operation after the output head."""


def after_head(text: Any) -> bool:
    """Return whether the configuration of a language model announces an operation after its output head."""
    return any(getattr(text, name, None) not in (None, 1, 1.0) for name in _AFTER_HEAD)


def stored_stop(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored row with its stop texts as a list; a table keeps them as JSON."""
    stop = values.get("stop", ())
    return {**values, "stop": json.loads(stop) if isinstance(stop, str) else stop}


class CausalLMFamily:
    """Causal language models as a PolicyFamily."""

    modality: Modality = "text"
    streams: tuple[Stream, ...] = ("tokens",)
    reads_images: bool = False

    def settings(self, values: Mapping[str, Any]) -> CausalLMSettings:
        """Return the sampling settings from a configuration section or a stored row."""
        return read_settings(CausalLMSettings, stored_stop(values))

    def policy_class(self) -> "type[CausalLMPolicy]":
        """Import its libraries and return the class."""
        from grpo_core.policies.causal_lm.policy import CausalLMPolicy

        return CausalLMPolicy

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model."""
        refuse_missing_folder(model)

    def refuse_unusable(self, model: str, settings: CausalLMSettings) -> None:
        """Raise InputError if the model or these settings cannot be used; only local files are read."""
        from grpo_core.policies.causal_lm.compatibility import refuse_incompatible
        from grpo_core.policies.causal_lm.loading import load_tokenizer, read_config, read_context
        from grpo_core.policies.causal_lm.prompts import uses_template

        self.refuse_missing(model)
        if find_model_file(model, CONFIG_FILE) is None:
            return
        config = read_config(model)
        refuse_incompatible(model, config)
        uses_template(load_tokenizer(model), settings)
        read_context(config).refuse_too_long(settings.max_completion_length)

    def refuse_quantization(
        self,
        model: str,
        quantization: QuantizationSettings | None,
        streams: Sequence[Stream],
        device: "torch.device",
        *,
        adapters: bool,
    ) -> None:
        """Raise InputError if the weights cannot be quantized as chosen on this device, or are stored quantized."""
        if find_model_file(model, CONFIG_FILE) is not None:
            from grpo_core.policies.causal_lm.loading import read_config, require_usable_weights

            require_usable_weights(model, read_config(model), quantization, device, adapters=adapters)

    def refuse_prompts(
        self,
        model: str,
        settings: CausalLMSettings,
        prompts: Sequence[str],
        images: Sequence[Sequence["ImageSize"]] = (),
    ) -> int:
        """Raise InputError if the model cannot read one of the prompts; return the ids of the longest."""
        if any(images):
            hint = "A model of texts does not see images; use policy.kind vision_lm, or leave out the image column."
            raise InputError("data.prompts", f"{sum(map(len, images))} images", hint)
        from grpo_core.policies.causal_lm.loading import load_tokenizer, read_config, read_context
        from grpo_core.policies.causal_lm.prompts import prompt_ids, require_room

        context, tokenizer = read_context(read_config(model)), load_tokenizer(model)
        longest = 0
        for prompt, number in first_numbers(prompts).items():
            with numbered_prompt(number):
                length = len(prompt_ids(tokenizer, settings, prompt))
                require_room(prompt, length, settings, context)
            longest = max(longest, length)
        return longest

    def example_ids(
        self, model: str, settings: CausalLMSettings, output: "ImageSize | str", *, edited: bool, seed: int
    ) -> list[int] | None:
        """Return the ids of a text, without an end token; None if the model is not on this machine."""
        if find_model_file(model, CONFIG_FILE) is None:
            return None
        from grpo_core.policies.causal_lm.loading import load_tokenizer

        ids: list[int] = load_tokenizer(model)(output, add_special_tokens=False)["input_ids"]
        return ids

    def save_whole(self, base: Path, weights: Mapping[Stream, Path], folder: Path, *, dtype: "torch.dtype") -> None:
        """Write the model with trained weights, and its tokenizer's files as they are."""
        import torch

        from grpo_core.policies.causal_lm.loading import copy_tokenizer, load_model
        from grpo_core.policies.trained.whole import save_whole

        save_whole(weights["tokens"], folder, lambda: load_model(str(base), dtype=dtype, device=torch.device("cpu")))
        copy_tokenizer(base, folder)

    def check_choices(self, model: str, choices: Mapping[Stream, "TrainingChoice"]) -> tuple[str, ...]:
        """Return what adapters leave out, and whether the model has yet to be tried; it is built on the meta device.

        Raises:
            InputError: the choice matches nothing in the model.
        """
        from grpo_core.policies.causal_lm.compatibility import refuse_incompatible
        from grpo_core.policies.causal_lm.loading import build_on_meta, describe_left_out, read_config

        config, choice = read_config(model), choices["tokens"]
        trained, notes = build_on_meta(model, config, choice), []
        if not refuse_incompatible(model, config):
            notes.append(UNTRIED)
        if choice.lora is not None and choice.lora.targets is None:
            adapted: Any = trained.model
            notes += filter(None, [describe_left_out(adapted.get_base_model())])
        return tuple(notes)

    def sizes(
        self,
        model: str,
        settings: CausalLMSettings,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence["ImageSize"],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count the model, with the longest prompt as PROMPT_TOKENS unless it is known."""
        from grpo_core.policies.causal_lm.loading import CAUSAL_LM, build_on_meta, quantized_parameters, read_config
        from grpo_core.policies.sizes import ComponentSizes, ModelSizes, cached_values, count_parameters, shown_count

        config, choice = read_config(model), choices["tokens"]
        text, trained = config.get_text_config(), build_on_meta(model, config, choice)
        adapters = trained.trainable_parameters().values() if choice.lora is not None else ()
        parameters = count_parameters(trained.model) - sum(each.numel() for each in adapters)
        # The last sampled token is never fed back.
        prompt = longest or PROMPT_TOKENS
        length = prompt + settings.max_completion_length - 1
        component = ComponentSizes(
            trained=trained,
            width=text.hidden_size,
            blocks=text.num_hidden_layers,
            positions=length,
            scored=settings.max_completion_length,
            vocabulary=text.vocab_size,
            whole_logits=after_head(text),
        )
        usable = choice.quantization or stored_quantization(model, getattr(config, "quantization_config", None))
        quantized = {"weights": quantized_parameters(config, CAUSAL_LM, usable)} if usable is not None else {}
        return ModelSizes(
            networks={"weights": parameters},
            quantized=quantized,
            components={"tokens": component},
            described=f"{shown_count(parameters)} parameters in {text.num_hidden_layers} layers, prompts counted as "
            f"{prompt} ids",
            cached=length * cached_values(text),
            head=text.vocab_size,
        )


FAMILY: PolicyFamily = CausalLMFamily()
