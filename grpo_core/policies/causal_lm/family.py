"""Causal language models as a kind of policy; their libraries are imported on first use."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.pipeline_files import CONFIG_FILE, ONE_NETWORK, Parts, find_model_file
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.protocol import PolicyFamily, first_numbers, numbered_prompt
from grpo_core.policies.trained.quantization import count_quantized
from grpo_core.rollouts.streams import Stream

if TYPE_CHECKING:
    import torch

    from grpo_core.policies.causal_lm.loading import ModelKind
    from grpo_core.policies.causal_lm.policy import CausalLMPolicy
    from grpo_core.policies.sizes import ModelSizes
    from grpo_core.policies.trained.model import TrainedModel
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.rollouts.streams import ImageSize

PROMPT_TOKENS = 512
"""Assumed number of ids of the longest prompt, where the prompts or the tokenizer are not here."""

_AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration fields that announce an operation after the output head."""


def after_head(text: Any) -> bool:
    """Return whether the configuration of a language model announces an operation after its output head."""
    return any(getattr(text, name, None) not in (None, 1, 1.0) for name in _AFTER_HEAD)


class CausalLMFamily(PolicyFamily):
    """Causal language models."""

    modality = "text"
    trained: Mapping[Stream, str] = MappingProxyType({"tokens": ""})
    settings_class: type[CausalLMSettings] = CausalLMSettings
    file = CONFIG_FILE

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Return the settings as the base does; a table keeps the stop texts as JSON."""
        stop = values.get("stop", ())
        return super().settings({**values, "stop": json.loads(stop) if isinstance(stop, str) else stop})

    def policy_class(self) -> "type[CausalLMPolicy]":
        """Return the class of its policies."""
        from grpo_core.policies.causal_lm.policy import CausalLMPolicy

        return CausalLMPolicy

    def kind(self) -> "ModelKind":
        """Return how transformers loads its models."""
        from grpo_core.policies.causal_lm.loading import CAUSAL_LM

        return CAUSAL_LM

    def parts(self, model: str) -> Parts:
        """Return the one network."""
        return ONE_NETWORK

    def build_on_meta(self, model: str, part: str) -> Any:
        """Build the model on the meta device."""
        from grpo_core.policies.causal_lm.loading import on_meta, read_config

        return on_meta(read_config(model, self.kind()), self.kind())

    def train(self, stream: Stream, network: Any, choice: "TrainingChoice", model: str) -> "TrainedModel":
        """Apply the choice."""
        from grpo_core.policies.causal_lm.loading import train_language_model

        return train_language_model(network, choice, self.kind(), base_name=model, initial_state=dict)

    def load_network(self, model: str, stream: Stream, dtype: "torch.dtype") -> Any:
        """Load the model, as it is stored, on the CPU."""
        import torch

        from grpo_core.policies.causal_lm.loading import load_model

        return load_model(model, dtype=dtype, device=torch.device("cpu"), kind=self.kind())

    def refuse_unusable(self, model: str, settings: CausalLMSettings) -> None:
        """Raise InputError if the model or these settings cannot be used; only local files are read."""
        from grpo_core.policies.causal_lm.loading import load_tokenizer, read_config, read_context
        from grpo_core.policies.causal_lm.model_types import refuse_known, refuse_static_cache
        from grpo_core.policies.causal_lm.prompts import uses_template

        self.refuse_missing(model)
        if find_model_file(model, CONFIG_FILE) is None:
            return
        config = read_config(model)
        refuse_known(model, config)
        if settings.cache_implementation == "static":
            refuse_static_cache(config, self.kind().classes[config.model_type])
        uses_template(load_tokenizer(model), settings)
        read_context(config).refuse_too_long(settings.max_completion_length)

    def is_tried(self, model: str) -> bool:
        """Return whether this project's tests try models of its type."""
        from grpo_core.policies.causal_lm.loading import read_config
        from grpo_core.policies.causal_lm.model_types import TRIED, TRIED_WITH_IMAGES

        tried = TRIED_WITH_IMAGES if self.reads_images else TRIED
        return read_config(model, self.kind()).model_type in tried

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
        """Write the model with trained weights, and the files of its tokenizer and processor as they are."""
        from grpo_core.policies.causal_lm.loading import copy_tokenizer
        from grpo_core.policies.trained.whole import save_whole

        save_whole(weights["tokens"], folder, partial(self.load_network, str(base), "tokens", dtype))
        copy_tokenizer(base, folder)

    def check_choices(self, model: str, choices: Mapping[Stream, "TrainingChoice"]) -> tuple[str, ...]:
        """Return which matrices adapters leave out."""
        from grpo_core.policies.causal_lm.loading import describe_left_out

        choice = choices["tokens"]
        trained = self.train("tokens", self.build_on_meta(model, ""), choice, model)
        if choice.lora is None or choice.lora.targets is not None:
            return ()
        adapted: Any = trained.model
        base = adapted.get_base_model()
        # A frozen encoder of images is meant to have none.
        left_out = describe_left_out(base.get_decoder() if self.reads_images and choice.freeze_vision else base)
        return () if left_out is None else (left_out,)

    def sizes(
        self,
        model: str,
        settings: CausalLMSettings,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence["ImageSize"],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count the model, with the longest prompt as PROMPT_TOKENS unless it is known."""
        from grpo_core.policies.causal_lm.loading import CAUSAL_LM, read_config

        return self.language_sizes(
            model, read_config(model), CAUSAL_LM, settings, choices["tokens"], longest or PROMPT_TOKENS
        )

    def language_sizes(
        self,
        model: str,
        config: Any,
        kind: "ModelKind",
        settings: CausalLMSettings,
        choice: "TrainingChoice",
        prompt: int,
        encoder_values: int = 0,
    ) -> "ModelSizes":
        """Return the sizes of a language model whose longest prompt, images included, has `prompt` ids."""
        from grpo_core.policies.causal_lm.loading import on_meta
        from grpo_core.policies.sizes import ModelSizes, cached_values, count_parameters, token_sizes

        network, text = on_meta(config, kind), config.get_text_config()
        counts = {"weights": count_parameters(network)}
        quantized = count_quantized(model, ONE_NETWORK, {"": network}, choice.quantization, kind.outside)
        trained, tokens = self.train("tokens", network, choice, model), settings.max_completion_length
        whole = after_head(text)
        others = {"shared": prompt, "whole_logits": whole, "encoder_values": encoder_values}
        component = token_sizes(trained, text, settings, prompt, tokens, **others)
        return ModelSizes(
            networks=counts,
            quantized={"weights": quantized[""]} if quantized else {},
            components={"tokens": component},
            prompt=prompt,
            cached=component.positions * cached_values(text),
            head=text.vocab_size,
        )


FAMILY: PolicyFamily = CausalLMFamily()
