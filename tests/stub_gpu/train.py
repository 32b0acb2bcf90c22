"""`grpo train` on the stub GPU, with values: the flow, its stages and storage as they are.

python -m tests.stub_gpu.train CONFIG FOLDER [section.key=value ...]    on the stub (build.py); runs go into the folder
"""

import sys
import threading

from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.loader import read_config
from flows import train
from tests.stub_gpu.host_values import HostValues


def main(config: str, folder: str, *overrides: str) -> None:
    values = HostValues(everything=True)
    run = threading.Thread.run

    def with_values(self: threading.Thread) -> None:
        with sdpa_kernel(SDPBackend.MATH), values:
            run(self)

    # A mode is of one thread, and stages run in threads of their own.
    threading.Thread.run = with_values  # type: ignore[method-assign]
    given = ["placement.devices=cuda", "run.iterations=1", "evaluate.prompts=null", f"storage.root={folder}"]
    with sdpa_kernel(SDPBackend.MATH), values:
        train(read_config(f"configs/{config}.yaml", [*given, *overrides]), on_iteration=print)
    assert not values.failed, values.failed


if __name__ == "__main__":
    main(*sys.argv[1:])
