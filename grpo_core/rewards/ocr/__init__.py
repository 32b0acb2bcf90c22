"""Words that an image should show, read by an OCR engine.

text_accuracy  the reward
text_match     the wanted texts of a prompt, and how well the text that was read matches them
engines        RapidOCR and Tesseract; lines: what they read, in order, and what they overlook
"""
