"""Vision-language models as a kind of policy; their libraries are imported on first use."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_core.pipeline_files import CONFIG_FILE, find_model_file
from grpo_core.policies.causal_lm.family import PROMPT_TOKENS, CausalLMFamily
from grpo_core.policies.protocol import PolicyFamily, first_numbers, numbered_prompt
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.streams import Stream

if TYPE_CHECKING:
    from grpo_core.policies.causal_lm.loading import ModelKind
    from grpo_core.policies.sizes import ModelSizes
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.policies.vision_lm.policy import VisionLMPolicy
    from grpo_core.rollouts.streams import ImageSize

IMAGE_SIDE = 1024
"""Assumed width and height of a prompt's one image, in pixels, before the processor scales it."""

_PROCESSED = 64
"""Prompts with the largest images whose ids are counted before a run; those of any others count when they are read."""


class VisionLMFamily(CausalLMFamily):
    """Vision-language models."""

    settings_class = VisionLMSettings
    reads_images = True

    def policy_class(self) -> "type[VisionLMPolicy]":
        """Return the class of its policies."""
        from grpo_core.policies.vision_lm.policy import VisionLMPolicy

        return VisionLMPolicy

    def kind(self) -> "ModelKind":
        """Return how transformers loads its models."""
        from grpo_core.policies.vision_lm.loading import VISION_LM

        return VISION_LM

    def refuse_unusable(self, model: str, settings: Any) -> None:
        """Raise InputError if the model or these settings cannot be used; only local files are read."""
        from grpo_core.policies.causal_lm.loading import read_config, read_context
        from grpo_core.policies.causal_lm.model_types import refuse_known, refuse_static_cache
        from grpo_core.policies.vision_lm.loading import VISION_LM, load_processor
        from grpo_core.policies.vision_lm.prompts import find_placeholders, image_sizes, print_prompt

        self.refuse_missing(model)
        if find_model_file(model, CONFIG_FILE) is None:
            return
        config, processor = read_config(model, VISION_LM), load_processor(model)
        image_sizes(processor, settings)
        print_prompt(processor, settings, "", 1)
        find_placeholders(config, processor)
        refuse_known(model, config)
        if settings.cache_implementation == "static":
            refuse_static_cache(config, VISION_LM.classes[config.model_type])
        read_context(config).refuse_too_long(settings.max_completion_length)

    def refuse_prompts(
        self,
        model: str,
        settings: Any,
        prompts: Sequence[str],
        images: Sequence[Sequence["ImageSize"]] = (),
    ) -> int:
        """As the base, with blank images, those of the prompts with the most pixels."""
        from PIL import Image

        from grpo_core.policies.causal_lm.loading import read_config, read_context
        from grpo_core.policies.causal_lm.prompts import require_room
        from grpo_core.policies.vision_lm.loading import VISION_LM, load_processor
        from grpo_core.policies.vision_lm.prompts import find_placeholders, printed_ids, process_prompt

        config, processor = read_config(model, VISION_LM), load_processor(model)
        context, placeholders = read_context(config), find_placeholders(config, processor)
        given = first_numbers(zip(prompts, map(tuple, images or ((),) * len(prompts)), strict=True))
        sets = dict.fromkeys(sizes for _, sizes in given if sizes)
        largest = sorted(sets, key=lambda sizes: sum(size.width * size.height for size in sizes))[-_PROCESSED:]
        added: dict[tuple[ImageSize, ...], int] = {}
        longest = 0
        for (prompt, sizes), number in given.items():
            with numbered_prompt(number):
                if not sizes:
                    ids = process_prompt(processor, settings, prompt, [], placeholders).ids
                    require_room(prompt, len(ids), settings, context)
                    longest = max(longest, len(ids))
                    continue
                printed = len(printed_ids(processor, settings, prompt, len(sizes)))
                if sizes in largest and sizes not in added:
                    blank = [Image.new("RGB", (size.width, size.height)) for size in sizes]
                    added[sizes] = len(process_prompt(processor, settings, prompt, blank, placeholders).ids) - printed
                of_images = added.get(sizes, 0)
                require_room(prompt, printed + of_images, settings, context, of_images=of_images)
                longest = max(longest, printed + of_images)
        return longest

    def sizes(
        self,
        model: str,
        settings: Any,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence["ImageSize"],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count the model, with the longest prompt as PROMPT_TOKENS and one image of IMAGE_SIDE unless it is known."""
        import torch
        from PIL import Image

        from grpo_core.policies.causal_lm.loading import read_config
        from grpo_core.policies.vision_lm.loading import VISION_LM, load_processor
        from grpo_core.policies.vision_lm.prompts import find_placeholders, process_prompt

        config, choice, processor = read_config(model, VISION_LM), choices["tokens"], load_processor(model)
        # Models are counted on the meta device, where there are no pixels.
        with torch.device("cpu"):
            image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE))
            processed = process_prompt(processor, settings, "", [image], find_placeholders(config, processor))
        prompt = longest or PROMPT_TOKENS + processed.ids.count(config.image_token_id)
        encoder_values = 0 if choice.freeze_vision else _encoder_values(config, processed.pixels)
        return self.language_sizes(model, config, VISION_LM, settings, choice, prompt, encoder_values)


def _encoder_values(config: Any, pixels: Mapping[str, Any]) -> int:
    vision = config.vision_config
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    blocks = int(getattr(vision, "depth", None) or vision.num_hidden_layers)
    patch = int(vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size)
    values = int(pixels["pixel_values"].numel())
    frames = int(getattr(vision, "temporal_patch_size", 1))
    return values // (3 * frames * patch**2) * width * blocks


FAMILY: PolicyFamily = VisionLMFamily()
