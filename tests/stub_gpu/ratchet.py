"""What a token, a denoising step and an update's microbatch take on a GPU, kept in ratchet.json and never more.

python -m tests.stub_gpu.ratchet    counts them again and writes the file: after work that takes less, or a new torch
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.stub_gpu.build import stub_environment

FILE = Path(__file__).with_name("ratchet.json")
LIBRARIES = ("torch", "transformers", "diffusers", "peft")


def versions() -> dict[str, str]:
    """Return the versions that launches depend on."""
    return {library: version(library) for library in LIBRARIES}


def increases(kept: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a family takes more of than is kept, with the lines that wait or copy more often."""
    for unit, counts in found["counts"].items():
        before = kept["counts"].get(unit, {})
        more = [
            f"{count:g} {name.replace('_', ' ')}, {before.get(name, 0):g} before"
            for name, count in counts.items()
            if count > before.get(name, 0)
        ]
        if more:
            yield f"a {unit}: {'; '.join(more)}"
            places = kept["places"].get(unit, {})
            for place, count in found["places"][unit].items():
                if count > places.get(place, 0):
                    yield f"    {found['lines'][place]}: {count:g} of {place}, {places.get(place, 0):g} before"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        environment = os.environ | stub_environment(Path(".pytest_cache/d/stub_gpu"))
        subprocess.run([sys.executable, "-m", "tests.stub_gpu.families", file], env=environment, check=True)
        found = json.loads(file.read_text())
    families = {name: {part: each[part] for part in ("counts", "places")} for name, each in found.items()}
    FILE.write_text(json.dumps({"versions": versions(), "families": families}, indent=1) + "\n")


if __name__ == "__main__":
    main()
