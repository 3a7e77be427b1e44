"""Recorded and uploaded runs."""

import gzip
import json
from pathlib import Path

import pytest

from app.library import RUNS, load_packed, load_recording, load_uploaded, pick, recordings, save_packed
from decoding.errors import UsageError
from decoding.metrics import measure
from decoding.records import MAX_RECORD_BYTES
from tests.app.made_up import long_run


def test_a_packed_run_reads_back_with_the_same_figures(tmp_path: Path) -> None:
    run = long_run("a")
    save_packed(run, tmp_path / "a.json.gz")
    assert measure(load_packed(tmp_path / "a.json.gz")) == measure(run)
    assert load_packed(tmp_path / "a.json.gz").output_ids == run.output_ids


def test_every_shipped_recording_is_valid_and_opens_with_plain_decoding() -> None:
    shipped = recordings()
    assert shipped
    for recording in shipped:
        runs = load_recording(recording)
        assert runs[0].head is None and len(runs) >= 2, recording.name
        assert len({tuple(run.prompt_ids) for run in runs}) == 1
        assert all(run.finish_reason in ("stop", "length") for run in runs)
    assert sum(path.stat().st_size for path in RUNS.rglob("*.gz")) < 12 << 20


def test_uploads_are_checked(tmp_path: Path) -> None:
    good, other, broken, bomb = (tmp_path / name for name in ("good.json", "other.json", "broken.json", "bomb.json.gz"))
    long_run("a").save(good)
    other.write_text(json.dumps({**json.loads(good.read_text()), "prompt_ids": [2]}))
    broken.write_text('{"schema": "draftscope.run/1", "target": 3}')
    bomb.write_bytes(gzip.compress(b" " * (MAX_RECORD_BYTES + 2)))
    assert load_uploaded([str(good)])[0].head == "a"
    with pytest.raises(UsageError, match=r"broken\.json is not a valid run record"):
        load_uploaded([str(broken)])
    with pytest.raises(UsageError, match="different prompts"):
        load_uploaded([str(good), str(other)])
    with pytest.raises(UsageError, match="larger than"):
        load_uploaded([str(bomb)])
    with pytest.raises(UsageError, match="0 files given"):
        load_uploaded([])
    bomb.write_bytes(b"no gzip")
    with pytest.raises(UsageError, match=r"bomb\.json\.gz can't be read"):
        load_uploaded([str(bomb)])


def test_a_view_picks_four_lanes_and_the_one_that_was_asked_for() -> None:
    runs = [long_run(None), *(long_run(name) for name in "abcde")]
    assert [run.head for run in pick(runs)] == [None, "a", "b", "c"]
    assert [run.head for run in pick(runs, lane="e")] == [None, "a", "b", "e"]
    assert [run.head for run in pick(runs, ["e", "autoregressive"])] == [None, "e"]
    with pytest.raises(UsageError, match="no lane 'x'"):
        pick(runs, ["x"])
    with pytest.raises(UsageError, match="4 lanes at most"):
        pick(runs, ["a", "b", "c", "d", "e"])
