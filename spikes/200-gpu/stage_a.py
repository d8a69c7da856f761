"Stage a: every test marked cuda, on the GPU."
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from common import ROOT, Stage


def outcomes(report) -> dict[str, str]:
    "Name to passed, skipped, failed or error, from pytest's JUnit file."
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("skipped", "failure", "error")]
        found[f"{case.get('classname').removeprefix('tests.')}: {case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def command(report) -> list[str]:
    "pytest over the files that hold tests marked cuda."
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text())
    return [sys.executable, "-m", "pytest", "-m", "cuda", f"--junitxml={report}", *files]


def ended(words, environment, log, seconds: float) -> int | None:
    "The exit code of a command in its own session, which prints to a file; None: it took too long and was killed with its group."
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    stage = Stage("a", __doc__, needs=("pytest", "pytest-xdist", "hypothesis"))
    stage.check()
    report, log = stage.out / "stage_a.xml", stage.out / "stage_a.log"
    stage.out.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)  # of an earlier call
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # where the wheels lie, too
    environment = os.environ | {"PYTHONPATH": paths} | ({"COMPOSER_CUDA_TESTS": "cpu"} if stage.tiny else {})
    code = ended(command(report), environment, log, stage.given.seconds)
    stage.send(log)
    output = log.read_text(errors="replace").splitlines()
    if code is None:
        last = output[-1] if output else "none"
        return stage.write({}, {}, reason=f"pytest did not end within {stage.given.seconds:g} s; its last line: {last}")
    found = outcomes(report) if report.exists() else {}
    facts = {"tests": found, "output": [] if found and code == 0 else output[-40:]}
    met = {"passed", "skipped"} if stage.tiny else {"passed"}  # FlexAttention has no backward pass on a CPU
    return stage.write({name: outcome in met for name, outcome in found.items()} | {"there are tests": bool(found)}, facts)


if __name__ == "__main__":
    main()
