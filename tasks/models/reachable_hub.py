"""Whether the Hugging Face hub can be reached: its clients would repeat each request for half a minute."""

import os
from threading import Thread

from tasks.progress import log

SECONDS = 4.0  # how long the hub may take to answer


def leave_unreachable_hub() -> bool:
    """Switch the hub off for this process if it does not answer within seconds; return whether it is used."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return False
    answered: list[bool] = []
    # In a thread, because the search for its address has no timeout.
    probe = Thread(target=_probe, args=(answered,), name="hub", daemon=True)
    probe.start()
    probe.join(SECONDS)
    if not answered:
        log("the Hugging Face hub does not answer: only models and datasets of this machine are used")
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        # For the processes of stages.
        os.environ["HF_HUB_OFFLINE"] = "1"
    return bool(answered)


def _probe(answered: list[bool]) -> None:
    """Ask the hub for its page; any answer counts."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except (HTTPError, OSError):
        return
    answered.append(True)
