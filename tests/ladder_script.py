"The command line with ladders of a light arm and few steps: for tests in processes of their own."
import functools
import sys

import forks


def main(folder, arguments, environment):
    "What a child does; its output lies in the folder."
    sys.path.insert(0, str(folder))
    from composer_replication.experiments import ladder as room
    small = {"alpha_sdpo": 1.0, "beta_replay": 1.0, "steps": 4, "measure_every": 2}
    room.PRESETS.update(quick=room.Preset(1, small, over_seeds=False), standard=room.Preset(3, small))
    room.ladder = functools.partial(room.ladder, arm="light_arm", workers=2)
    forks._command(arguments, folder, environment, folder / "said", folder / "complained")
