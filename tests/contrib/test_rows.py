"Rows of three data sets on repositories with real histories: what the agent sees, what is paid and refused, what a kill leaves."

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.contrib.harbor.export import write_harbor
from composer_replication.contrib.swe_rows import mirrors as rooms
from composer_replication.contrib.swe_rows.mirrors import (
    MirrorProblem,
    find_commit,
    mirror_path,
    prepare_commit,
    prepare_variant,
    write_commit,
)
from composer_replication.contrib.swe_rows.rows import make_row_tasks, play_row
from composer_replication.core.trace import ToolCall
from composer_replication.envs.deletion.env import FeatureDeletionEnv, agent_tree
from composer_replication.envs.deletion.subject import subject_of
from composer_replication.envs.deletion.task import read_tasks
from composer_replication.envs.deletion.unpack import SubjectProblem

BROKEN = '''
def spread(values, width):
    """Values in rows of a width, the last one shorter."""
    return [values[start:start + width] for start in range(0, len(values) - width, width)]


def total(rows):
    return sum(sum(row) for row in rows)
'''
RIGHT = BROKEN.replace("len(values) - width, width)]", "len(values), width)]  # the marigold fix")
WRONG = BROKEN.replace("len(values) - width, width)]", "len(values) - width + 1, width)]")
OLD_TESTS = """
import pytest

from pkg.rows import spread, total


@pytest.mark.parametrize("rows", [[], [[1], [2, 3]]], ids=["no rows", "some rows"])
def test_total(rows):
    assert total(rows) == sum(map(sum, rows))


def test_nothing():
    assert spread([], 3) == []
"""
NEW_TESTS = (
    OLD_TESTS
    + """

class TestSpread:
    @pytest.mark.parametrize("width", [2, 3], ids=["width of two", "width of three"])
    def test_last(self, width):
        assert sum(spread([1, 2, 3, 4, 5], width), []) == [1, 2, 3, 4, 5]
"""
)
START = {
    "pyproject.toml": '[project]\nname = "flux"\nversion = "1.0"\n',
    ".gitattributes": "tests export-ignore\n*.py filter=odd\n",
    "pkg/__init__.py": "",
    "pkg/rows.py": BROKEN,
    "tests/test_rows.py": OLD_TESTS,
}


def git(folder, *words, check=True):
    if shutil.which("git") is None:
        pytest.skip("git is not here: apt-get install -y git")
    who = {"NAME": "A", "EMAIL": "a@example.org", "DATE": "2026-01-01T00:00:00Z"}
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()
    }
    done = subprocess.run(
        ["git", "-C", folder, "-c", "init.defaultBranch=main", *map(str, words)], env=env, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def commit(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")
    return git(folder, "rev-parse", "HEAD").strip()


class World:
    "A repository of people's, its mirror, and rows as each data set would have them."

    def __init__(self, folder):
        self.work, self.mirrors, self.store = (folder / name for name in ("work", "mirrors", "store"))
        self.work.mkdir()
        self.made = {}
        git(self.work, "init", "-q")
        (self.work / "link.py").symlink_to("/etc/passwd")
        self.before = commit(self.work, START)
        self.after = commit(self.work, {"pkg/rows.py": RIGHT, "tests/test_rows.py": NEW_TESTS})
        commit(self.work, {"pkg/later.py": "LATER = 'the marigold fix'\n"})
        git(self.work, "tag", "v2")
        self.mirror = self.mirrors / "people" / "flux.git"
        subprocess.run(["git", "clone", "-q", "--mirror", self.work, self.mirror], check=True)
        git(self.mirror, "pack-refs", "--all")

    def diff(self, *paths, old=None, new=None):
        return git(self.work, "diff", old or self.before, new or self.after, "--", *paths)

    def swe_bench(self, **more):
        return {
            "instance_id": "people__flux-1",
            "repo": "people/flux",
            "base_commit": self.before,
            "patch": self.diff("pkg"),
            "test_patch": self.diff("tests"),
            "problem_statement": "The last row is lost.",
            "hints_text": "",
            "version": "1.0",
            "environment_setup_commit": self.before,
            "log_parser": "parse_log_pytest",
            "FAIL_TO_PASS": json.dumps(["tests/test_rows.py::TestSpread::test_last[width"]),  # cut at the space, as there
            "PASS_TO_PASS": json.dumps(["tests/test_rows.py::test_nothing", "tests/test_rows.py::test_total[no"]),
        } | more

    def swe_smith(self):
        return {
            "instance_id": f"people__flux.{self.after[:8]}.func_pm_op_change__x",
            "repo": f"swesmith/people__flux.{self.after[:8]}",
            "patch": self.diff("pkg", old=self.after, new=self.before),
            "image_name": "swebench/swesmith.x86_64.people_1776_flux",
            "FAIL_TO_PASS": [f"tests/test_rows.py::TestSpread::test_last[width of {n}]" for n in ("two", "three")],
            "PASS_TO_PASS": ["tests/test_rows.py::test_nothing"],
            "problem_statement": "",
        }

    def r2e(self, folder):
        git(self.work, "worktree", "add", "-q", folder, self.before)
        (folder / "r2e_tests").mkdir()
        (folder / "r2e_tests" / "test_1.py").write_text(NEW_TESTS)
        log = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "r2e_tests"],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        ).stdout
        sides = {
            "old_file_content": BROKEN,
            "new_file_content": RIGHT,
            "minus_file": {"path": "a/pkg/rows.py"},
            "plus_file": {"path": "b/pkg/rows.py"},
        }
        tests = {"header": {"file": {"path": "tests/test_rows.py"}}, "old_file_content": OLD_TESTS, "new_file_content": NEW_TESTS}
        names = [
            "test_total[no rows]",
            "test_total[some rows]",
            "test_nothing",
            "TestSpread.test_last[width of two]",
            "TestSpread.test_last[width of three]",
        ]
        return {
            "repo_name": "flux",
            "docker_image": "x/flux_final:1",
            "commit_hash": self.after,
            "problem_statement": "The last row is lost.",
            "parsed_commit_content": json.dumps(
                {
                    "file_diffs": [{"header": {"file": {"path": "pkg/rows.py"}}, **sides}, tests],
                    "old_commit_hash": f"{self.after}^",
                    "new_commit_hash": self.after,
                }
            ),
            "expected_output_json": json.dumps({name: "PASSED" for name in names}),
            "execution_result_content": json.dumps(
                {"test_file_names": ["test_1.py"], "test_file_codes": [NEW_TESTS], "old_commit_res_stdout": log}
            ),
        }

    def played(self, form):
        "The task and notes of a form's row, made once."
        if form not in self.made:
            self.made[form] = play_row(self.rows[form], self.mirrors, self.store)
        return self.made[form]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    world.rows = {
        "SWE-bench": world.swe_bench(),
        "SWE-smith": world.swe_smith(),
        "R2E": world.r2e(tmp_path_factory.mktemp("old") / "tree"),
    }
    return world


# Played


@pytest.mark.parametrize("form", ["SWE-bench", "SWE-smith", "R2E"])
def test_a_row_is_played_and_graded(world, form):
    task, notes = world.played(form)
    assert task.repo == f"people/flux@{world.after if form == 'SWE-smith' else world.before}"
    assert notes == ["1 links and submodules were left out of the tree"]
    place = "r2e_tests/test_1.py" if form == "R2E" else "tests/test_rows.py"
    assert set(task.fail_to_pass) == {f"{place}::TestSpread::test_last[width of {n}]" for n in ("two", "three")}
    assert f"{place}::test_nothing" in task.pass_to_pass and not set(task.pass_to_pass) & set(task.fail_to_pass)
    assert set(task.hidden_tests) == (set() if form == "SWE-smith" else set(task.fail_to_pass))
    assert [canary["kind"] for canary in task.canaries] == ["assert"]
    tests = NEW_TESTS if form == "SWE-smith" else OLD_TESTS
    with agent_tree(task, subject_of(task, world.store)) as tree:
        files = {path.relative_to(tree).as_posix(): path.read_text() for path in tree.rglob("*") if path.is_file()}
        assert files == START | {"tests/test_rows.py": tests} and not (tree / ".git").exists()
    rewards = []
    env = FeatureDeletionEnv([task], world.store)
    for source in (None, WRONG, RIGHT.replace("the marigold fix", "mine")):
        env.reset(task.task_id)
        if source:
            assert not env.call(ToolCall("write_file", {"path": "pkg/rows.py", "text": source})).error_kind
        rewards.append(env.reward())
    env.close()
    assert rewards == [0.0, 0.0, 1.0], env.grade


def test_changed_tests_earn_nothing_and_are_seen(world):
    task, _ = world.played("SWE-bench")
    env = FeatureDeletionEnv([task], world.store)
    env.reset(task.task_id)
    assert "3 passed" in env.call(ToolCall("run_tests", {})).text  # the old ones
    env.call(
        ToolCall(
            "write_file", {"path": "tests/test_rows.py", "text": "class TestSpread:\n    def test_last(self):\n        pass\n"}
        )
    )
    assert env.reward() == 0.0
    assert any("tests/test_rows.py is changed" in finding.what for finding in env.grade.findings)
    env.close()


def test_from_rows_to_validate_and_show(world, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in (world.rows["SWE-bench"], world.swe_bench(instance_id="b", repo="people/none")))
    )
    run = CliRunner()
    done = run.invoke(app, ["tasks", "from-rows", str(rows), "--mirrors", str(world.mirrors), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["kept"], first["problem"], second["kept"]) == (True, "", False)
    assert f"git clone --mirror https://github.com/people/none {world.mirrors}/people/none.git`" in second["problem"]
    done = run.invoke(app, ["tasks", "validate", str(out), "--oracles", "1", "--json"])
    row = json.loads(done.stdout)
    assert (done.exit_code, row["problems"], row["oracle"], row["empty"]) == (0, [], [1.0], 0.0)
    shown = run.invoke(app, ["tasks", "show", str(out)]).stdout
    assert "marigold" not in shown and "The last row is lost" in shown


def test_a_harbor_folder_of_a_row_shows_the_old_tests(world, tmp_path):
    task, _ = world.played("SWE-bench")
    folder = write_harbor(task, subject_of(task, world.store), tmp_path)
    assert (folder / "environment/repo/tests/test_rows.py").read_text() == OLD_TESTS
    assert (folder / "tests/tree/tests/test_rows.py").read_text() == NEW_TESTS


# Refused


def refused(world):
    row = world.swe_bench
    outside = world.diff("pkg").replace("pkg/rows.py", "../../rows.py")
    binary = "diff --git a/pkg/a.bin b/pkg/a.bin\nnew file mode 100644\nGIT binary patch\nliteral 1\nIcmZPo000310RR91\n\n"
    return {
        "unknown commit": (row(base_commit="0" * 40), "holds no commit 0000"),
        "a branch": (row(base_commit="main"), "'main' is no commit"),
        "an option": (row(base_commit="--help"), "'--help' is no commit"),
        "outside": (row(patch=outside), "../../rows.py, which lies outside of the tree"),
        "outside, tests": (row(test_patch=world.diff("tests").replace("tests/", "../tests/")), "lies outside of the tree"),
        "binary": (row(patch=binary), "changes a binary file"),
        "another commit's": (row(patch=world.diff("pkg", old=world.after, new=world.before)), "does not fit pkg/rows.py"),
        "cut": (row(patch=world.diff("pkg")[:-30]), "the diff cannot be read"),
        "no Python": (row(patch="--- /dev/null\n+++ b/a.js\n@@ -0,0 +1 @@\n+x\n"), "other languages are not supported"),
        "both sides": (row(test_patch=world.diff("pkg")), "test_patch changes pkg/rows.py, which an agent may change too"),
        "no such test": (
            row(FAIL_TO_PASS='["tests/test_rows.py::test_gone"]'),
            "names tests/test_rows.py::test_gone, and there is no such test",
        ),
        "no such file": (
            row(FAIL_TO_PASS='["tests/test_gone.py::test_gone"]'),
            "the test file 'tests/test_gone.py' is not in people/flux",
        ),
        "file outside": (
            row(FAIL_TO_PASS='["../test_rows.py::test_gone"]'),
            "the test file '../test_rows.py' is not in people/flux",
        ),
        "passes before": (
            row(FAIL_TO_PASS='["tests/test_rows.py::test_nothing"]', PASS_TO_PASS="[]"),
            "passes without the solution already",
        ),
        "never passes": (
            row(patch=world.diff("pkg").replace("len(values), width)]", "0, width)]")),
            "does not pass here with the row's own solution",
        ),
        "R2E, no JSON": (world.rows["R2E"] | {"parsed_commit_content": "["}, "parsed_commit_content must be a JSON object"),
        "R2E, no diffs": (
            world.rows["R2E"] | {"parsed_commit_content": '{"file_diffs": [{"header": 1}]}'},
            "holds no file_diffs",
        ),
        "R2E, first commit": (world.rows["R2E"] | {"commit_hash": world.before}, "is the first one"),
    }


def test_every_odd_row_is_one_sentence_and_the_rest_goes_on(world, tmp_path):
    cases = refused(world)
    rows = [row | {"instance_id": name} for name, (row, _) in cases.items()] + [world.swe_bench(), world.swe_bench()]
    *reports, good, twice = make_row_tasks(rows, world.mirrors, tmp_path / "tasks.jsonl", store=world.store)
    for (name, (_, sentence)), report in zip(cases.items(), reports, strict=True):
        assert sentence in report.problem and "\n" not in report.problem and len(report.problem) < 700, (name, report.problem)
    assert good.kept and "before: keep one" in twice.problem
    assert [task.task_id for task in read_tasks(tmp_path / "tasks.jsonl")] == ["people__flux-1"]


def test_an_earlier_file_outlives_rows_of_which_none_will_do(world, tmp_path):
    out = tmp_path / "tasks.jsonl"
    out.write_text("kept\n")
    [report] = make_row_tasks([world.rows["R2E"] | {"commit_hash": world.before}], world.mirrors, out, store=world.store)
    assert not report.kept and out.read_text() == "kept\n"


def test_a_repository_that_the_tests_need_themselves_is_refused(tmp_path):
    work, mirrors = tmp_path / "work", tmp_path / "mirrors"
    work.mkdir()
    git(work, "init", "-q")
    before = commit(work, {"pluggy.py": "ONE = 2\n", "test_one.py": "import pluggy\n"})
    after = commit(
        work, {"pluggy.py": "ONE = 1\n", "test_one.py": "import pluggy\n\n\ndef test_one():\n    assert pluggy.ONE == 1\n"}
    )
    subprocess.run(["git", "clone", "-q", "--mirror", work, mirrors / "people/pluggy.git"], check=True)
    row = {
        "instance_id": "x",
        "repo": "people/pluggy",
        "base_commit": before,
        "patch": git(work, "diff", before, after, "--", "pluggy.py"),
        "test_patch": git(work, "diff", before, after, "--", "test_one.py"),
        "problem_statement": "x",
        "FAIL_TO_PASS": ["test_one.py::test_one"],
        "PASS_TO_PASS": [],
    }
    with pytest.raises(SubjectProblem, match="pluggy is a part of pytest"):
        play_row(row, mirrors, tmp_path / "store")


def test_tests_that_do_not_pass_here_are_left_out_with_a_note(world):
    names = ["tests/test_rows.py::test_nothing", "tests/test_rows.py::test_gone"]
    task, notes = play_row(world.swe_bench(PASS_TO_PASS=names), world.mirrors, world.store)
    assert task.pass_to_pass == ("tests/test_rows.py::test_nothing",)
    assert notes[1:] == ["1 tests of PASS_TO_PASS do not pass here with and without the solution and were left out"]


# The mirror


def test_nothing_of_the_mirrors_own_is_run_or_believed(world, tmp_path, monkeypatch):
    mirror, ran = tmp_path / "people" / "flux.git", tmp_path / "ran"
    shutil.copytree(world.mirror, mirror)
    git(mirror, "replace", world.before, world.after)  # another commit under the same name
    git(mirror, "branch", world.before[:7], world.after)
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (mirror / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (mirror / "hooks" / hook).chmod(0o755)
    git(mirror, "config", "filter.odd.smudge", f"touch {ran}; cat")
    git(mirror, "config", "core.fsmonitor", f"touch {ran}")
    for name, value in {"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": str(tmp_path / "index"), "GIT_CONFIG_COUNT": "x"}.items():
        monkeypatch.setenv(name, value)
    state = sorted((str(path), path.stat().st_mtime_ns) for path in mirror.rglob("*"))
    whole = find_commit(mirror, world.before[:12])
    assert whole == world.before and write_commit(mirror, whole, tmp_path / "tree") == 1
    assert {
        path.relative_to(tmp_path / "tree").as_posix(): path.read_text()
        for path in (tmp_path / "tree").rglob("*")
        if path.is_file()
    } == START
    assert not ran.exists() and sorted((str(path), path.stat().st_mtime_ns) for path in mirror.rglob("*")) == state
    with pytest.raises(MirrorProblem, match="holds no commit"):
        find_commit(mirror, world.before[:7])  # a branch of that name leads elsewhere


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a mirror to somebody else")
def test_a_mirror_of_somebody_elses_can_be_read(world, tmp_path):
    shutil.copytree(world.mirror, tmp_path / "people" / "flux.git")
    for path in (tmp_path / "people").rglob("*"):
        os.chown(path, 4711, 4711)
    assert find_commit(mirror_path(tmp_path, "people/flux"), world.after[:8]) == world.after


def test_a_mirror_that_lacks_objects_is_named(world, tmp_path):
    mirror = tmp_path / "people" / "flux.git"
    shutil.copytree(world.mirror, mirror)
    for pack in [*mirror.glob("objects/pack/*.pack")]:  # as loose objects, to take one away
        moved = pack.rename(tmp_path / "moved.pack")
        subprocess.run(["git", f"--git-dir={mirror}", "unpack-objects", "-q"], stdin=moved.open("rb"), check=True)
    blob = git(world.work, "rev-parse", f"{world.before}:pkg/rows.py").strip()
    (mirror / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(MirrorProblem, match="lacks pkg/rows.py of .* without --depth and --filter"):
        write_commit(mirror, world.before, tmp_path / "tree")


def test_two_mirrors_of_one_name_are_not_guessed(world, tmp_path):
    shutil.copytree(world.mirror, tmp_path / "people" / "flux.git")
    shutil.copytree(world.mirror, tmp_path / "others" / "Flux.git")
    assert mirror_path(tmp_path, "people/flux") == tmp_path / "people" / "flux.git"
    with pytest.raises(MirrorProblem, match="keep one of them"):
        mirror_path(tmp_path, "flux")


def test_submodules_and_odd_names_stay_out(world, tmp_path):
    folder, mirrors = tmp_path / "work", tmp_path / "mirrors"
    shutil.copytree(world.work, folder, symlinks=True)
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{world.before},sub")
    git(folder, "commit", "-q", "-m", "sub")
    whole = commit(folder, {os.fsdecode(b"pkg/od\xffd.py"): "x = 1\n", "run.sh": "#!/bin/sh\n"})
    subprocess.run(["git", "clone", "-q", "--mirror", folder, mirrors / "people/flux.git"], check=True)
    assert write_commit(mirrors / "people/flux.git", find_commit(mirrors / "people/flux.git", whole), tmp_path / "tree") >= 2
    assert not (tmp_path / "tree/sub").exists() and sorted(path.name for path in (tmp_path / "tree/pkg").iterdir()) == [
        "__init__.py",
        "later.py",
        "rows.py",
    ]


# The environment


def test_the_environment_is_made_once_for_a_commit(world, tmp_path, monkeypatch):
    calls = []
    whole = rooms.prepare_subject
    monkeypatch.setattr(rooms, "prepare_subject", lambda *given, **more: calls.append(given) or whole(*given, **more))
    base = prepare_commit(world.mirrors, "people/flux", world.before, tmp_path)
    assert prepare_commit(world.mirrors, "flux", world.before[:9], tmp_path) == base and len(calls) == 1
    one, two = (prepare_variant(base, {"pkg/rows.py": text, "link": None}, tmp_path) for text in (RIGHT, WRONG))
    assert (
        one.sha256 != two.sha256
        and one.libraries.resolve() == two.libraries.resolve() == base.libraries.resolve()
        and len(calls) == 1
    )
    assert (base.tree / "pkg/rows.py").read_text() == BROKEN
    assert json.loads((base.tree.parent / "environment.json").read_text())["source"] == f"people/flux@{world.before}"


def test_recorded_steps_are_done_in_the_sandbox_and_win(world, tmp_path):
    wheel = tmp_path / "iniconfig-99.0-py3-none-any.whl"  # pytest needs one, so another version is there before
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("iniconfig/__init__.py", "MARK = 99\n")
        file.writestr("iniconfig-99.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: iniconfig\nVersion: 99.0\n")
        file.writestr(
            "iniconfig-99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("iniconfig-99.0.dist-info/RECORD", "")
    shutil.copytree(world.mirrors, tmp_path / "mirrors")
    steps = tmp_path / "mirrors/people/flux.steps.json"
    program = "import iniconfig; open('pkg/made.py', 'w').write(f'MARK = {iniconfig.MARK}\\n')"
    steps.write_text(json.dumps({"requirements": [str(wheel)], "commands": [["python", "-c", program]]}))
    subject = prepare_commit(tmp_path / "mirrors", "people/flux", world.before, tmp_path / "store")
    assert (subject.tree / "pkg/made.py").read_text() == "MARK = 99\n" and not (tmp_path / "mirrors/pkg").exists()
    assert [path.name for path in subject.libraries.glob("iniconfig-*")] == ["iniconfig-99.0.dist-info"]
    record = json.loads((subject.tree.parent / "environment.json").read_text())
    assert (
        record["made"] == ["pkg/made.py"]
        and "iniconfig==99.0" in record["installed"]
        and record["commands"][0][:2] == ["python", "-c"]
    )
    steps.write_text(json.dumps({"commands": [["python", "-c", "raise SystemExit('no compiler')"]]}))
    with pytest.raises(MirrorProblem, match=r"the recorded step .* failed \(no compiler\)"):
        prepare_commit(tmp_path / "mirrors", "people/flux", world.before, tmp_path / "store")
    assert not list((tmp_path / "store/scratch").iterdir()) and len(list((tmp_path / "store/subjects").iterdir())) == 1


@pytest.mark.parametrize("step", ["write_commit", "lay_out", "store_subject", *(
    pytest.param(step, marks=pytest.mark.slow) for step in ("prepare_subject", "write_json"))])
def test_a_kill_leaves_nothing_half_made(world, tmp_path, step):
    script = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from composer_replication.contrib.swe_rows import mirrors
        whole = mirrors.{step}
        def killed(*given, **more):
            if "{step}" != "store_subject":
                whole(*given, **more)
            os.kill(os.getpid(), signal.SIGKILL)
        mirrors.{step} = killed
        mirrors.prepare_commit(Path(sys.argv[1]), "people/flux", sys.argv[2], Path(sys.argv[3]))
    """)
    done = subprocess.run([sys.executable, "-c", script, world.mirrors, world.before, tmp_path], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "scratch").iterdir()) and not list((tmp_path / "subjects").iterdir())
    subject = prepare_commit(world.mirrors, "people/flux", world.before, tmp_path)
    assert (subject.tree / "pkg/rows.py").read_text() == BROKEN and (subject.libraries / "pytest").is_dir()
    assert not list((tmp_path / "scratch").iterdir()) and len(list((tmp_path / "subjects").iterdir())) == 1
