"""The recipes of the shipped tiny models: drawn images with captions, questions and edits, and a file a model.

- :mod:`data.recipes.shapes` draws an image for a caption and turns images into image tokens; :mod:`data.recipes.edits`
  draws edits of them, :mod:`data.recipes.grounding` images for questions about where a shape is.
- :mod:`data.recipes.glm_image_parts` with :mod:`data.recipes.glm_image`, :mod:`data.recipes.glm_image_edit`,
  :mod:`data.recipes.sd3`, :mod:`data.recipes.text` and :mod:`data.recipes.vision` build, train, save and measure a
  model each, with :mod:`data.recipes.trainer` and :mod:`data.recipes.autoencoder`.
- `python -m data.recipes MODEL` trains a model again and replaces the shipped one.
"""
