"`composer-rl eval`: a real checkpoint of a run against its base, and what cannot be evaluated."
import json
import time

import pytest
from typer.testing import CliRunner

from composer_replication.cli.app import app
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.traces.read import read_traces


def run(*words):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


@pytest.fixture(scope="module")
def better(tmp_path_factory):
    "A checkpoint in a run's folder: the weights of another embedded model."
    folder = tmp_path_factory.mktemp("run") / "checkpoint-3"
    embedded_model("teacher-1").save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def test_a_better_checkpoint_is_told_from_its_base(better, tmp_path):
    (better.parent / "run.json").write_text(json.dumps({"trained_on": ["test-eval-0-0", "train-1"]}))
    done = run(better, "--task", "toy", "--against", "embedded", "--limit", 6, "--samples", 2, "--max-turns", 8, "--max-tokens",
               1024, "--out", tmp_path / "o", "--json")
    assert done.exit_code == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["differences"]["pass@1"]["low"] > 0 and row["differences"]["error turns"]["high"] < 0
    assert row["figures"]["pass@2"]["problems"] == 6 and row == json.loads((tmp_path / "o" / "result.json").read_text())
    mine, theirs = (list(read_traces(tmp_path / "o" / name)) for name in ("traces.jsonl.gz", "base-traces.jsonl.gz"))
    assert [t.trace_id for t in mine] == [t.trace_id for t in theirs] and len(mine) == 12
    assert sum(t.reward for t in mine) / 12 == pytest.approx(row["figures"]["reward"]["estimate"])
    assert mine[0].model == str(better)
    assert "1 of the 6 tasks were trained on, for example test-eval-0-0" in done.stderr


@pytest.mark.parametrize("limit", [1, 3])
def test_a_turn_has_a_limit_of_its_own(tmp_path, limit):
    done = run("embedded", "--task", "toy", "--limit", 2, "--max-turn-tokens", limit, "--out", tmp_path, "--json")
    figures = {name: figure["estimate"] for name, figure in json.loads(done.stdout)["figures"].items()}
    assert (figures["sampled tokens"], figures["turns"], figures["cut off"]) == (limit, 1, 1)


def test_a_result_does_not_outlive_the_traces_it_was_made_of(tmp_path, monkeypatch):
    from composer_replication.experiments import pass_at_k
    words = ("embedded", "--task", "toy", "--limit", 2, "--max-turns", 1, "--out", tmp_path / "o")
    assert run(*words, "--against", "embedded").exit_code == 0 and (tmp_path / "o" / "base-traces.jsonl.gz").exists()
    plays, real = [], pass_at_k.collect

    def interrupted(*given, each, **named):
        def count(rollout):
            each(rollout)
            plays.append(rollout)
            if len(plays) == 40:
                raise KeyboardInterrupt
        return real(*given, each=count, **named)

    monkeypatch.setattr(pass_at_k, "collect", interrupted)
    assert run(*words[:4], 40, *words[5:], "--samples", 2).exit_code != 0 and len(plays) == 40
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["traces.jsonl.gz"]


def test_of_a_run_only_what_it_held_out_is_played(better, tmp_path):
    from composer_replication.envs.toy.env import world_rows
    held = [row["task_id"] for row in world_rows(4, "eval-0", "test")][1::2]
    split, words = better.parent / "split.json", (better, "--task", "toy", "--held-out", "--limit", 4, "--max-turns", 1)
    try:
        split.write_text(json.dumps({"train": [], "held_out": held}))
        done = run(*words, "--out", tmp_path / "o")
        assert done.exit_code == 0, done.stderr
        assert [t.task_id for t in read_traces(tmp_path / "o" / "traces.jsonl.gz")] == held
        split.write_text(json.dumps({"train": [], "held_out": ["elsewhere"]}))
        done = run(*words)
        assert done.exit_code == 1 and done.stderr.startswith("error: there is none of the 1 tasks")
    finally:
        split.unlink()


def test_a_run_that_held_nothing_out_says_so(better):
    done = run(better, "--task", "toy", "--held-out")
    assert done.exit_code == 1 and "this run held no tasks out; name a file of other tasks" in done.stderr


def test_the_shipped_deletion_tasks_are_read(tmp_path, monkeypatch):
    "The episodes are another test's: here the tasks reach the loop."
    import composer_replication.experiments.pass_at_k as module
    from composer_replication.core.trace import Trace, Turn
    from composer_replication.rollout.types import Ending, Rollout
    seen = []

    def collect(policy, factory, rows, limits, trace_ids, each):
        seen.append((type(factory()).__name__, rows))
        turns = (Turn("user", "x"), Turn("assistant", "y"))
        return [Rollout(Trace(name, turns), (), (), (), (), Ending.DONE, 0.0) for name in trace_ids]

    monkeypatch.setattr(module, "collect", collect)
    from importlib.resources import files
    tasks = files("composer_replication") / "data" / "repos" / "larder.tasks.jsonl"
    done = run("embedded", "--task", "deletion", "--tasks", tasks, "--limit", 3, "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    (name, rows), = seen
    assert name == "FeatureDeletionEnv" and len(rows) == 3 and all(row["prompt"] and row["task_id"] for row in rows)
    assert "pass@1" in done.stdout and "3 tasks" in done.stdout


@pytest.mark.parametrize("words, said", [
    (["nobody/nothing", "--task", "toy"], "HF_HUB_OFFLINE is set"),
    (["embedded", "--task", "toy", "--against", "nobody/nothing"], "the model 'nobody/nothing' is neither"),
    (["./nowhere", "--task", "toy"], "there is no folder of"),
    (["embedded", "--task", "chess"], "there is no environment 'chess'"),
    (["embedded", "--task", "deletion"], "needs a file of tasks"),
    (["embedded", "--task", "toy", "--chat-template", "nothing"], "neither a file nor a shipped template"),
])
def test_what_cannot_be_evaluated_is_one_sentence(words, said, tmp_path, monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    begun = time.process_time()
    done = run(*words)
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert time.process_time() - begun < 20  # no weights, no retries


@pytest.mark.parametrize("words", [["eval", "odd", "--task", "toy", "--limit", "1"],
                                   ["hints", "score", "--model", "odd", "--sites", "2"]])
def test_a_model_whose_own_scores_are_others_is_refused_before_it_is_scored(words, tmp_path, monkeypatch):
    from transformers import MptConfig, MptForCausalLM
    monkeypatch.chdir(tmp_path)
    MptForCausalLM(MptConfig(vocab_size=len(embedded_tokenizer()), d_model=32, n_heads=2, n_layers=2, max_seq_len=4096,
                             logit_scale=0.5)).save_pretrained("odd")
    embedded_tokenizer().save_pretrained("odd")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "MptForCausalLM does more than its output head" in " ".join(done.stderr.split()), done.output


def test_a_base_without_tools_in_its_template_is_asked_in_the_checkpoints(tmp_path):
    from composer_replication.cli.eval import _lent
    embedded_model().save_pretrained(tmp_path)
    tokenizer = embedded_tokenizer()
    used = tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    assert _lent(str(tmp_path), used) is None
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    assert _lent(str(tmp_path), used) == used
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert _lent(str(tmp_path), used) == used
