"The shipped traces: reproducible, free of the machine that they were made on, and what the world answers today."
import gzip
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from composer_replication.envs.toy.env import SPLITS, WorldEnv, make_world
from composer_replication.envs.toy.traces import record_traces, toy_path, toy_traces, traces_bytes


def test_recording_again_gives_the_shipped_file():
    recorded = traces_bytes(record_traces())
    # The lines are compared, not the stream: zlib builds compress differently.
    assert gzip.decompress(recorded) == gzip.decompress(toy_path().read_bytes())
    assert recorded[4:8] == toy_path().read_bytes()[4:8] == b"\0\0\0\0"  # no time in the header
    assert len(toy_path().read_bytes()) < 200_000


def test_recording_does_not_depend_on_where_or_how_it_runs(tmp_path):
    code = ("import sys; from composer_replication.envs.toy.traces import *; "
            "sys.stdout.buffer.write(traces_bytes(record_traces()))")
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo",
                        "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True, timeout=120).stdout
    assert gzip.decompress(out) == gzip.decompress(toy_path().read_bytes())


def test_another_seed_gives_other_traces():
    assert not {t.task_id for t in record_traces(1)} & {t.task_id for t in toy_traces()}


def test_nothing_of_the_machine_is_in_it():
    text = gzip.decompress(toy_path().read_bytes()).decode()
    for word in (tempfile.gettempdir(), str(Path.home()), os.uname().nodename, sys.prefix, "Traceback", "/usr/"):
        assert word not in text, word


def test_every_answer_is_what_the_world_says_today():
    # Independent of `world_episode`: the recorded calls alone are made again.
    for trace in toy_traces():
        env, (split, _, seed) = WorldEnv(), trace.task_id.partition("-")
        env.reset(seed, split)
        for turn, result in zip(trace.turns, trace.turns[1:], strict=False):
            for call in turn.tool_calls:
                again = env.call(call)
                assert (again.text, again.error_kind) == (result.content, result.fail_reason)
        assert env.reward() == trace.reward


def test_all_failures_occur_and_attempts_fork_late_too():
    traces = toy_traces()
    reasons = [t.fail_reason for trace in traces for t in trace.turns if t.observation]
    for kind in ("tool_not_found", "json_decode", "type_error", "runtime_error"):
        assert reasons.count(kind) >= 3
    assert {0.0, 1.0} == {t.reward for t in traces}
    forks = [next((i for i, (x, y) in enumerate(zip(a.turns, b.turns, strict=False)) if x != y), None)
             for a in traces for b in traces if a.task_id == b.task_id and a.trace_id < b.trace_id]
    assert sum(f == 2 for f in forks) >= 10 and sum(f is not None and f > 2 for f in forks) >= 10


def test_splits_share_no_name_and_no_mix_of_dialects():
    def parts(split):
        tasks = [make_world(str(seed), split) for seed in range(80)]
        return {t.function.name for t in tasks}, {frozenset((x.role, x.dialect) for x in t.tools) for t in tasks}
    names, mixes = zip(*(parts(split) for split in SPLITS))
    for sets in (names, mixes):
        assert all(sets) and not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_importing_the_traces_imports_no_torch():
    code = "import composer_replication.envs.toy.env, composer_replication.envs.toy.tools, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_random_state_is_left_alone():
    random.seed(3)
    before = random.getstate()
    record_traces()
    assert random.getstate() == before
