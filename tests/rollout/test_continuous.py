"Rows that come and go while others decode: the same rollouts whatever stands beside them, and no thread left."
import math
import random
import signal
import threading
import time
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rollouts import config
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MambaConfig, Qwen2Config

from composer_replication.core.tools import ToolResult
from composer_replication.core.trace import Trace, Turn
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.rollout import decode
from composer_replication.rollout.decode import ALIGNED, CachedBatch, RereadBatch
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy, TransformersPolicy
from composer_replication.rollout.sampling import Numbers, Sample, SampleRequest, Sampling
from composer_replication.rollout.tool_call_parser import TurnReader
from composer_replication.rollout.tool_threads import Chains
from composer_replication.rollout.turn_io import TokenTurns, turn_forms
from composer_replication.tree.context import context_ids

LIMIT = 60.0  # seconds that anything here may wait; reached by a defect alone

# --- the batch -----------------------------------------------------------------------------------------------------------

VOCAB, END = 64, 1
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=END, bos_token_id=2,
             initializer_range=0.4)  # large, so that what is attended to matters
FAMILIES = {"qwen2": lambda: Qwen2Config(**SMALL),
            "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=12, layer_types=[
                "sliding_attention", "full_attention", "sliding_attention"])}
SAMPLING = Sampling(temperature=0.8)
TURNS = (4, 2, 4, 3, 1)  # of each row


@cache
def made(family):
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).double().eval()


@cache
def script():
    "By row and turn: the ids that come in, and the limit. Rows 0 and 4 share their prompt."
    draw = random.Random(3)
    ids = lambda n: [draw.randrange(3, VOCAB) for _ in range(n)]
    turns = {(row, turn): (ids(draw.choice((1, 9, 30)) if turn == 0 else draw.randint(1, 13)), draw.randint(1, 12))
             for row, count in enumerate(TURNS) for turn in range(count)}
    turns[4, 0] = turns[0, 0][0], 7
    return turns


@cache
def alone(family):
    "What each row says, read from its start for every token: no cache, no other row."
    said, past = {}, {row: [] for row in range(len(TURNS))}
    for (row, turn), (ids, limit) in sorted(script().items()):
        past[row] += ids
        numbers, new, logprobs = Numbers(f"{row}/{turn}"), [], []
        while len(new) < limit and END not in new:
            with torch.no_grad():
                logits = made(family)(torch.tensor([past[row] + new])).logits[:, -1]
            drawn = SAMPLING.draw(logits, torch.tensor([numbers[len(new)]]))
            new.append(drawn[0].item())
            logprobs.append(drawn[1].item())
        past[row] += new
        said[row, turn] = Sample(tuple(new), tuple(logprobs), END not in new)
    return said


def played(family, pauses, kept=32):
    "The same in one batch, where a row comes back so many steps after its turn ended, or when nothing else is left to do."
    batch, said = CachedBatch(made(family), frozenset({END}), SAMPLING), {}
    batch.kept = kept
    rows, asked = range(len(TURNS)), {}
    turn, back, past = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0), dict.fromkeys(rows, ())
    for step in range(10_000):
        if not batch.busy and not back:
            return said, batch
        due = [row for row, at in back.items() if at <= step or not batch.busy and at == min(back.values())]
        for row in due:
            del back[row]
            ids, limit = script()[row, turn[row]]
            question = SampleRequest((*past[row], *ids), SAMPLING, limit, f"{row}/{turn[row]}")
            asked[question] = row
            batch.begin([question])
        for question, sample in batch.step():
            row = asked.pop(question)
            said[row, turn[row]], past[row] = sample, (*question.ids, *sample.ids)
            turn[row] += 1
            if turn[row] < TURNS[row]:
                back[row] = step + pauses[row][turn[row] - 1]
            else:
                question.gone = True
    raise AssertionError("it does not end")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(pauses=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=len(TURNS), max_size=len(TURNS)),
       kept=st.sampled_from((0, 1, 32)))
def test_a_row_says_the_same_whoever_decodes_beside_it(family, pauses, kept):
    (said, batch), wanted = played(family, pauses, kept), alone(family)
    assert len(batch.rows) <= len(TURNS)
    assert said.keys() == wanted.keys()
    for key, sample in said.items():
        assert (sample.ids, sample.cut) == (wanted[key].ids, wanted[key].cut), key
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(wanted[key].logprobs), atol=1e-6, rtol=0)


def test_small_forwards_give_the_same(monkeypatch):
    for name, value in (("MASK_ENTRIES", 40), ("READ_TOKENS", 8), ("ROOM", 1), ("SHARED", 1)):
        monkeypatch.setattr(f"composer_replication.rollout.decode.{name}", value)
    said, _ = played("gemma3", [[3, 0, 5], [1, 1, 1], [0, 4, 2], [6, 6, 6], [0, 0, 0]])
    assert {key: s.ids for key, s in said.items()} == {key: s.ids for key, s in alone("gemma3").items()}


@pytest.fixture
def read(monkeypatch):
    "Ids that are read by forwards of the base model, padding included."
    counts, forward = [], CachedBatch._forward

    def counted(batch, model, first, positions, time, ids, masks):
        if model is not batch.model:
            counts.append(ids.numel())
        return forward(batch, model, first, positions, time, ids, masks)

    monkeypatch.setattr(CachedBatch, "_forward", counted)
    return counts


def questions(prompts, limit=3):
    return [SampleRequest(tuple(prompt), SAMPLING, limit, f"{i}") for i, prompt in enumerate(prompts)]


def through(batch, asked):
    "What is answered, in the order of the questions."
    batch.begin(asked)
    found = {}
    while batch.busy:
        found |= dict(batch.step())
    return [found[question] for question in asked]


def test_what_prompts_share_is_read_once(read):
    "A beginning of 200 ids, four ends of 50, each asked three times; then a fifth end, when all rows are idle."
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(3, VOCAB) for _ in range(n)]
    head, ends = ids(200), [ids(50) for _ in range(5)]
    batch = CachedBatch(made("qwen2"), frozenset({END}), SAMPLING)
    asked = questions([head + end for end in ends[:4] for _ in range(3)])
    found = through(batch, asked)
    assert sum(read) <= 200 + 4 * 50 and len(batch.rows) == 12
    for question, sample in zip(asked, found):
        fresh, = through(CachedBatch(made("qwen2"), frozenset({END}), SAMPLING), [question])
        assert fresh.ids == sample.ids
        question.gone = True
    del read[:]
    through(batch, questions([head + ends[4]]))
    assert sum(read) <= 50 and len(batch.rows) == 12  # and it took a row that was over


def test_idle_rows_are_bounded(read):
    "Conversations that nobody has ended: the oldest is read again."
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(9)]
    batch = CachedBatch(made("qwen2"), frozenset({END}), SAMPLING)
    batch.kept = 4
    for prompt in prompts:
        through(batch, questions([prompt]))
    assert len(batch.rows) == 4 and len(batch.cache.layers[0].keys) == 4
    for prompt, again in ((prompts[-1], 0), (prompts[0], 39)):
        del read[:]
        through(batch, questions([prompt]))
        assert sum(read) == again


def test_a_turn_that_is_given_up_leaves_its_row_where_it_stood():
    prompt = [5, 9, 7, 11, 30, 31, 32]
    batch = CachedBatch(made("qwen2"), frozenset({END}), SAMPLING)
    gone, = questions([prompt], 50)
    batch.begin([gone])
    for _ in range(3):
        assert not batch.step()
    gone.gone = True
    again = questions([prompt, prompt[:5]])
    found = through(batch, again)
    assert not gone.answer.done() and len(batch.rows) == 2
    for question, sample in zip(again, found):
        assert sample.ids == through(CachedBatch(made("qwen2"), frozenset({END}), SAMPLING), [question])[0].ids


# --- what a step asks of the device ------------------------------------------------------------------------------------

ROWS, PROMPT, NEVER = 6, 20, 10**6
PROMPTS = [[3 + (7 * row + at) % 50 for at in range(PROMPT)] for row in range(ROWS)]
WAITS = {"tensor", "as_tensor", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"}


class Waits(TorchFunctionMode):
    "Calls that copy between host and device."

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in WAITS:
            self.found[function.__name__] += 1
        return function(*args, **kwargs or {})


def decoded(model, limit, prompts=PROMPTS):
    through(CachedBatch(model, frozenset({NEVER}), Sampling()), questions(prompts, limit))


def test_rows_of_different_length_wait_no_more():
    "A step copies once; what it dispatches stands beside `generate` in the notebook."
    found = []
    for limit in (6, 16):
        with Waits() as waits:
            decoded(made("gemma3"), limit, [prompt[row:] for row, prompt in enumerate(PROMPTS)])
        found.append(waits.found)
    assert found[1] - found[0] == {"tolist": 10}


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_lie_as_torch_takes_them_without_a_copy(family, monkeypatch):
    "Its attention on CUDA copies a mask whose strides, but the last, are no multiple of 8 (`preprocess_mask` in attention.cpp)."
    seen, forward = [], CachedBatch._forward

    def watched(batch, model, first, positions, time, ids, masks):
        seen.extend(masks.values())
        return forward(batch, model, first, positions, time, ids, masks)

    monkeypatch.setattr(CachedBatch, "_forward", watched)
    monkeypatch.setattr(decode, "ROOM", 3)
    decoded(made(family), 12)
    assert len({mask.shape[-1] for mask in seen}) > 10
    assert all(mask.stride(-1) == 1 and mask.storage_offset() % ALIGNED == 0 and not any(size % 8 for size in mask.stride()[:-1])
               for mask in seen)


def test_numbers_that_are_copied_ahead_run_out(monkeypatch):
    wanted = through(CachedBatch(made("gemma3"), frozenset({END}), SAMPLING), questions(PROMPTS, 40))
    monkeypatch.setattr(decode, "AHEAD", 3)
    assert through(CachedBatch(made("gemma3"), frozenset({END}), SAMPLING), questions(PROMPTS, 40)) == wanted
    assert max(len(sample.ids) for sample in wanted) > 6


@pytest.mark.parametrize("kind", [CachedBatch, RereadBatch])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(kind, temperature, value):
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen2"]()).eval()
    with torch.no_grad():
        model.lm_head.weight[5] = value
    with pytest.raises(ValueError, match="logits are not finite; its weights have diverged"):
        through(kind(model, frozenset({END}), Sampling(temperature)), questions(PROMPTS))


# --- the loop ------------------------------------------------------------------------------------------------------------

class Steps:
    "Time that passes with decoding: a tool may last so many decode steps. Where nothing decodes, the next one answers."

    def __init__(self):
        self.changed, self.left, self.idle, self.ended, self.count = threading.Condition(), {}, False, False, 0

    def tick(self, *_):
        with self.changed:
            self.count += 1
            self.left = {key: left - 1 for key, left in self.left.items()}
            self.changed.notify_all()

    def rest(self, idle):
        with self.changed:
            self.idle = idle
            self.changed.notify_all()

    def end(self):
        "Nothing is decoded any more: who sleeps wakes."
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def sleep(self, steps):
        key = object()
        with self.changed:
            self.left[key] = steps
            over = self.changed.wait_for(
                lambda: self.ended or self.left[key] <= 0 or self.idle and self.left[key] == min(self.left.values()), LIMIT)
            del self.left[key]
            self.changed.notify_all()
        assert over, "nothing was decoded meanwhile"


class Paced:
    "Answers whatever is called, as late as the row's `pace` says, and scores as late as its `score` says."

    tools = ({"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {
        "type": "object", "properties": {}}}},)

    def reset(self, pace=None, score=None, **row):
        self.row, self.pace, self.calls, self.closed = row, pace or (lambda row, call: None), 0, False
        self.score = score or (lambda row: None)

    def call(self, call):
        self.calls += 1
        self.pace(self.row, self.calls)
        assert not self.closed
        return ToolResult(f"{self.row['task_id']}: {'a file ' * (self.calls * self.row['size'] % 11)}")

    def reward(self, answer=""):
        self.score(self.row)
        assert not self.closed
        return self.calls + len(answer) / 1000

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def policy():
    return TransformersPolicy(embedded_model().double(), embedded_tokenizer())


@pytest.fixture
def steps(policy, monkeypatch):
    "Steps of the policy's model, which know when the loop waits for tools."
    steps, take = Steps(), Chains.take

    def resting(pool, least):
        steps.rest(least > 0)
        try:
            return take(pool, least)
        finally:
            steps.rest(False)

    monkeypatch.setattr(Chains, "take", resting)
    hook = policy.model.register_forward_hook(steps.tick)
    yield steps
    hook.remove()
    steps.end()


def rows_of(pace=None, score=None):
    return [{"prompt": "What is `red_port` in `config`?" + " Look." * (3 * i % 5), "task_id": f"etc{i}", "size": i, "pace": pace,
             "score": score} for i in range(6)]


def limits(**options):
    given = {"max_turns": 4, "max_tokens": 300, "max_turn_tokens": 50, "tool_timeout": LIMIT, "deterministic": False}
    return config(**given | options)


def parts(rollouts):
    return [(r.trace, r.prompt_ids, r.completion_ids, r.completion_mask, r.logprobs, r.ending, r.reward, r.problem)
            for r in rollouts]


@pytest.fixture(autouse=True)
def join_threads():
    "Wait for the test's own threads to end, those of tools that it lets go; done behind each test."
    others = set(threading.enumerate())  # those of tests before may hang

    def join():
        for thread in [t for t in threading.enumerate() if t.name == "tools" and t not in others]:
            thread.join(LIMIT)
            assert not thread.is_alive()

    yield join
    join()


@pytest.fixture(scope="module")
def one_by_one():
    policy = TransformersPolicy(embedded_model().double(), embedded_tokenizer())  # its steps are not counted by `steps`
    return cache(lambda seed: [parts(collect(policy, Paced, [row], limits(), seed))[0] for row in rows_of()])


def plainly(policy, row, seed, limit):
    "Ids that one episode samples, turn by turn: no cache, no batch, no threads."
    model, chat, environment = policy.model, policy.chat, Paced()
    environment.reset(**row)
    trace = Trace(f"{row['task_id']}-0", (Turn("user", row["prompt"]),), environment.tools)
    ids, said, completion, called = [], [], 0, 0
    for turn in range(limit.max_turns):
        context = context_ids(chat, trace)
        ids += context
        completion += len(context) if turn else 0
        numbers, new = Numbers(f"{seed}/{trace.trace_id}/{turn}"), []
        most = min(limit.max_turn_tokens, limit.max_tokens - completion)
        while len(new) < most and not set(new) & policy.stops:
            with torch.no_grad():
                logits = model(torch.tensor([ids + new])).logits[0, -1]
            share = (logits.float() / limit.temperature).softmax(-1).double().cumsum(0)
            new.append(int((share < numbers[len(new)] * share[-1]).sum()))
        ids, completion = ids + new, completion + len(new)
        said.append(tuple(new))
        sample = Sample(tuple(new), (0.0,) * len(new), new[-1] not in policy.stops)
        parsed = TurnReader.of(chat, True).read(sample.ids, policy.stops, context, sample.cut, environment.tools)
        form = turn_forms(parsed, sample, called)[0]
        called += len(form.tool_calls)
        trace = Trace(trace.trace_id, (*trace.turns, form, *(environment.call(c).turn(c) for c in form.tool_calls)), trace.tools)
        if not form.tool_calls:
            break
    return said


def test_episodes_are_those_of_a_plain_loop(policy, one_by_one):
    played = collect(policy, Paced, rows_of(), limits(places=3), 0)
    assert [[t.token_ids for t in r.trace.turns if t.role == "assistant"] for r in played[:3]] == [
        plainly(policy, row, 0, limits()) for row in rows_of()[:3]]
    assert parts(played) == one_by_one(0)


def test_neither_places_nor_the_order_of_rows_change_an_episode(policy, one_by_one):
    order = [3, 0, 5, 2, 4, 1]
    played = parts(collect(policy, Paced, [rows_of()[i] for i in order], limits(places=2), 2))
    assert played == [one_by_one(2)[i] for i in order]


def test_no_row_waits_for_another(policy, steps, one_by_one, monkeypatch):
    "A row takes its own tokens' steps, and at most nine more a turn until it is read with others; an ended row's place is taken."
    seen, forward = [], CachedBatch._next
    monkeypatch.setattr(CachedBatch, "_next", lambda batch, rows: seen.append(len(batch.rows)) or forward(batch, rows))
    turns = [[len(t.token_ids) for t in trace.turns if t.role == "assistant"] for trace, *_ in one_by_one(0)]
    own = [sum(row) + 9 * len(row) for row in turns]
    together = sum(max(row[turn] for row in turns if len(row) > turn) for turn in range(4))
    assert max(own) < together  # else nothing is tested
    for places, most in ((6, max(own)), (2, sum(own) / 2 + max(own))):
        steps.count = 0
        del seen[:]
        collect(policy, Paced, rows_of(), limits(places=places, deterministic=True), 0)
        assert steps.count <= most and max(seen) == places


def test_environments_are_made_when_their_episode_gets_a_place_and_closed_when_it_is_scored(policy):
    made, most = [], []

    class Counted(Paced):
        def __init__(self):
            made.append(self)
            self.closed = False
            most.append(sum(not e.closed for e in made))

    ended = []
    played = collect(policy, Counted, rows_of(), limits(places=2), 0, each=lambda rollout: ended.append(rollout.trace.trace_id))
    assert max(most) <= 4 and len(made) == 6 and all(e.closed for e in made)
    assert sorted(ended) == [r.trace.trace_id for r in played]


def test_deterministic_episodes_are_equal_bit_for_bit_whenever_tools_answer(steps):
    "In float32, where the rows that decode beside a row change its log-probabilities."
    policy, found = TransformersPolicy(embedded_model(), embedded_tokenizer()), []
    for order in range(3):
        def pace(row, call="reward", order=order):
            time.sleep(random.Random(f"{order}/{row['task_id']}/{call}").choice((0, 0.002, 0.01)))

        found.append(parts(collect(policy, Paced, rows_of(pace, pace), limits(places=4, deterministic=True), 3)))
    assert found[0] == found[1] == found[2]


@settings(max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3), st.integers(0, 2**30), st.sampled_from((1, 2, 8)), st.booleans())
def test_the_order_in_which_tools_answer_and_rewards_end_changes_nothing(policy, steps, one_by_one, seed, order, workers, wait):
    busy, most = [], []

    def pace(row, call="reward"):
        busy.append(row["size"])
        most.append(len(busy))
        steps.sleep(random.Random(f"{order}/{row['task_id']}/{call}").choice((0, 0, 2, 5, 20, 60)))
        busy.remove(row["size"])

    played = parts(collect(policy, Paced, rows_of(pace, pace), limits(tool_workers=workers, deterministic=wait), seed))
    assert played == one_by_one(seed) and None not in [reward for *_, reward, _ in played]
    assert max(most) <= workers
    assert sum(t.role == "tool" for trace, *_ in played for t in trace.turns) > 8  # else nothing was tested


def test_rows_decode_while_a_tool_works(policy, steps):
    "A tool that lasts some decode steps ends only where others decode: turn by turn it would reach its limit."
    first, between = threading.Lock(), []

    def pace(row, call):
        if first.acquire(blocking=False):
            with steps.changed:
                start = steps.count
                between.append(steps.changed.wait_for(lambda: steps.count >= start + 15, LIMIT))

    played = collect(policy, Paced, rows_of(pace), limits(), 0)
    assert between == [True] and all(r.problem == "" for r in played)


def first_to_end(played):
    "Rows that end first, without a call and so at a known step, and that step; no other row ends before it."
    tokens = [sum(mask) for *_, mask, _, _, _, _ in played]
    calls = [sum(t.role == "tool" for t in trace.turns) for trace, *_ in played]
    rows = [i for i in range(len(played)) if tokens[i] == min(tokens) and not calls[i]]
    assert rows and sorted(tokens)[len(rows)] > min(tokens) + 20  # else nothing is tested
    return rows, min(tokens)


def test_a_reward_starts_when_its_episode_ends_and_the_others_decode_on(policy, steps, one_by_one):
    "At the token that ends the row decoding waits for the reward to begin, and the reward for the others' tokens to come."
    (row,), end = first_to_end(one_by_one(0))
    begun, on, waited = threading.Event(), threading.Event(), []

    def score(of):
        if of["size"] == row:
            begun.set()
            waited.append(on.wait(LIMIT))

    def stop():
        if steps.count == end:
            waited.append(begun.wait(LIMIT))
        if steps.count == end + 20:
            on.set()

    played = collect(policy, Paced, rows_of(score=score), limits(deterministic=True), 0, stop=stop)
    assert waited == [True, True] and parts(played) == one_by_one(0)


@pytest.mark.parametrize("wait", [False, True])
def test_a_reward_that_fails_or_hangs_ends_its_own_row_only(policy, one_by_one, caplog, wait):
    gate = threading.Event()
    (hung,), _ = first_to_end(one_by_one(0))
    odd, raises = [row for row in range(6) if row != hung][-2:]

    def score(row):
        if row["size"] == hung:
            gate.wait(LIMIT)
        elif row["size"] == raises:
            raise SystemExit("no room")

    class Odd(Paced):
        def reward(self, answer=""):
            value = super().reward(answer)
            return "much" if self.row["size"] == odd else value

    played = collect(policy, Odd, rows_of(score=score), limits(deterministic=wait, tool_timeout=2.0), 0)
    gate.set()
    wanted = {hung: ("timeout", "reward gave no answer within 2 seconds"), raises: ("error", "reward raised SystemExit: no room"),
              odd: ("error", "reward gave 'much', which is no number; return a finite one, or None where nothing is scored")}
    assert {i: (played[i].ending, played[i].problem) for i in wanted} == wanted
    assert [played[i].reward for i in wanted] == [None] * 3 and played[hung].seconds["tools"] >= 2.0
    assert [r.trace.turns for r in played] == [trace.turns for trace, *_ in one_by_one(0)]
    others = [i for i in range(6) if i not in wanted]
    assert [parts(played)[i] for i in others] == [one_by_one(0)[i] for i in others]
    assert sorted(m for m in caplog.messages if "reward" in m) == [
        f"rollout etc{i}-0 ended with {ending}: {problem}" for i, (ending, problem) in sorted(wanted.items())]


@pytest.mark.parametrize("wait", [False, True])
def test_a_hanging_tool_ends_its_own_row_only(policy, one_by_one, wait):
    gate = threading.Event()
    hung = next(i for i, (trace, *_) in enumerate(one_by_one(0)) if any(t.role == "tool" for t in trace.turns))
    pace = lambda row, call: gate.wait(LIMIT) if row["size"] == hung else None
    played = collect(policy, Paced, rows_of(pace), limits(deterministic=wait, tool_timeout=2.0), 0)
    gate.set()
    assert (played[hung].ending, played[hung].reward) == ("timeout", 0.0)
    assert "within 2 seconds, and earns 0" in played[hung].problem
    assert played[hung].trace.turns[-1].fail_reason == "runtime_error" and played[hung].seconds["tools"] >= 2.0
    assert [p for i, p in enumerate(parts(played)) if i != hung] == [p for i, p in enumerate(one_by_one(0)) if i != hung]


def test_to_stop_waits_for_calls_under_way_and_keeps_whole_turns(policy, steps, one_by_one):
    "Asked at every token; a turn half sampled is dropped, and no environment is closed while its tool works (see `Paced`)."
    pace = lambda row, call: steps.sleep(40)
    played = collect(policy, Paced, rows_of(pace), limits(), 0, stop=lambda: steps.count >= 60)
    assert steps.count == 60 and {"stopped"} <= {r.ending for r in played}
    for rollout, (trace, _, ids, *_) in zip(played, one_by_one(0)):
        turns = rollout.trace.turns
        assert turns == trace.turns[:len(turns)] and rollout.completion_ids == ids[:len(rollout.completion_ids)]
        assert not rollout.completion_mask or rollout.completion_mask[-1] == 1
        assert rollout.ending != "stopped" or turns[-1].role in ("user", "tool")
    assert any(r.ending == "stopped" and r.trace.turns[-1].role == "tool" for r in played)


def test_to_wait_takes_no_turns_of_the_loop(policy, steps):
    "One row: whenever its tool works nothing decodes, and the loop goes round once a token; then for reward and closing."
    asked = []
    pace = lambda row, call: time.sleep(0.05)
    collect(policy, Paced, rows_of(pace)[:1], limits(), 0, stop=lambda: asked.append(0))
    assert steps.count <= len(asked) <= steps.count + 3


@pytest.mark.parametrize("what", ["call", "reward"])
@pytest.mark.parametrize("wait", [False, True])
def test_ctrl_c_while_waiting_begins_no_further_call_or_reward(policy, join_threads, monkeypatch, wait, what):
    "The signal comes while the main thread sleeps in `take`: it has asked how long, and its lock is free."
    gate, begun, asked, patience, until = threading.Event(), [], [], Chains._patience, time.monotonic() + LIMIT
    waiting = lambda pool: bool(pool.waiting if what == "call" else pool.later)
    monkeypatch.setattr(Chains, "_patience", lambda pool: asked.append((pool, waiting(pool))) or patience(pool))

    def pace(row, call=None):
        begun.append(row["size"])
        if len(begun) == 1:
            while not (asked and asked[-1][1] and waiting(asked[-1][0])) and time.monotonic() < until:  # the resets' until then
                time.sleep(0.001)
            with asked[-1][0].changed:
                pass
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        gate.wait(LIMIT)

    rows = rows_of(*[pace] if what == "call" else [None, pace])[:1] * 4  # four that call and end as one, and one worker
    with pytest.raises(KeyboardInterrupt):
        collect(policy, Paced, rows, limits(deterministic=wait, tool_workers=1, temperature=0), 0)
    gate.set()
    join_threads()
    assert len(begun) == 1


def test_ctrl_c_while_decoding_comes_through(policy, steps):
    "Struck while a tool works, which ends later."
    begun, struck = threading.Event(), threading.Event()

    def pace(row, call):
        begun.set()
        struck.wait(LIMIT)
        steps.sleep(3)

    def stop():
        if begun.is_set():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        collect(policy, Paced, rows_of(pace), limits(), 0, stop=stop)
    struck.set()


@pytest.mark.parametrize("at", ["start", "take"])
def test_ctrl_c_in_the_instant_of_taking_the_lock_leaves_no_thread(join_threads, at):
    "Between the lock and the block that would let it go."
    class Struck(threading.Condition):
        armed = False

        def __enter__(self):
            taken = super().__enter__()
            if self.armed and threading.current_thread() is threading.main_thread():
                self.armed = False
                raise KeyboardInterrupt
            return taken

    chains, begun, gate = Chains(workers=1, limit=LIMIT), threading.Event(), threading.Event()
    chains.changed = Struck()
    with pytest.raises(KeyboardInterrupt), chains:
        chains.start("works", [lambda: begun.set() or gate.wait(LIMIT), lambda: 1])
        assert begun.wait(LIMIT)
        chains.changed.armed = True
        chains.start("next", [lambda: 2]) if at == "start" else chains.take(1)
    gate.set()
    join_threads()


def test_an_error_of_the_loop_waits_for_rewards_before_it_closes_environments(policy, monkeypatch):
    "A reward ends once the loop, which has failed, waits for the pool that runs it."
    begun, failed, awaited, closed, patience = threading.Event(), threading.Event(), threading.Event(), [], Chains._patience

    def asked(pool):
        if failed.is_set() and any(isinstance(chain.owner, tuple) and chain.owner[0] == "reward" for chain in pool.running):
            awaited.set()
        return patience(pool)

    class Watched(Paced):
        def reward(self, answer=""):
            begun.set()
            awaited.wait(LIMIT)
            closed.append(self.closed)

    def stop():
        if begun.is_set():
            failed.set()
            raise RuntimeError("no room")

    monkeypatch.setattr(Chains, "_patience", asked)
    with pytest.raises(RuntimeError, match="no room"):
        collect(policy, Watched, rows_of(), limits(), 0, stop=stop)
    assert closed and not any(closed)


def test_to_stop_scores_what_had_ended(policy, steps, one_by_one):
    "A reward that is under way, and those that wait for a thread."
    rows, end = first_to_end(one_by_one(1))
    played = collect(policy, Paced, rows_of(score=lambda row: steps.sleep(10**6)), limits(deterministic=True, tool_workers=1), 1,
                     stop=lambda: steps.count == end)
    assert len(rows) == 3 and [i for i, r in enumerate(played) if r.ending != "stopped"] == rows
    assert [r.reward for r in played] == [reward if i in rows else None for i, (*_, reward, _) in enumerate(one_by_one(1))]


def test_a_call_goes_before_rewards_that_wait(policy, steps, one_by_one, monkeypatch):
    "One worker: the first of three rewards ends once another row has called."
    rows, end = first_to_end(one_by_one(1))
    order, begun, called, start = [], threading.Event(), threading.Event(), Chains.start

    def starting(pool, owner, steps, later=False, **more):
        start(pool, owner, steps, later, **more)
        if begun.is_set() and not later:
            called.set()

    def score(row):
        order.append("reward")
        begun.set()
        called.wait(LIMIT)

    monkeypatch.setattr(Chains, "start", starting)
    collect(policy, Paced, rows_of(lambda row, call: order.append("call"), score), limits(deterministic=True, tool_workers=1), 1,
            stop=lambda: steps.count == end and not begun.wait(LIMIT))
    assert len(rows) == 3 and called.is_set() and order[order.index("reward") + 1] == "call"


def test_rewards_leave_a_thread_to_calls_until_all_are_waited_for():
    begun, gate, both = threading.Semaphore(0), threading.Event(), threading.Barrier(2)

    def reward():
        begun.release()
        gate.wait(LIMIT)
        both.wait(LIMIT)  # the second begins beside the first

    with Chains(workers=2, limit=LIMIT) as chains:
        for name in ("reward 1", "reward 2"):
            chains.start(name, [reward], later=True)
        assert begun.acquire(timeout=LIMIT)
        chains.start("call", [lambda: None])
        assert [owner for owner, _ in chains.take(1)] == ["call"] and len(chains.later) == 1
        gate.set()
        ended = chains.take(math.inf)
    assert [(step.raised, step.late) for _, (step,) in ended] == [(None, False)] * 2


def test_late_chains_are_given_up_by_who_does_not_wait():
    gate, taken, until = threading.Event(), [], time.monotonic() + LIMIT
    with Chains(workers=1, limit=2.0) as chains:
        chains.start("hangs", [gate.wait, lambda: 1])
        chains.start("next", [lambda: 2])
        while len(taken) < 2 and time.monotonic() < until:
            taken += chains.take(0)
            time.sleep(0.01)
    gate.set()
    assert [(owner, [(d.value, d.late) for d in done]) for owner, done in taken] == [
        ("hangs", [(None, True)]), ("next", [(2, False)])]


def test_shares_of_generating_make_up_the_time_of_sampling(policy, monkeypatch):
    inside, step = [], TokenTurns.step

    def timed(turns):
        start = time.monotonic()
        ended = step(turns)
        inside.append(time.monotonic() - start)
        return ended

    monkeypatch.setattr(TokenTurns, "step", timed)
    start = time.monotonic()
    played = collect(policy, Paced, rows_of(), limits(), 0)
    shares = [r.seconds["generate"] for r in played]
    assert min(shares) > 0 and sum(inside) <= sum(shares) + 1e-6 and sum(shares) <= time.monotonic() - start


def test_other_policies():
    tokenizer = embedded_tokenizer()
    lines = [tokenizer.encode(text + "<|end|>") for text in ('<|call|>{"name": "ls", "arguments": {}}', "Done.")]
    opening, batches = tokenizer.encode("<|assistant|>", add_special_tokens=False)[0], []

    def generate(ids, sampling, limits, seeds):
        batches.append(len(ids))
        made = [lines[row.count(opening) - 1] for row in ids]
        return made, [[-0.5] * len(m) for m in made]

    played = collect(CallablePolicy(generate, tokenizer), Paced, rows_of(), limits())
    assert batches == [6, 6] and [r.ending for r in played] == ["done"] * 6

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id)).eval()
    rereads = TransformersPolicy(model, tokenizer)
    with rereads.batch(Sampling()) as batch:
        assert isinstance(batch, RereadBatch)
    short = dict(max_turns=2, max_turn_tokens=6)
    one, two = (parts(collect(rereads, Paced, rows_of()[:2], limits(deterministic=o, **short))) for o in (False, True))
    assert one == two
