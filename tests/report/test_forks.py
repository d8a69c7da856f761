"""The page of played forks."""
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.experiments.fork_worth import ForkResult
from composer_replication.report.forks import forks_page, played_picture
from composer_replication.traces.error_sites import find_error_sites

TRACE = next(trace for trace in toy_traces() if find_error_sites(trace))
SITE = find_error_sites(TRACE)[0]
RESULT = ForkResult("k", TRACE.trace_id, SITE.turn, "t", SITE.kind, "template", "A hint.", "own", "A hint.", 0, "done", None,
                    False, True, 2, TRACE)


def test_the_picture_shows_what_the_readers_own_finder_finds():
    "A finder that finds nothing lets every call work, in the recorded row and in the branch."
    none, own = (str(played_picture(TRACE, [RESULT], find)) for find in (lambda trace: [], find_error_sites))
    assert none.count(": works") > own.count(": works")
    page = forks_page([RESULT], {TRACE.trace_id: TRACE}, {}, {"model": "m"}, find_sites=lambda trace: [])
    assert page.count(": works") == none.count(": works")
