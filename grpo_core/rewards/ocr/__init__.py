"""Text in images.

- ``text_accuracy``: the reward; ``quoted_text`` finds the wanted texts, ``text_match`` compares.
- ``protocol``: what an OCR engine does; ``rapidocr_engine`` and ``tesseract_engine`` are the two.
"""
