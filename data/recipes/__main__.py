"""Train a shipped tiny model again from its recipe: weights, files, measurements, prompt files.

`python -m data.recipes glm-image`, `glm-image-edit`, `sd3`, `text` or `vision`; the same recipe gives the same weights
on the same machine.
"""

import argparse
import importlib

import torch

MODELS = ("glm-image", "glm-image-edit", "sd3", "text", "vision")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    name = parser.parse_args().model.replace("-", "_")
    torch.set_num_threads(1)
    importlib.import_module(f"data.recipes.{name}").make()
