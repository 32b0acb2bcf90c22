"""How images are drawn, as a record."""

from dataclasses import dataclass

from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class GlmImageSettings:
    """How images are drawn.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, likewise.
        temperature: of the token distribution.
        top_k: as in grpo_core.sampling.Truncation, likewise the next two; 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
        decode_batch_size: images decoded at once, at most; siblings only.
    """

    height: int
    width: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_inference_steps: int = 50
    guidance_scale: float = 1.5
    decode_batch_size: int = 16

    @property
    def truncation(self) -> Truncation:
        """Which of the image codes can be drawn.

        Raises:
            InputError: a value outside its range.
        """
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
