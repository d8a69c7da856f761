"""The page of played forks."""
from dataclasses import replace

import pytest

from composer_replication.envs.toy.traces import toy_traces
from composer_replication.report.forks import fork_tables, forks_page, played_picture
from composer_replication.rollout.fork_result import ForkResult
from composer_replication.traces.error_sites import find_error_sites

TRACE = next(trace for trace in toy_traces() if find_error_sites(trace))
SITE = find_error_sites(TRACE)[0]
RESULT = ForkResult("k", TRACE.trace_id, SITE.turn, "t", SITE.kind, "template", "A hint.", "own", "A hint.", 0, "done",
                    None, False, True, 2, TRACE)


def test_the_picture_shows_what_the_readers_own_finder_finds():
    "A finder that finds nothing lets every call work, in the recorded row and in the branch."
    none, own = (str(played_picture(TRACE, [RESULT], find)) for find in (lambda trace: [], find_error_sites))
    assert none.count(": works") > own.count(": works")
    page = forks_page([RESULT], {TRACE.trace_id: TRACE}, {}, {"model": "m"}, find_sites=lambda trace: [])
    assert page.count(": works") == none.count(": works")


@pytest.mark.parametrize("own", [True, False])
def test_no_column_of_a_terminals_table_is_empty(own):
    "At eighty columns an empty one shows as two bars; it is there only where a hint gains nothing."
    results = [replace(RESULT, key=f"{task}{arm}", trace_id=f"{task}", task=f"{task}", arm=arm, works=arm == "own" and own)
               for task in range(12) for arm in ("none", "own")]
    for table in fork_tables(results):
        columns = [[str(cell) for cell in column.cells] for column in table.columns]
        assert all(any(cells) for cells in columns)
    assert ("gains nothing" in columns[-1]) is not own
