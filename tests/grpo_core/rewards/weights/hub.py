"""A Hub and a maker of weights on this machine."""

import hashlib
from collections.abc import Mapping

import huggingface_hub
import pytest

from grpo_core.rewards.weights import Published
from tests.grpo_core.rewards.conftest import COMMIT
from tests.grpo_core.rewards.stub import Asked, Reply, Stub

CONTENT = b"weights of the makers"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NET = Published(
    "the makers", "net-7be5be79.pth", "https://example.org/net", "hf://makers/net/net-7be5be79.pth", "7be5be79"
)
OF_A_MAKER = Published("a maker", f"net-{DIGEST[:8]}.pth", licence="BSD", sha256=DIGEST[:8])
"""On a server of its maker; the test adds the address."""


def as_the_hub(requested: Asked, files: Mapping[str, bytes] | None = None) -> Reply:
    """Answer like the Hub for one open repository: one file of any name, or a model of these files."""
    refusals: Mapping[str, tuple[int, str]] = {
        "/closed/net/": (403, "GatedRepo"),
        "/nobody/net/": (404, "RepoNotFound"),
        "/makers/net/resolve/no-branch": (404, "RevisionNotFound"),
        "/makers/net/resolve/main/no-file": (404, "EntryNotFound"),
        "/broken/net/": (500, ""),
    }
    path = requested.path.partition("?")[0]
    for start, (status, code) in refusals.items():
        if path.startswith(start):
            return Reply(b"", status, {"X-Error-Code": code})
    sizes = {name: len(content) for name, content in (files or {}).items()}
    if "/tree/" in path:
        return Reply([{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()])
    if path.startswith("/api/"):
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return Reply({"id": "makers/net", "sha": COMMIT, "siblings": siblings})
    content = CONTENT if files is None else files[path.rpartition("/")[2]]
    digest = hashlib.sha256(content).hexdigest()
    return Reply(content, headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, drop=path.startswith("/gone/"))


def reach(stub: Stub, patch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client take the stub for the Hub."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", stub.url)
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    huggingface_hub.close_session()


def as_a_maker(requested: Asked) -> Reply:
    """Send one file, or something else below `other`, or nothing."""
    if "/none" in requested.path:
        return Reply(b"", 404)
    content = b"other" if "/other" in requested.path else CONTENT
    return Reply(content, headers={"Content-Length": str(len(CONTENT))})
