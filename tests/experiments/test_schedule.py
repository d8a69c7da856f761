"""Real processes: killed parents and children, silence, locks, damaged files. The arm is a stand-in that counts slowly."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import alive

from composer_replication.core.errors import InputProblem
from composer_replication.experiments import schedule
from composer_replication.experiments.schedule import Job, read_result, run_all, run_jobs

ARM = '''
import json, os, sys, time
from dataclasses import asdict, dataclass
from pathlib import Path

@dataclass(frozen=True)
class Setting:
    steps: int = 3
    pause: float = 0.0  # seconds a step
    hold: int = -1  # step that waits for the file `go`
    fault: str = ""

@dataclass(frozen=True)
class RunResult:
    setting: dict
    seed: int
    curve: list

def run_arm(setting, seed, folder, tell, device):
    "Keeps its count after each step and goes on from it."
    folder.mkdir(exist_ok=True)
    kept = folder / "kept.json"
    curve = json.loads(kept.read_text()) if kept.exists() else []
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").replace(folder / "pid")  # whole: others wait for it
    for step in range(len(curve), setting.steps):
        print("this is noise on standard output", flush=True)
        if setting.fault == "kill" and step == 2 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), 9)
        if setting.fault == "raise":
            raise RuntimeError("first line.\\nsecond line")
        if setting.fault == "value":
            raise ValueError("steps are wrong; give others.")
        if setting.fault == "silent":
            time.sleep(60)
        if setting.fault == "exit":
            os._exit(7)
        if setting.fault == "half word":
            os.write(words(), b'{"progress": {"st')
            os.kill(os.getpid(), 9)
        time.sleep(setting.pause)
        until = time.monotonic() + 1200
        while step == setting.hold and not (folder.parent / "go").exists() and time.monotonic() < until:
            time.sleep(0.02)
        curve.append([seed, step, device])
        (folder / "partial").write_text(json.dumps(curve))
        os.replace(folder / "partial", kept)
        with (folder / "starts").open("a") as starts:
            starts.write(f"{os.getpid()} {step} {time.monotonic()} {os.environ.get('OMP_NUM_THREADS')}\\n")
        tell({"step": step, "path": Path("x")})
    if setting.fault != "no result":
        (folder / "partial").write_text(json.dumps({"setting": asdict(setting), "seed": seed, "curve": curve}))
        os.replace(folder / "partial", folder / "result.json")

def words():
    "Where the child's words go."
    return next(fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}")
                and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe"))
'''
PARENT = '''
import sys
from pathlib import Path
import slow_arm
from composer_replication.experiments.schedule import Job, run_jobs
out, done = Path(sys.argv[1]), []
jobs = [Job(slow_arm.Setting(6, hold=3), seed) for seed in (0, 1)] + [Job(slow_arm.Setting(1), 2)]
try:
    for outcome in run_jobs(reversed(jobs), out, arm="slow_arm"):
        done.append(outcome.job.seed)
        print(outcome.job.seed, outcome.problem, flush=True)
except KeyboardInterrupt:
    print("interrupted after", done, flush=True)
    sys.exit(130)
'''


@pytest.fixture
def arm(tmp_path, monkeypatch):
    "The stand-in, importable here and in the children."
    (tmp_path / "slow_arm.py").write_text(ARM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_arm", raising=False)
    import slow_arm
    yield slow_arm
    sys.modules.pop("slow_arm", None)


def wait_for(condition, seconds=600.0):
    "Raise where the condition does not come true in time."
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this took too long"
        time.sleep(0.02)


def starts(out: Path, job: Job) -> list[list[str]]:
    "Each step that the job has really made: process, step, moment, threads."
    path = out / job.name / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def steps(out, job):
    return [int(s[1]) for s in starts(out, job)]


def expected(job):
    return [[job.seed, step, "cpu"] for step in range(job.setting.steps)]


def parent(tmp_path, out):
    (tmp_path / "parent.py").write_text(PARENT)
    return subprocess.Popen([sys.executable, tmp_path / "parent.py", out], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how, code", [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_children_die_with_their_parent_and_their_work_is_gone_on_with(arm, tmp_path, how, code):
    out = tmp_path / "out"
    slow = [Job(arm.Setting(6, hold=3), seed) for seed in (0, 1)]
    running = parent(tmp_path, out)
    try:
        wait_for(lambda: all(len(steps(out, job)) == 3 for job in slow))
        pids = [int((out / job.name / "pid").read_text()) for job in slow]
        assert all(map(alive, pids))
        running.send_signal(how)
        said, _ = running.communicate(timeout=600)
    finally:
        running.kill()
    assert running.returncode == code and said.startswith("2 None\n")
    assert ("interrupted after [2]" in said) == (how == signal.SIGINT)
    wait_for(lambda: not any(map(alive, pids)))
    (out / "go").touch()

    assert not any((out / job.name / "result.json").exists() for job in slow)
    results = run_all([*slow, Job(arm.Setting(1), 2)], out, arm="slow_arm")
    assert [r.curve for r in results[:2]] == [expected(job) for job in slow]
    assert [steps(out, job) for job in slow] == [list(range(6))] * 2  # no step was made twice
    assert all(len({s[0] for s in starts(out, job)}) == 2 for job in slow)


def test_a_killed_child_is_reported_and_gone_on_with(arm, tmp_path):
    jobs, blocked = [Job(arm.Setting(4, fault="kill"), 0), Job(arm.Setting(2), 1)], Job(arm.Setting(1), 2)
    (tmp_path / "out" / blocked.name / "result.json").mkdir(parents=True)  # a folder in the place of the result
    found = {o.job.seed: o for o in run_jobs([*jobs, blocked], tmp_path / "out", arm="slow_arm")}
    assert "is no result of a run" in found[2].problem
    assert "ended without a result" in found[0].problem and jobs[0].name in found[0].problem and found[0].problem.count("\n") == 0
    assert found[1].problem is None and found[1].result.curve == expected(jobs[1])
    assert [r.curve for r in run_all(jobs, tmp_path / "out", arm="slow_arm")] == [expected(job) for job in jobs]
    assert steps(tmp_path / "out", jobs[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault, said", [
    ("raise", "RuntimeError: first line; more is in"), ("value", "steps are wrong; give others; more is in"),
    *((fault, "without a result") for fault in ("exit", "half word", "no result"))])
def test_a_failing_job_is_one_sentence_and_the_others_go_on(arm, tmp_path, fault, said):
    jobs = [Job(arm.Setting(2, fault=fault), 0), Job(arm.Setting(2), 1)]
    found = {o.job.seed: o for o in run_jobs(jobs, tmp_path / "out", 1, arm="slow_arm")}
    assert said in found[0].problem and "\n" not in found[0].problem and found[0].problem.endswith(".log.")
    log = tmp_path / "out" / f"{jobs[0].name}.log"
    assert str(log) in found[0].problem and "noise" in log.read_text()
    assert found[0].result is None and found[1].result.curve == expected(jobs[1])
    with pytest.raises(InputProblem, match="1 of 2 jobs have no result"):
        run_all(jobs, tmp_path / "out", arm="slow_arm")


def test_a_setting_that_the_child_refuses_is_one_sentence(arm, tmp_path, monkeypatch):
    # another length: the compiled file of a second ago would be taken for one as long
    (tmp_path / "slow_arm.py").write_text(ARM.replace('    fault: str = ""', '    another: str = ""'))
    found, = run_jobs([Job(arm.Setting(), 0)], tmp_path / "out", arm="slow_arm")
    assert "TypeError" in found.problem and "fault" in found.problem


@pytest.mark.slow
def test_silence_has_a_limit(arm, tmp_path):
    jobs = [Job(arm.Setting(2, fault="silent"), 0), Job(arm.Setting(8, 1.0), 1)]
    found = {o.job.seed: o for o in run_jobs(jobs, tmp_path / "out", silence=5.0, arm="slow_arm")}
    assert "reported nothing for 5 s" in found[0].problem and found[1].problem is None
    wait_for(lambda: not alive(int((tmp_path / "out" / jobs[0].name / "pid").read_text())), 60)


def test_imports_that_hang_end_the_jobs(arm, tmp_path, monkeypatch):
    (tmp_path / "slow_arm.py").write_text(ARM + "\nif os.environ.get('IMPORTS') == 'hang':\n    time.sleep(600)\n")
    monkeypatch.setenv("IMPORTS", "hang")
    jobs = [Job(arm.Setting(2), seed) for seed in range(3)]
    found = list(run_jobs(jobs, tmp_path / "out", workers=2, silence=0.5, arm="slow_arm"))
    assert len(found) == 3 and all(one.problem for one in found)
    assert any("reported nothing" in one.problem for one in found)


def test_no_more_children_than_workers_and_one_thread_each_and_events_are_plain(arm, tmp_path):
    jobs, running, most, told = [Job(arm.Setting(2, 0.2), seed) for seed in range(5)], set(), [], []

    def tell(event):
        (running.add if event["event"] == "started" else running.discard if event["event"] == "ended" else str)(event["job"])
        most.append(len(running))
        told.append(event)

    run_all(jobs + jobs[:2], tmp_path / "out", workers=2, device="cpu", tell=tell, arm="slow_arm")
    assert max(most) == 2 and json.dumps(told)
    of_one = [e for e in told if e["job"] == jobs[0].name]
    assert [e["event"] for e in of_one] == ["started", "progress", "progress", "ended"]
    assert of_one[1]["progress"] == {"step": 0, "path": "x"}
    made = [s for job in jobs for s in starts(tmp_path / "out", job)]
    assert len(made) == 10 and {s[3] for s in made} == {"1"} and len({s[0] for s in made}) == 5


def test_closing_the_iterator_ends_the_children(arm, tmp_path):
    jobs = [Job(arm.Setting(1), 0), Job(arm.Setting(1, hold=0), 1)]
    outcomes = run_jobs(jobs, tmp_path / "out", arm="slow_arm")
    assert next(outcomes).job.seed == 0
    wait_for(lambda: (tmp_path / "out" / jobs[1].name / "pid").exists())
    outcomes.close()
    pid = int((tmp_path / "out" / jobs[1].name / "pid").read_text())
    wait_for(lambda: not alive(pid), 60)  # a process that ends closes its output a moment before it is gone


def test_two_parents_do_not_compute_the_same_job_twice(arm, tmp_path, monkeypatch):
    out, script = tmp_path / "out", tmp_path / "one.py"
    script.write_text("import sys, slow_arm\nfrom composer_replication.experiments.schedule import *\n"
                      "from composer_replication.experiments import schedule\n"
                      "print(run_all([Job(slow_arm.Setting(3, .5), 0)], sys.argv[1], arm='slow_arm')[0].curve)")
    both = [subprocess.Popen([sys.executable, script, out], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=300)[0].strip() for p in both]
    job = Job(arm.Setting(3, 0.5), 0)
    assert said == [str(expected(job))] * 2 and steps(out, job) == [0, 1, 2]


def test_a_job_that_another_process_holds_is_refused_after_a_while(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "CODE", "from composer_replication.experiments import schedule; schedule.PATIENCE = 0.5; "
                        "schedule.serve()")
    slow = Job(arm.Setting(3, hold=0), 0)
    first = run_jobs([Job(arm.Setting(1), 1), slow], tmp_path / "out", arm="slow_arm")
    next(first)  # the quick one; the slow one is running now
    wait_for(lambda: (tmp_path / "out" / slow.name / "pid").exists())
    second, = run_jobs([slow], tmp_path / "out", arm="slow_arm")
    first.close()
    assert "another process is at work" in second.problem


def test_everything_in_a_setting_and_the_seed_names_the_job(arm):
    jobs = [Job(arm.Setting(), 0), Job(arm.Setting(4), 0), Job(arm.Setting(pause=0.1), 0), Job(arm.Setting(fault="x"), 0),
            Job(arm.Setting(), 1)]
    assert len({job.name for job in jobs}) == len(jobs)
    code = "import slow_arm; from composer_replication.experiments.schedule import Job; print(Job(slow_arm.Setting(), 0).name)"
    other = {**os.environ, "PYTHONHASHSEED": "7"}
    again = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300, env=other)
    assert again.strip() == jobs[0].name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A real result's bytes, its job and its folder."
    place = tmp_path_factory.mktemp("whole")
    (place / "steady_arm.py").write_text(ARM)
    sys.path.insert(0, str(place))
    import steady_arm
    job = Job(steady_arm.Setting(), 0)
    steady_arm.run_arm(job.setting, 0, place / job.name, lambda told: None, "cpu")
    yield (place / job.name / "result.json").read_bytes(), job, place / job.name
    sys.path.remove(str(place))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_results_are_one_sentence_and_stay(whole, data):
    content, job, folder = whole
    cut = data.draw(st.integers(0, len(content) - 1))
    damaged = data.draw(st.sampled_from([content[:cut], content[:cut] + b"\xff" + content[cut:], content[cut + 1:], b"[]",
                                         b"null", b'"text"', b"{}", b"[" * 100_000, content.replace(b'"curve"', b'"curves"'),
                                         content.replace(b'"seed": 0', b'"seed": 1'),
                                         content.replace(b'"steps": 3', b'"steps": 4')])
                        | st.binary(max_size=60))
    (folder / "result.json").write_bytes(damaged)
    with pytest.raises(InputProblem) as said:
        read_result(folder, job, "steady_arm")
    assert "result.json" in str(said.value) and "\n" not in str(said.value) and "move it elsewhere" in str(said.value)
    assert (folder / "result.json").read_bytes() == damaged
    (folder / "result.json").write_bytes(content)
    assert read_result(folder, job, "steady_arm").curve == expected(job)


def test_a_ladder_that_is_stopped_while_the_arm_is_imported_waits_for_no_import(tmp_path, monkeypatch):
    (tmp_path / "late_arm.py").write_text("import sys, time\nif 'pytest' not in sys.modules:\n    time.sleep(600)\n" + ARM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    import late_arm
    begun = []

    def tell(event):
        begun.append(event["event"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_jobs([Job(late_arm.Setting(1), 0)], tmp_path / "out", tell=tell, arm="late_arm"))
    assert begun == ["started"] and not (tmp_path / "out" / Job(late_arm.Setting(1), 0).name).exists()


def test_where_no_job_can_be_forked_the_file_that_says_why_is_named(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "CODE", "raise SystemExit('this interpreter is broken')")
    found, = run_jobs([Job(arm.Setting(), 0)], tmp_path / "out", arm="slow_arm")
    log = tmp_path / "out" / "imports.log"
    assert found.problem.endswith(f"does so; more is in {log}.") and "is broken" in log.read_text()
