"""GLM-Image's processor for tokens of any size. Saved pipelines carry this file, so it imports transformers alone."""

import math
from typing import Any

from transformers import GlmImageProcessor


class UnitProcessor(GlmImageProcessor):
    """GlmImageProcessor for any pixel unit, not only 32: a decoder with a smaller patch has a smaller unit.

    Attributes:
        unit: pixels along one side of a large token, as in processor_config.json.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, unit: int = 32
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.unit = unit

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        rows, columns = height // self.unit, width // self.unit
        # The preview: about (unit / 2)^2 cells with the large grid's aspect.
        ratio, cells = rows / columns, self.unit // 2
        return rows, columns, int(math.sqrt(ratio) * cells), int(math.sqrt(1 / ratio) * cells)


# `save_pretrained` writes this file next to the processor's configuration.
UnitProcessor.register_for_auto_class()
