"A run that a signal ends early raises, so that no caller takes its checkpoint for that of the whole run."
import os
import signal

import pytest

from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import Interrupted, run_recipe

pytestmark = pytest.mark.trainer


def recipe(folder, steps, **more):
    settings = {"output_dir": str(folder), "max_steps": str(steps), "save_steps": "100", "logging_steps": "1"}
    return load_recipe("toy-traces", settings | more)


def test_a_run_that_a_signal_ends_raises_and_goes_on_where_it_ended(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def tell(logged):
        if logged["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="after step 2 of 4; set resume to true") as caught:
        run_recipe(recipe(tmp_path, 4), tell)
    early = caught.value.finished
    assert (early.step, early.of, early.interrupted, early.checkpoint) == (2, 4, True, tmp_path / "checkpoint-2")
    assert not isinstance(caught.value, Exception) and signal.getsignal(signal.SIGTERM) == before
    rest = run_recipe(recipe(tmp_path, 4, resume="true"))
    assert (rest.step, rest.interrupted, rest.resumed_from) == (4, False, tmp_path / "checkpoint-2")


def test_a_signal_in_the_last_step_ends_nothing_early(tmp_path):
    done = run_recipe(recipe(tmp_path, 2), lambda logged: logged["step"] == 1 and os.kill(os.getpid(), signal.SIGTERM))
    assert (done.step, done.interrupted) == (2, False)
