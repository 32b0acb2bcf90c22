"""When, where and with which code a run was started: a line per start, so that a page can say where it comes from."""

import json
import socket
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.checkout import code_version
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore

STARTS_FILE = "starts.jsonl"


class RunStart(BaseModel):
    """One start of a run.

    Attributes:
        at: date and time.
        host: name of the machine.
        code: commit of the checkout, with `-dirty` where files were changed; None outside a checkout.
    """

    model_config = ConfigDict(frozen=True)

    at: datetime
    host: str
    code: str | None

    def __str__(self) -> str:
        code = f", code {self.code}" if self.code is not None else ""
        return f"{self.at:%Y-%m-%d %H:%M} UTC on {self.host}{code}"


def record_start(store: ArtifactStore) -> None:
    """Add a line about this moment, machine and code."""
    start = RunStart(at=datetime.now(UTC).replace(microsecond=0), host=socket.gethostname(), code=code_version())
    store.write_file(STARTS_FILE, (store.read_file(STARTS_FILE) or b"") + start.model_dump_json().encode() + b"\n")


def read_starts(reader: RunReader) -> tuple[RunStart, ...]:
    """Read the starts in order; a damaged line is reported and left out."""
    starts = []
    for line in (reader.read_bytes(STARTS_FILE) or b"").splitlines():
        try:
            starts.append(RunStart.model_validate(json.loads(line)))
        except (ValueError, ValidationError):
            reader.report_damage(STARTS_FILE, "a line of it is damaged")
    return tuple(starts)
