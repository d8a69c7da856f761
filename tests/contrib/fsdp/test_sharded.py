"Invariant 10: weights sharded over processes (FSDP2, gloo, CPU) give every channel's loss and every gradient of one process."
import time

import pytest
import sharded_script
import torch
from ranks import LIMIT, ended, jobs, left, run
from safetensors.torch import load_file
from trainer_script import differences, played_rows

UNION = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sharded": True}
ALONE = {"per_device_train_batch_size": 8, "replay_batch_size": 4}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    "Starts a job; none outlives the tests."
    with jobs(sharded_script, tmp_path_factory.mktemp("logs")) as begin:
        yield lambda tasks, ranks=2: begin(tasks, ranks)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    "Eight rollouts of two tasks; only the first task's, which the first rank plays, have hinted error turns and pairs."
    folder = tmp_path_factory.mktemp("rows")
    return str(played_rows(folder, one_side=True))


CASES = {  # changes to the scene "union", which has all channels and a KL to the start in the loss
    "live": {"teacher": "live", "dtype": "float64"},
    "ema": {"teacher": "ema", "teacher_ema_rate": 0.5, "max_steps": 2, "learning_rate": 0.05, "dtype": "float64"},
    "float32": {"teacher": "live", "dtype": "float32"},
    "untied": {"teacher": "live", "untied": True, "dtype": "float64"},
    "frozen": {"teacher": "frozen", "max_steps": 2, "learning_rate": 0.05, "dtype": "float64", "untied": True},
    "trust": {"teacher": "trust_region", "max_steps": 2, "learning_rate": 0.05, "dtype": "float64"},
    "tokens": {"teacher": "ema", "loss_type": "dapo", "dtype": "float64"},
    "rows": {"teacher": "live", "loss_type": "grpo", "dtype": "float64"},
    "simpo": {"teacher": "ema", "replay_form": "simpo", "dtype": "float64"},
    "checkpointing": {"teacher": "live", "gradient_checkpointing": True, "dtype": "float64"},
    "checkpointing-ema": {"teacher": "ema", "gradient_checkpointing": True, "dtype": "float64", "untied": True},
    "lora": {"teacher": "ema", "teacher_ema_rate": 0.5, "lora": True, "max_steps": 2, "learning_rate": 0.05},
    "clipped": {"teacher": "live", "max_grad_norm": 0.01, "dtype": "float64"},
    "simpo-live": {"teacher": "live", "replay_form": "simpo", "dtype": "float64"},
    "ema-float32": {"teacher": "ema", "teacher_ema_rate": 0.5, "max_steps": 2, "learning_rate": 0.05, "dtype": "float32"},
    "lora-frozen": {"teacher": "frozen", "lora": True, "gradient_checkpointing": True, "max_steps": 2, "learning_rate": 0.05},
    "bf16": {"teacher": "live", "bf16": True},
    "bf16-ema": {"teacher": "ema", "bf16": True},
    "bf16-frozen": {"teacher": "frozen", "bf16": True, "gradient_checkpointing": True},
}
FAST = ("ema", "checkpointing")


@pytest.fixture(scope="module")
def found(start, rows, tmp_path_factory):
    "Of some cases: what two ranks left behind, and one process."
    def both(cases):
        out = tmp_path_factory.mktemp("cases")
        two = start([run(case, "union", out, rows=rows, **UNION, **CASES[case]) for case in cases])
        beside = out / "alone"
        alone = start([run(f"{case}-alone", "union", beside, rows=rows, **ALONE, **CASES[case]) for case in cases], ranks=1)
        ended(two + alone, (0, 0, 0))
        return {case: (left(beside, f"{case}-alone"), *(left(out, case, rank) for rank in (0, 1))) for case in cases}

    return both


def check_equal(case, alone, *ranks):
    "Each channel's loss, every gradient, and what the step made of the weights."
    close = 1e-7 if CASES[case].get("dtype") == "float64" else 2e-5  # advantages are float32 in any case
    assert alone["log"][-1]["sdpo/sites"] and alone["log"][-1]["replay/pairs"] and alone["grads"]
    assert sorted(sum((rank["branches"] for rank in ranks), [])) == sorted(alone["branches"])
    rounds = list(zip(*(rank["branches"] for rank in ranks), strict=True))  # as rows were dealt anew
    assert all(min(one) >= max(after) for one, after in zip(rounds, rounds[1:]))
    for rank in ranks:
        for mine, entry in zip(rank["log"], alone["log"], strict=True):
            assert "branches/dense" not in entry or mine["branches/rows"] == entry["branches/rows"] == 0 < mine["branches/dense"]
            for key in ("sdpo/sites", "sdpo/tokens", "replay/pairs"):
                assert mine[key] == entry[key]
            for key in ("sdpo/loss", "sdpo/gap", "replay/loss", "kl/token"):
                assert mine[key] == pytest.approx(entry[key], abs=close, rel=close), key
        for part in ("grads", "parameters", "teacher", "reference"):
            assert rank[part].keys() == alone[part].keys()
            for name, value in alone[part].items():
                worst = (rank[part][name] - value).abs().max() / max(value.abs().max(), 1e-6)
                assert worst < close * 10, (case, part, name, worst)


def test_two_ranks_one_of_them_without_error_turns_have_the_gradients_of_one_process(found, start, rows, tmp_path):
    "And with rows dealt anew fewer idle passes than where each rank keeps its own."
    kept = start([run("kept", "union", tmp_path, rows=rows, deals=False, **UNION, **CASES[FAST[0]])])
    cases = found(FAST)
    ended(kept)
    for case, (alone, *ranks) in cases.items():
        check_equal(case, alone, *ranks)
    dealt, own = (run["log"][0]["level/idle"] for run in (cases[FAST[0]][1], left(tmp_path, "kept")))
    assert dealt < own / 2 < 0.5
    assert any(map(any, cases[FAST[0]][2]["branches"])) and not any(map(any, left(tmp_path, "kept", 1)["branches"]))


@pytest.mark.slow
def test_the_same_for_every_teacher_form_and_option(found):
    for case, (alone, *ranks) in found([c for c in CASES if c not in FAST and "bf16" not in CASES[c]]).items():
        check_equal(case, alone, *ranks)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [
    ("live", "ema", "frozen"), ("trust", "simpo", "float32"), ("lora", "checkpointing-ema", "ema-float32")])
def test_four_ranks_have_the_gradients_of_one_process_too(start, rows, tmp_path, cases):
    union = UNION | {"gradient_accumulation_steps": 1}
    four = start([run(case, "union", tmp_path, rows=rows, **union, **CASES[case]) for case in cases], ranks=4)
    alone = start([run(f"{case}-alone", "union", tmp_path, rows=rows, **ALONE, **CASES[case]) for case in cases], ranks=1)
    ended(four + alone)
    for case in cases:
        check_equal(case, left(tmp_path, f"{case}-alone"), *(left(tmp_path, case, rank) for rank in range(4)))


@pytest.mark.slow
def test_bfloat16_is_about_as_far_from_float64_as_autocast_in_one_process(found):
    "In the first step, where every teacher is the start."
    cases = ["bf16", "bf16-ema", "bf16-frozen"]
    every = found(["live", *cases])
    together = lambda run: torch.cat([g.flatten().double() for g in run["grads"].values()])
    exact = together(every["live"][0])
    for case in cases:
        alone, sharded, _ = every[case]
        far_one, far_two = ((together(run) - exact).norm() / exact.norm() for run in (alone, sharded))
        assert 0 < far_two < 3 * far_one < 0.5, case
        for key in ("policy/loss", "sdpo/loss", "replay/loss"):
            assert sharded["log"][-1][key] == pytest.approx(alone["log"][-1][key], rel=0.1, abs=1e-3), (case, key)


# ---- whole runs: sampling from a gathered copy, checkpoints, ranks that are gone

PARTS = {"fsdp_config": sharded_script.FSDP["fsdp_config"] | {"state_dict_type": "SHARDED_STATE_DICT"}}


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Three steps with rollouts by plain data parallelism, and sharded with checkpoints of both kinds.

    A generation takes two of the three tasks, so one is left over and the last step begins another epoch.
    """
    out = tmp_path_factory.mktemp("whole")
    more = {"held_out": 3, "sharded": True}
    ended(start([run("plain", "odd", out / "plain", save_strategy="no", held_out=3), run("one file", "odd", out / "file", **more),
                 run("parts", "odd", out / "parts", **more, **PARTS)]))
    return out


@pytest.mark.slow
def test_rollouts_and_held_out_scores_are_those_of_plain_data_parallelism(whole):
    for rank in (0, 1):
        plain, sharded = left(whole / "plain", "plain", rank), left(whole / "file", "one file", rank)
        assert sharded["held_out"] == pytest.approx(plain["held_out"], rel=1e-4)
        for mine, entry in zip(sharded["log"], plain["log"], strict=True):
            assert mine["loss"] == pytest.approx(entry["loss"], rel=1e-4)
            assert mine.get("reward") == entry.get("reward") and mine["replay/tokens"] == entry["replay/tokens"]
            assert mine.get("kl/rollout", 0) == pytest.approx(entry.get("kl/rollout", 0), rel=1e-3, abs=1e-7)
        assert sharded["log"][-1]["kl/rollout"] and sharded["log"][-1]["epoch"] > 1
        for part in ("parameters", "teacher"):
            assert all((sharded[part][n] - p).abs().max() < 1e-4 for n, p in plain[part].items())
        assert differences(left(whole / "parts", "parts", rank), sharded) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, options", [("file", "one file", {}), ("parts", "parts", PARTS)])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(start, whole, tmp_path, kind, name, options):
    start_from = str(whole / kind / "checkpoint-1")
    ended(start([run("end", "odd", tmp_path, resume=start_from, save_strategy="no", held_out=3, sharded=True, **options)]))
    for rank in (0, 1):
        assert differences(left(tmp_path, "end", rank), left(whole / kind, name, rank)) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, PARTS], ids=["file", "parts"])
def test_four_ranks_go_on_from_a_checkpoint_of_two(start, tmp_path, options):
    "The same tasks, episodes, losses and weights up to rounding."
    def spread(name, ranks, **more):
        more |= {"gradient_accumulation_steps": 4 // ranks, "dtype": "float64", "sharded": True}
        ended(start([run(name, "spread", tmp_path / name, **more, **options)], ranks))
        return left(tmp_path / name, name)

    whole = spread("whole", 2)
    found = spread("end", 4, resume=str(tmp_path / "whole" / "checkpoint-1"), save_strategy="no")
    assert sum(entry["sdpo/sites"] for entry in whole["log"][1:]) and len(found["log"]) == 3
    for mine, entry in zip(found["log"], whole["log"], strict=True):
        assert mine["reward"] == entry["reward"]
        for key in ("loss", "sdpo/loss", "replay/loss", "sdpo/sites", "replay/pairs"):
            assert mine[key] == pytest.approx(entry[key], rel=1e-6, abs=1e-9), key
    for part in ("parameters", "teacher"):
        assert all((found[part][n] - p).abs().max() < 1e-7 for n, p in whole[part].items())


@pytest.mark.slow
def test_one_process_reads_the_whole_model_and_teacher_from_a_checkpoint_in_one_file(whole):
    ranks, folder = left(whole / "file", "one file"), whole / "file" / "checkpoint-3"
    for part, file in (("parameters", "model.safetensors"), ("teacher", "teacher/teacher.safetensors")):
        saved = load_file(folder / file)
        head = saved.pop("lm_head.weight", None)  # transformers writes a tied head of its own where it has gathered it
        assert head is None or torch.equal(head, saved["model.embed_tokens.weight"])
        assert saved.keys() == ranks[part].keys() and all(torch.equal(saved[n], t) for n, t in ranks[part].items())
    weights = sum(t.nbytes for t in ranks["parameters"].values())  # which the plan counts twice
    assert (folder / "pytorch_model_fsdp.bin").stat().st_size == pytest.approx(weights, rel=0.1)


def check_lost(processes, died, folder, said):
    "All but the one end with this sentence within the limit, a minute more for a busy machine."
    began = time.monotonic()
    for rank, process in enumerate(processes):
        if rank != died:
            process.join(LIMIT)
            assert process.exitcode == 0 and said in left(folder, "lost", rank)["problem"], rank
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_when_a_rank_is_killed_the_others_end_with_a_sentence(start, tmp_path, ranks):
    processes = start([run("lost", "two", tmp_path, sharded=True, dies=1, save_strategy="no")], ranks)
    processes[1].join(LIMIT)
    assert processes[1].exitcode == 9
    assert check_lost(processes, 1, tmp_path, "RankLost: another process of this run has ended") < sharded_script.TIMEOUT + 60


@pytest.mark.slow
def test_when_a_rank_stands_still_the_others_end_with_a_sentence(start, tmp_path):
    processes = start([run("lost", "two", tmp_path, sharded=True, stops=1, save_strategy="no")], 2)
    while not (tmp_path / "stands").exists():
        time.sleep(0.1)
        assert processes[1].is_alive()
    assert check_lost(processes, 1, tmp_path, "did not answer within ddp_timeout") < sharded_script.TIMEOUT + 60


@pytest.mark.slow
def test_without_levelling_the_ranks_would_wait_for_each_other(start, rows, tmp_path):
    began = time.monotonic()
    ended(start([run("apart", "union", tmp_path, rows=rows, levels=False, deals=False, **UNION, **CASES["live"])]))
    assert all("did not answer within ddp_timeout" in left(tmp_path, "apart", rank)["problem"] for rank in (0, 1))
    assert time.monotonic() - began > sharded_script.TIMEOUT
