"The recipes for other trainers: each is what its trainer can take."
import inspect
import shlex
import subprocess
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from composer_replication.contrib.prime_rl import loss_terms
from composer_replication.contrib.verl import BETAS

ROOT = Path(__file__).parents[2]


def overrides():
    "The settings that the script gives verl, by name."
    text = (ROOT / "composer_replication/data/integrations/verl.sh").read_text(encoding="utf-8")
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return [word for word in words[words.index("verl.trainer.main_ppo") + 1:]]


def test_the_script_is_one(tmp_path):
    subprocess.run(["bash", "-n", ROOT / "composer_replication/data/integrations/verl.sh"], check=True)
    settings = dict(word.lstrip("+").split("=", 1) for word in overrides())
    assert settings["distillation.distillation_loss.loss_mode"] in BETAS


def test_prime_rls_settings_are_arguments_of_the_loss():
    loss = tomllib.loads((ROOT / "composer_replication/data/integrations/prime_rl.toml").read_text())["trainer"]["loss"]
    module, name = loss["import_path"].rsplit(".", 1)
    known = {*inspect.signature(getattr(import_module(module), name)).parameters, *inspect.signature(loss_terms).parameters}
    assert set(loss["kwargs"]) <= known


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-foreign")
def test_verls_own_configuration_takes_the_script():
    import verl
    from hydra import compose, initialize_config_dir

    from composer_replication.contrib.verl import register
    register()
    from verl.utils.config import omega_conf_to_dataclass
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides())
    distillation, actor = (omega_conf_to_dataclass(part) for part in (config.distillation, config.actor_rollout_ref.actor))
    assert distillation.distillation_loss.loss_settings.use_topk and distillation.distillation_loss.topk == 20
    assert not distillation.distillation_loss.use_policy_gradient
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == ("composer_dr_grpo", "seq-mean-token-sum-norm")
    assert actor.loss_scale_factor == 4096
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == "my_package.HintedAgentLoopManager"
