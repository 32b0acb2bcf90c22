"""The shipped data: synthetic images with captions, prompts, the tiny GLM-Image and the tiny text model.

:mod:`data.shapes` draws an image for a caption, turns images into image tokens and back, and writes the prompt files
and their targets. :mod:`data.tiny_glm_image` builds, trains, measures and saves the tiny GLM-Image under
``data/models``, :mod:`data.tiny_text` does the same for a language model, both with :mod:`data.training`.
"""
