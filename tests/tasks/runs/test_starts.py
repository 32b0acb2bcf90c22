import json
from pathlib import Path

from tasks.runs.reader import RunReader
from tasks.runs.starts import STARTS_FILE, read_starts, record_start
from tests.tasks.reports.made_runs import RunMaker


def test_every_start_is_a_line_and_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    assert read_starts(RunReader(maker.store)) == ()
    record_start(maker.store)
    path = maker.folder / STARTS_FILE
    path.write_text(path.read_text() + '{"at": "2026-01-02T03:04:05Z", "host"\n')
    record_start(maker.store)
    reader = RunReader(maker.store)
    first, second = read_starts(reader)
    assert first.host == second.host == json.loads(path.read_text().splitlines()[0])["host"]
    assert first.at <= second.at
    assert [damage.place for damage in reader.damages] == [STARTS_FILE]
