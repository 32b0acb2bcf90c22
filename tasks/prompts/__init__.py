"""Prompts of an iteration.

read           prompt files and `datasets` repositories -> prompts with stable names
files          finding and reading input files
formats        prompt files -> tables, Parquet among them; text_formats has text, JSON, CSV and TSV
hub_datasets   `datasets` repositories -> tables
source_images  the images in prompts; marks says where they stand in the text, images which files are read
targets        target images, and the image size of each prompt
curriculum     which prompts an iteration samples, equally often or by measured difficulty
"""
