"The policy objective's trainer plays the tasks that it is given, in the place of the recipe's."
import importlib.util
import sys
from pathlib import Path

from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.run import make_trainer

spec = importlib.util.spec_from_file_location("plan_017", Path(__file__).with_name("plan.py"))
plan = sys.modules["plan_017"] = importlib.util.module_from_spec(spec)  # spikes have a `plan` each
spec.loader.exec_module(plan)


def test_the_trainer_plays_the_chosen_tasks(tmp_path):
    recipe = load_recipe("toy", {"output_dir": str(tmp_path / "run"), "max_steps": "1"})
    rows = [{"prompt": [{"role": "user", "content": "write f"}], "task_id": f"chosen-{n}"} for n in range(8)]
    assert make_trainer(recipe, plan.on(rows)).train_dataset["task_id"] == [row["task_id"] for row in rows]
