"""Processes of their own without seconds of imports each: forked from one that has imported what is heavy.

The start of a process (what an import costs, what it may not import, signals from the first moment) is for tests that start
one by hand."""
import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([  # nothing of the command line: it looks at its terminal and environment as it is imported
    "jsonschema",  # beside JupyterLab's packages over a second
    "matplotlib.figure", "transformers.models.qwen3.modeling_qwen3", "composer_replication.training.trainer"])
FORCED = (  # each changes what a command sends to a pipe
    "PYTHONUNBUFFERED", "TQDM_DISABLE", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS", "TERMINAL_WIDTH")


def _command(arguments, cwd, environment, said, complained):
    "What the child does: its streams, its folder and environment, then the command line."
    for number, file in enumerate((os.devnull, said, complained)):
        os.dup2(os.open(file, os.O_RDWR), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["composer-rl", *arguments]
    gc.freeze()  # what was imported stays
    from composer_replication.cli.app import main
    main()


def composer(*arguments, cwd=None, env=None, timeout=600) -> CompletedProcess:
    "A whole `composer-rl` command in a process of its own, its output in files."
    forced = {name: os.environ.pop(name) for name in FORCED if name in os.environ}
    forkserver.ensure_running()
    os.environ.update(forced)
    with TemporaryDirectory() as folder:
        said, complained = Path(folder, "out"), Path(folder, "err")
        said.touch()
        complained.touch()
        words = [str(argument) for argument in arguments]
        process = SERVER.Process(target=_command, args=(words, str(cwd or Path.cwd()), dict(env or os.environ), said, complained))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutExpired(words, timeout, said.read_bytes(), complained.read_bytes())
        return CompletedProcess(words, process.exitcode, said.read_text(), complained.read_text())
