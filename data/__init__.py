"""The shipped data: synthetic images with captions, prompts, the tiny GLM-Image, SD3, text model and vision model.

- :mod:`data.shapes` draws an image for a caption, turns images into image tokens and back, and writes the prompt files
  and their targets.
- :mod:`data.grounding` draws images for questions about where a shape is, and writes their prompt files.
- :mod:`data.tiny_glm_image`, :mod:`data.tiny_sd3`, :mod:`data.tiny_text` and :mod:`data.tiny_vision` build, train,
  measure and save the models under ``data/models``, with :mod:`data.training`.
- :mod:`data.tiny_models` is the command that trains and replaces a shipped model.
- Both image models learn from imperfect drawings of :mod:`data.shapes`.
"""
