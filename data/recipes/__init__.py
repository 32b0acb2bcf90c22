"""The recipes of the shipped tiny models; `python -m data.recipes MODEL` trains one again and replaces the shipped one.

shapes, edits, grounding   drawn images: with captions, as edits of each other, with questions about where a shape is
glm_image_parts, glm_image, glm_image_edit, sd3, text, vision   build, train, save and measure a model each
trainer, autoencoder       what they share
"""
