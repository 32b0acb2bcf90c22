"""Write the prompt files for training with rewards, with the image that each prompt describes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.shapes import Scene, draw

TRAIN_FILE = "shapes_train.jsonl"
HELDOUT_FILE = "shapes_heldout.jsonl"


def choose_scenes(scenes: Sequence[Scene], count: int, seed: int) -> tuple[Scene, ...]:
    """Choose scenes so that every colour, shape, position and background is about equally frequent.

    Args:
        scenes: to choose from.
        count: how many; at most the number of scenes.
        seed: orders the scenes before the choice, which is greedy.

    Raises:
        ValueError: there are fewer scenes than count.
    """
    if count > len(scenes):
        raise ValueError(f"count is {count}, but there are only {len(scenes)} scenes")
    left = [scenes[i] for i in np.random.default_rng(seed).permutation(len(scenes))]
    chosen: list[Scene] = []
    used: dict[tuple[str, str], int] = {}
    for _ in range(count):
        scene = min(left, key=lambda candidate: sum(used.get(word, 0) for word in _words(candidate)))
        left.remove(scene)
        chosen.append(scene)
        for word in _words(scene):
            used[word] = used.get(word, 0) + 1
    return tuple(chosen)


def write_prompt_file(scenes: Sequence[Scene], file: Path, targets: Path) -> None:
    """Write one JSON object per scene, and its image as PNG into the folder of targets.

    The columns are prompt, target (the image's file name within the folder of targets), color, shape, position and
    background.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    targets.mkdir(parents=True, exist_ok=True)
    lines = []
    for scene in scenes:
        name = "-".join(value for _, value in _words(scene)).replace(" ", "-") + ".png"
        draw(scene).save(targets / name, optimize=True)
        lines.append(json.dumps({"prompt": scene.caption, "target": name, **dict(_words(scene))}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _words(scene: Scene) -> tuple[tuple[str, str], ...]:
    return (
        ("color", scene.color),
        ("shape", scene.shape),
        ("position", scene.position),
        ("background", scene.background),
    )
