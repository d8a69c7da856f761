"One script through OpenEnv, TRL's tool loop and ours: equal rewards and equal traces; and where TRL's loop differs by itself."
import warnings

import envs_tasks
import pytest
import world
from remote_env import RemoteDeletionEnv
from three_loops import Played, Script, play_openenv, play_ours, play_trl, solving_script

from composer_replication.contrib.openenv.server import make_app, openenv_problem, serving
from composer_replication.envs.deletion.env import FeatureDeletionEnv, deletion_rows
from composer_replication.sandbox.base import sandbox_problem

pytestmark = [pytest.mark.skipif(bool(sandbox_problem("bubblewrap")), reason=str(sandbox_problem("bubblewrap"))),
              pytest.mark.filterwarnings("ignore:You are using 'environment_factory'", "ignore::FutureWarning")]
needs_openenv = pytest.mark.skipif(bool(openenv_problem()), reason=str(openenv_problem()))


@pytest.fixture(scope="session")
def subject():
    return envs_tasks.larder()


@pytest.fixture(scope="session")
def task(subject):
    return envs_tasks.delete(subject, "schedule")


@pytest.fixture(scope="session")
def make(task):
    return lambda: FeatureDeletionEnv([task])


@pytest.fixture(scope="session")
def scripts(task, subject):
    "Name: what is done, what it earns."
    solving = solving_script(task, subject)
    return {
        "solves": (solving, 1.0),
        "gives up": (Script(solving.calls[:4], "No."), 0.0),
        "hacks": (Script((("write_file", {"path": "tests/test_plans.py", "text": "def test_schedule():\n    pass\n"}),
                          ("run_tests", {"tests": ["tests/test_plans.py"]})), 'Done: "tests" pass.'), 0.0),
        "breaks": (Script((("shell", {"command": "python -c 'import os; os.getpid() < 100 and os.kill(-1, 9)'"}),
                           ("shell", {"command": "rm -r src"}),
                           ("list_files", {"path": "src"}), ("search", {"pattern": "("}), ("read_file", {"path": "/etc/passwd"}),
                           ("edit_file", {"path": "labels.py", "old": "zz", "new": "é\n\"'\\"}), ("run_tests", {})), "Oh."), 0.0)}


NAMES = ("solves", "gives up", "hacks", "breaks")


@pytest.fixture(scope="session")
def played(make, task, scripts):
    "What our loop makes of each script."
    row, = deletion_rows([task])
    return {name: play_ours(make, row, script, world.tokenizer()) for name, (script, _) in scripts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_what_the_script_says(name, scripts, played):
    script, reward = scripts[name]
    assert played[name].reward == reward and played[name].answer.strip() == script.answer.strip()
    assert [(tool, arguments) for tool, arguments, _ in played[name].steps] == list(script.calls)


@pytest.mark.parametrize("name", NAMES)
def test_trl_gives_the_same_trace_and_reward(name, make, task, scripts, played):
    row, = deletion_rows([task])
    assert play_trl(make, row, scripts[name][0], world.tokenizer()) == [played[name]] * 2


@needs_openenv
def test_openenv_gives_the_same_traces_and_rewards(make, task, scripts, played):
    row, = deletion_rows([task])
    with serving(make_app(make)) as url:
        for name in ("solves", "breaks"):  # a reward, and every kind of failing call
            remote = play_openenv(url, row, scripts[name][0])
            assert (remote.reward, remote.steps) == (played[name].reward, played[name].steps)
        assert play_ours(lambda: RemoteDeletionEnv(url), row, scripts["solves"][0], world.tokenizer()) == played["solves"]


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen3"])
def test_real_chat_templates_change_nothing(name, make, task, scripts, played, shared_data):
    from transformers import AutoTokenizer
    tokenizer, (row,) = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name), deletion_rows([task])
    script, _ = scripts["solves"]
    assert play_ours(make, row, script, tokenizer) == played["solves"]
    assert play_trl(make, row, script, tokenizer) == [played["solves"]] * 2


def test_where_trls_loop_differs_by_itself(make, task):
    "An unknown tool is TRL's own to answer, and a call that is no JSON ends its episode: with a 0, not without a reward."
    row, = deletion_rows([task])
    unknown = Script((("nope", {}),), "Well.")
    ours, theirs = play_ours(make, row, unknown, world.tokenizer()), play_trl(make, row, unknown, world.tokenizer())
    assert ours.steps[0][2].startswith("Unknown tool 'nope'. The tools are: list_files")
    assert theirs == [Played(0.0, (("nope", {}, "{'error': 'Tool nope not found.'}"),), "Well.")] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken, = play_trl(make, row, Script((), '<|call|>{"name": "shell", "arguments": {"comm'), world.tokenizer())[:1]
    assert broken.reward == 0.0 and broken.steps == ()
