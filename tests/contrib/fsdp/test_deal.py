"Rows dealt anew: the same rows in every optimizer step, alike ranks, and a sentence where a rank is gone or has none to send."
import random
from itertools import permutations

import deal_script
import pytest
from ranks import LIMIT, ended, jobs, left, run

from composer_replication.contrib.fsdp import trainer as module
from composer_replication.contrib.fsdp.deal import deal, row_tokens
from composer_replication.training.batches import from_plain


def drawn(draw, size):
    "Counts of rows: many have nothing, a few have much."
    return [(draw.choice([0, 0, 0, 2, 2 * draw.randrange(8)]), draw.choice([0, 0, draw.randrange(20)]), draw.randrange(1, 9000))
            for _ in range(size)]


def test_a_deal_is_a_permutation_in_rounds_of_alike_rows():
    draw = random.Random(0)
    for _ in range(300):
        ranks, each = draw.randrange(1, 9), draw.randrange(1, 13)
        rows = drawn(draw, ranks * each)
        hands = deal(rows, ranks)
        assert sorted(sum(hands, [])) == list(range(len(rows))) and {len(hand) for hand in hands} == {each}
        rounds = [[rows[hand[i]] for hand in hands] for i in range(each)]
        assert all(min(one) >= max(after) for one, after in zip(rounds, rounds[1:]))
        assert deal(rows, ranks) == hands


def test_no_rank_has_more_than_the_mean_and_the_difference_of_one_row():
    "The bound in closed form, of one count: all rounds of sorted rows together differ by at most the first row less the last."
    draw = random.Random(1)
    for _ in range(300):
        ranks, passes, size = draw.randrange(1, 9), draw.randrange(1, 9), draw.randrange(1, 5)
        rows = [(count,) for count, *_ in drawn(draw, ranks * passes * size)]
        held = [[rows[row][0] for row in hand] for hand in deal(rows, ranks)]
        for some in [slice(at, at + size) for at in range(0, passes * size, size)] + [slice(None)]:  # backward passes, the step
            every = [count for hand in held for count in hand[some]]
            most = max(sum(hand[some]) for hand in held)
            assert most <= sum(every) / ranks + max(every) - min(every)


def test_with_one_row_a_pass_no_other_deal_makes_fewer_passes():
    "Against all deals of six rows to two and to three ranks."
    draw = random.Random(2)
    waits = lambda order, ranks: sum(max(order[at:at + ranks]) for at in range(0, 6, ranks))
    for ranks in (2, 3):
        for _ in range(20):
            counts = [draw.choice([0, 0, draw.randrange(9)]) for _ in range(6)]
            hands = deal([(count,) for count in counts], ranks)
            mine = [counts[hand[at]] for at in range(6 // ranks) for hand in hands]
            assert waits(mine, ranks) == min(waits(order, ranks) for order in permutations(counts))


# ---- in processes

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # a process that is a group by itself


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    with jobs(deal_script, tmp_path_factory.mktemp("logs")) as begin:
        yield begin


def pieces(batches):
    "Each row by the name of its trace: all that belongs to it, without padding."
    found = {}
    for batch in map(from_plain, batches):
        for i, row in enumerate(batch["composer_rows"]):
            before = int(batch["prompt_mask"][i].sum())
            after = len(row.tree.ids) - before
            found[row.trace.trace_id] = (
                row, batch["labels"][i], *(batch[name][i].tolist() for name in ("advantages", "importance_sampling_ratio")),
                batch["num_items_in_batch"].item(), batch["prompt_ids"][i, batch["prompt_mask"][i].bool()].tolist(),
                *(batch[name][i, :after].tolist() for name in ("completion_ids", "completion_mask", "old_per_token_logps")))
            assert (batch["prompt_ids"][i, :-before] == deal_script.PAD).all() and not batch["prompt_mask"][i, :-before].any()
            assert (batch["completion_ids"][i, after:] == deal_script.PAD).all() and not batch["completion_mask"][i, after:].any()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_arrives_whole_in_its_optimizer_step(start, tmp_path, ranks):
    ended(start([run("deal", "many", tmp_path)], ranks, **({} if ranks > 1 else {"env": ALONE})))
    found, per = [left(tmp_path, "deal", rank) for rank in range(ranks)], deal_script.TOGETHER
    for step in (slice(0, per), slice(per, 2 * per)):
        before, after = (pieces([batch for rank in found for batch in rank[when][step]]) for when in ("before", "after"))
        assert after == before and len(before) == ranks * per * deal_script.ROWS
        passes = [[row_tokens(from_plain(rank["after"][number])) for rank in found] for number in range(step.start, step.stop)]
        assert all(len(rows) == deal_script.ROWS for one in passes for rows in one)
        assert min(min(rows) for rows in passes[0]) >= max(max(rows) for rows in passes[1])
    assert ranks == 1 or any(pieces(rank["after"]).keys() - pieces(rank["before"]).keys() for rank in found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_when_one_rank_cannot_pack_its_rows_all_end_with_a_sentence(start, tmp_path, ranks):
    ended(start([run("deal", "many", tmp_path, fails=True)], ranks))
    said = [left(tmp_path, "deal", rank)["problem"] for rank in range(ranks)]
    assert all(text.startswith("RowsNotSent: rank 1 could not pack its rows for the other ranks") for text in said)
    assert "KeyError: 'advantages'" in said.pop(1) and all(text.endswith("see its message.") for text in said)


def test_when_a_rank_is_killed_before_it_sends_the_others_end_with_a_sentence(start, tmp_path):
    processes = start([run("deal", "many", tmp_path, dies=True)], 4)
    for process in processes:
        process.join(LIMIT)
    assert [process.exitcode for process in processes] == [0, 9, 0, 0]
    assert all("RankLost: another process of this run" in left(tmp_path, "deal", rank)["problem"] for rank in (0, 2, 3))


# ---- when the trainer deals

def deals(changes, **own):
    "What the trainer answers with these settings and sharded weights."
    trainer = object.__new__(module.ShardedTrainer)
    trainer.args = type("Settings", (), {"loss_type": "dr_grpo", "channels": True} | changes)
    nothing = {"_entropy_bonus_enabled": False, "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "model": None}
    trainer.__dict__ |= nothing | own
    return trainer.deals_rows


def test_rows_stay_where_the_loss_would_be_another(monkeypatch):
    assert not deals({})  # not sharded
    monkeypatch.setattr(module, "is_sharded", lambda model: True)
    assert deals({}) and deals({"loss_type": "dapo"})
    assert not deals({"loss_type": "bnpo"}) and not deals({"channels": False})
    for own in ({"_entropy_bonus_enabled": True}, {"aux_loss_enabled": True}, {"top_entropy_quantile": 0.8}):
        assert not deals({}, **own)
