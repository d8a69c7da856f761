"Environments behind a real socket: sessions at once, no room, idle and vanishing clients, a server that is stopped."
import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import envs_tasks
import pytest
from remote_env import RemoteDeletionEnv
from waiting import text_of

from composer_replication.contrib.openenv import server
from composer_replication.contrib.openenv.server import ServerProblem, make_app, openenv_problem, serving
from composer_replication.core.trace import ToolCall
from composer_replication.envs.deletion.env import FeatureDeletionEnv, deletion_rows
from composer_replication.envs.deletion.judge.runner import close_judges
from composer_replication.envs.deletion.task import write_tasks
from composer_replication.sandbox.base import Limits, sandbox_problem
from composer_replication.sandbox.boxes import state_folder

needs_openenv = pytest.mark.skipif(bool(openenv_problem()), reason=str(openenv_problem()))
needs_bubblewrap = pytest.mark.skipif(bool(sandbox_problem("bubblewrap")), reason=str(sandbox_problem("bubblewrap")))
SLEEP = ToolCall("shell", {"command": "python -c 'import time; time.sleep(600)'"})


@pytest.fixture(scope="session")
def subject():
    return envs_tasks.larder()


@pytest.fixture(scope="session")
def task(subject):
    return envs_tasks.delete(subject, "initials")


@contextlib.contextmanager
def served(task, **options):
    "A server in this process, and a way to make clients that are closed at the end."
    made = []

    def client(timeout=60.0):
        made.append(RemoteDeletionEnv(url, timeout))
        return made[-1]

    app = make_app(lambda: FeatureDeletionEnv([task], limits=Limits(wall_s=600.0)), **options)
    try:
        with serving(app) as url:
            yield client, app
    finally:
        for one in made:
            one.close()


@pytest.fixture(autouse=True)
def no_judge_waits():
    "Judges wait for the next submission, each in a box."
    close_judges()


def left():
    "Sandboxes of this process, but for judges that wait."
    close_judges()
    return boxes(os.getpid())


def boxes(pid):
    "Sandboxes of a process."
    folder = state_folder() / "boxes"
    return sorted(path.name for path in folder.iterdir() if text_of(path / "owner").split()[:1] == [str(pid)])


def sleep_in(one):
    "A command that lasts longer than the server does."
    with contextlib.suppress(ServerProblem):
        one.call(SLEEP)


def soon(condition, seconds=120.0):
    "Wait for a condition, within limits."
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@needs_openenv
@needs_bubblewrap
def test_two_sessions_do_not_meet_and_a_third_has_no_room(task, subject):
    row, = deletion_rows([task])
    with served(task, sessions=2) as (client, app):
        one, two, three = client(), client(), client()
        one.reset(**row), two.reset(**row)
        assert one.prompt == row["prompt"] and one.tools == FeatureDeletionEnv([task]).tools
        assert len(boxes(os.getpid())) in (3, 4)  # two sandboxes, and one or two judges that wait
        with pytest.raises(ServerProblem, match="no room for another session: Server at capacity: 2/2.*more --sessions"):
            three.reset(**row)
        one.call(ToolCall.parse("write_file", '{"path": "note.txt", "text": "mine"}'))
        assert two.call(ToolCall.parse("read_file", '{"path": "note.txt"}')).error_kind == "runtime_error"
        assert two.call(ToolCall.parse("read_file", '{"path": ')).error_kind == "json_decode"
        assert two.call(ToolCall.parse("nope", "{}")).error_kind == "tool_not_found"
        path, text = envs_tasks.solution(subject, task)
        one.call(ToolCall("write_file", {"path": path, "text": text}))
        assert (one.reward(), one.reward(), two.reward()) == (1.0, 1.0, 0.0)
        two.close()
        assert soon(lambda: sum(not session._closed for session in app.state.sessions) < 2)
        three.reset(**row)  # there is room again
        one.reset(**row)  # a session plays one task after the other
        assert one.call(ToolCall.parse("read_file", '{"path": "note.txt"}')).failed
    assert left() == []


@needs_openenv
@needs_bubblewrap
def test_what_the_client_does_wrong_is_said(task):
    with served(task) as (client, app):
        one = client()
        with pytest.raises(ServerProblem, match="refused: there is no task 'x' among the 1 given"):
            one.reset(task_id="x")
        with pytest.raises(ServerProblem, match="refused: the environment holds no open task; call reset"):
            one.call(ToolCall.parse("list_files", "{}"))
    with pytest.raises(ServerProblem, match="gave no answer.*check that the server runs"):
        RemoteDeletionEnv("http://127.0.0.1:9").reset(task_id="x")


@needs_openenv
@needs_bubblewrap
def test_what_is_no_message_is_answered(task):
    from websockets.sync.client import connect
    with served(task) as (client, app):
        with connect(client().url.replace("http", "ws") + "/ws") as socket:
            for sent in ("{", '{"type": "dance"}', '{"type": "step", "data": {"what": 1}}', '{"type": "step"}',
                         '{"type": "step", "data": {"answer": 3}}', '{"type": "reset", "data": {"task_id": ["x"]}}',
                         '{"type": "state"}'):
                socket.send(sent)
                answer = json.loads(socket.recv(timeout=120))
                assert answer["type"] in ("error", "state") and "Traceback" not in json.dumps(answer)
        one = client()
        one.reset(task_id=task.task_id)  # and the server lives
        assert not one.call(ToolCall.parse("list_files", "{}")).failed


@needs_openenv
@needs_bubblewrap
def test_idle_sessions_are_reaped_and_stay_closed(task):
    with served(task, idle_s=1.0) as (client, app):
        one = client()
        one.reset(task_id=task.task_id)
        assert len(boxes(os.getpid())) == 2  # the other one is the judge's
        assert soon(lambda: left() == [])  # checked every five seconds
        with pytest.raises(ServerProblem, match="idle for too long"):
            one.reset(task_id=task.task_id)
        assert left() == []


def test_a_session_closed_while_it_resets_keeps_no_sandbox():
    opened = []

    class Slow:
        def reset(self, task_id):
            session.close()  # as the server's end does, from its own thread
            opened.append(task_id)

        def close(self):
            opened.clear()

    session = server._Session(Slow, set(), dict)
    with pytest.raises(ServerProblem, match="is closed"):
        session.reset(task_id="t")
    assert opened == []


@needs_openenv
@needs_bubblewrap
def test_a_client_that_vanishes_in_a_call_leaves_nothing(task):
    with served(task, sessions=1) as (client, app):
        one = client(timeout=1.0)
        one.reset(task_id=task.task_id)
        with pytest.raises(ServerProblem, match="gave no answer"):  # it hangs up while the command runs
            one.call(ToolCall("shell", {"command": "python -c 'import time; time.sleep(3)'"}))
        assert soon(lambda: left() == [])
        two = client()
        two.reset(task_id=task.task_id)
        assert not two.call(ToolCall.parse("list_files", "{}")).failed


@needs_openenv
@needs_bubblewrap
def test_a_server_that_ends_does_not_wait_for_commands(task):
    with served(task) as (client, app):
        one = client()
        one.reset(task_id=task.task_id)
        thread = threading.Thread(target=sleep_in, args=(one,))
        thread.start()
        time.sleep(0.5)
        begun = time.monotonic()
    assert time.monotonic() - begun < 120 and left() == []  # the command takes ten minutes
    thread.join(120)
    assert not thread.is_alive()


@needs_openenv
@needs_bubblewrap
def test_a_stopped_server_leaves_no_sandbox(task, tmp_path):
    write_tasks([task], tmp_path / "tasks.jsonl")
    command = [sys.executable, "-c",
               "import typer; from composer_replication.contrib.openenv.commands import serve_tasks; typer.run(serve_tasks)",
               str(tmp_path / "tasks.jsonl"), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stderr.readline()
        assert line.startswith("Serving 1 tasks at http://127.0.0.1:"), line
        one = RemoteDeletionEnv(line.split(" at ")[1].split(",")[0])
        one.reset(task_id=task.task_id)
        assert len(boxes(server.pid)) == 2
        threading.Thread(target=sleep_in, args=(one,), daemon=True).start()
        time.sleep(0.5)
        server.terminate()
        assert server.wait(120) == 0
        assert boxes(server.pid) == [] and server.stderr.read() == ""
    finally:
        server.kill()
        server.wait(10)


@needs_openenv
def test_the_command_says_what_it_cannot_serve(tmp_path):
    from typer import Typer
    from typer.testing import CliRunner

    from composer_replication.contrib.openenv.commands import serve_tasks
    app = Typer()
    app.command()(serve_tasks)
    (tmp_path / "tasks.jsonl").write_text("{}\n\n[]\n")
    for arguments, words in (([str(tmp_path / "tasks.jsonl")], ["the field instance_id is missing", "line 3", "holds no task"]),
                             ([str(tmp_path / "none.jsonl")], ["cannot be read"]),
                             ([str(tmp_path / "tasks.jsonl"), "--sandbox", "jail"], ["no kind of sandbox 'jail'"])):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1 and all(word in done.stderr for word in words), done.stderr
        assert "Traceback" not in done.stderr


@needs_openenv
@needs_bubblewrap
def test_a_port_that_is_taken(task):
    with served(task) as (client, app):
        port = int(client().url.rsplit(":", 1)[1])
        with pytest.raises(ServerProblem, match=f"127.0.0.1:{port} cannot be listened on"):
            with serving(app, port=port):
                pass


def test_without_openenv_one_sentence_says_what_to_install(monkeypatch):
    import importlib.util
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "openenv" else real(name, *more))
    with pytest.raises(ServerProblem, match="openenv.*not installed: pip install"):
        make_app(lambda: None)
    with pytest.raises(ServerProblem, match="pip install"):
        RemoteDeletionEnv("http://127.0.0.1:1")


def test_nothing_heavy_is_imported_before_it_is_used():
    code = ("import sys; import composer_replication.contrib.openenv.server, composer_replication.contrib.openenv.commands; "
            "print(sorted({m.split('.')[0] for m in sys.modules} & {'openenv', 'fastapi', 'uvicorn', 'torch', 'transformers'}))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600).stdout == "[]\n"
