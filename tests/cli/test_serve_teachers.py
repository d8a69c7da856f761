"`composer-rl serve teachers` as a process: what it prints, how it ends, and what it refuses."
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from forks import _start
from typer import Typer
from typer.testing import CliRunner

from composer_replication.cli.serve import serve_teachers

RUN = "import typer; from composer_replication.cli.serve import serve_teachers; typer.run(serve_teachers)"
SLEEP = "import time; import composer_replication.experiments.teachers as t; t.LocalTeacher.answer = lambda *_: time.sleep(60); "


def run(*arguments):
    app = Typer()
    app.command()(serve_teachers)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(re.sub(r"\x1b\[\d+m", "", done.stderr).split())


def completion(url, name):
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


def test_it_serves_until_it_is_told_to_stop():
    words = ["serve", "teachers", "--port", "0", "--agents", "mild", "--agents", "teacher-2"]
    server, folder, said, complained = _start(words, None, os.environ | {"COLUMNS": "200"})
    with folder:
        try:
            while server.is_alive() and complained.read_text().count("\n") < 2:
                server.join(0.05)
            first, second = complained.read_text().splitlines()
            url = re.fullmatch(r"Serving mild, teacher-2 at (http://127\.0\.0\.1:\d+/v1)\. Ctrl-C ends it\.", first)[1]
            assert second == f"composer-rl replay TRACES --teachers mild@{url} --teachers teacher-2@{url}"
            assert completion(url, "mild")["model"] == "mild"
            server.terminate()
            server.join(120)
            assert server.exitcode == 0 and complained.read_text().count("\n") == 2 and said.read_text() == ""
        finally:
            server.kill()
            server.join()


@pytest.mark.slow
def test_ctrl_c_ends_it_while_a_teacher_thinks():
    command = [sys.executable, "-c", SLEEP + RUN, "--port", "0", "--agents", "medium"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        first, _ = server.stderr.readline(), server.stderr.readline()
        url = first.split()[3].rstrip(".")
        threading.Thread(target=lambda: pytest.raises(OSError, completion, url, "medium"), daemon=True).start()
        threading.Event().wait(1)
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0 and server.stderr.read() == "" and server.stdout.read() == ""
    finally:
        server.kill()
        server.wait(10)


def test_what_it_cannot_serve():
    code, said = run("--agents", "brilliant")
    assert (code, said) == (1, "error: there are no agents 'brilliant'; name one of good, fair, poor, or some of mild, medium, "
                               "strong, teams, teacher-1, teacher-2, teacher-3.")
    code, said = run("--agents", "good", "--agents", "poor")
    assert code == 1 and "there are no agents 'good'" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run("--agents", "mild", "--port", str(taken.getsockname()[1]))
    assert code == 1 and "cannot be listened on" in said and "choose another address or port" in said
