"""Text in images.

- ``text_accuracy``: the reward; ``quoted_text`` finds the wanted texts, ``text_match`` compares.
- ``engine``: what an OCR engine does; ``rapid`` and ``tesseract`` are the two.
"""
