"Pairs made ready for training: every step against its definition, and the result in `trl.DPOTrainer` and our collator."
import copy
import json
import math
import random
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Trace, TraceProblem, Turn
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.replay.clean import (
    LEAK,
    RUN,
    TAIL,
    WIDTH,
    drop_contradictions,
    drop_duplicates,
    drop_held_out,
    drop_long,
    drop_near_duplicates,
    drop_unrendered,
    near_copies,
    normalise_pairs,
)
from composer_replication.replay.examples import (
    PreferenceExample,
    place_pairs,
    read_pairs,
    to_preference_dataset,
    write_pairs,
)
from composer_replication.replay.pairs import DPOPair, sibling_pairs
from composer_replication.replay.teachers import TraceState
from composer_replication.traces.siblings import SiblingIndex, action_key

TOOL = {"type": "function", "function": {"name": "do", "description": "Does it.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}


def act(number, words="", **more):
    return Turn("assistant", words, tool_calls=(ToolCall("do", {"n": number} | more, f"call_{number}"),))


def example(state, chosen, rejected, trace_id="t", tools=(TOOL,), task_id=None):
    "A pair in a state of one message, or of several."
    turns = tuple(state) if isinstance(state, list) else (Turn("user", state),)
    pair = DPOPair(trace_id, len(turns), chosen, rejected, "majority:2/3", (2, 0, 1), ("a", "b"))
    return PreferenceExample(pair, TraceState(trace_id, turns, tools), task_id)


@pytest.fixture(scope="module")
def demo():
    "Pairs of the shipped traces, and the traces."
    traces = toy_traces()
    index = SiblingIndex(traces)
    return [p for t in traces for p in sibling_pairs(t, index)], traces


@pytest.fixture(scope="module")
def placed(demo):
    return place_pairs(*demo)


# Copies and contradictions

@pytest.mark.parametrize("seed", range(20))
def test_copies_and_contradictions_by_their_definition(seed):
    rng = random.Random(seed)
    made = []
    for i in range(60):
        a, b = rng.sample(range(3), 2)
        say = lambda n: act(n, rng.choice(["", "Now."]), **({"why": rng.choice(["so it is", " so  it is"])} if n == 2 else {}))
        made.append(example(rng.choice("xyz"), say(a), say(b), f"t{i}", rng.choice([(TOOL,), ()])))
    facts = [(e.state.turns[0].content, bool(e.state.tools), e.pair.chosen.tool_calls[0].arguments["n"],
              e.pair.rejected.tool_calls[0].arguments["n"]) for e in made]
    kept, drops = drop_duplicates(made)
    wanted = [e for i, e in enumerate(made) if facts[i] not in facts[:i]]
    assert kept == wanted and [d.pair for d in drops] == [e.pair for i, e in enumerate(made) if facts[i] in facts[:i]]
    for d in drops:
        at = int(d.pair.trace_id[1:])
        assert d.reason == f"the same as turn 1 of t{facts.index(facts[at])}"
    kept, drops = drop_contradictions(made)
    turned = [(s, t, r, c) in facts for s, t, c, r in facts]
    assert kept == [e for e, out in zip(made, turned) if not out] and len(drops) == sum(turned) and 0 < sum(turned)
    twice, _ = drop_duplicates(made + made)
    assert twice == wanted


# Near copies

def brute(sets, threshold):
    "Every set against every earlier one that was kept."
    found = []
    for i, one in enumerate(sets):
        like = ((j, len(one & sets[j]) / len(one | sets[j])) for j in range(i) if found[j] is None and one and sets[j])
        found.append(next((f for f in like if f[1] >= threshold), None))
    return found


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_near_copies_are_those_of_brute_force(threshold):
    copies = 0
    for seed in range(25):
        rng = random.Random(seed)
        words, sets = rng.choice([6, 30, 400]), []
        for _ in range(80):
            new = {rng.randrange(words) for _ in range(rng.randrange(rng.choice([3, 12, 40])))}
            if sets and rng.random() < 0.6:  # something like an earlier one
                new = set(rng.choice(sets))
                for _ in range(rng.randrange(4)):
                    new ^= {rng.randrange(words)}
            sets.append(new)
        wanted = brute(sets, threshold)
        assert near_copies([np.array(sorted(s), np.uint64) for s in sets], threshold) == wanted
        copies += sum(w is not None for w in wanted)
    assert copies > 100
    assert near_copies([], 0.5) == []


def test_other_actions_after_one_long_state_are_no_copies():
    turns = (Turn("user", " ".join(f"word{i}" for i in range(90))),)
    act = lambda name: Turn("assistant", tool_calls=(ToolCall("cancel", {"id": name}),))
    pairs = [PreferenceExample(DPOPair("t", 1, act(a), act(b), "x"), TraceState("t", turns)) for a, b in ("AB", "CD", "BC")]
    assert drop_near_duplicates(pairs) == (pairs, [])


@pytest.mark.parametrize("said", ["", "[]", " , ", "word"])
def test_a_pair_without_a_word_is_compared_too(said):
    "What is compared is words; brackets and commas are none."
    one, other = Turn("assistant", "{}"), Turn("assistant", said)
    bare = [PreferenceExample(DPOPair(name, 1, one, other, "x"), TraceState(name, (Turn("user", said),))) for name in "ab"]
    assert len(drop_near_duplicates(bare[:1])[0]) == 1 and len(drop_near_duplicates(bare)[0]) in (1, 2)


def test_pairs_are_near_as_their_words_are(placed):
    "Runs of words as tuples, each part by itself."
    def words(texts):
        return [w for text in texts for w in re.findall(r"""\w+|[^\w\s"',{}\[\]:]""", text)]

    def texts(turn):
        return [turn.content, *(f"{c.name} {json.dumps(c.arguments) if c.parsed else c.arguments}" for c in turn.tool_calls)]

    def runs(part, said):
        width = min(WIDTH, len(said))
        return {(part, *said[i:i + width]) for i in range(len(said) - width + 1)} if said else set()

    def weighed(example):  # a short action weighs as much as a long state
        parts = [words([t for turn in example.state.turns[-2:] for t in texts(turn)])[-TAIL:],
                 words(texts(example.pair.chosen)), words(texts(example.pair.rejected))]
        longest = max(map(len, parts))
        return {(again, *run) for part, said in enumerate(parts) for again in range(math.ceil(longest / max(1, len(said))))
                for run in runs(part, said)}

    sets = [weighed(e) for e in placed]
    for threshold in (0.5, 0.9):
        wanted = brute(sets, threshold)
        kept, drops = drop_near_duplicates(placed, threshold)
        assert kept == [e for e, w in zip(placed, wanted) if w is None] and drops
        assert [d.reason for d in drops] == [f"{w[1]:.0%} the same as {placed[w[0]].name}" for w in wanted if w]


def test_a_pair_is_not_near_its_reverse_and_a_number_matters():
    long = " ".join(f"word{i}" for i in range(60))
    pair = example(long, act(1), act(2))
    others = [example(long, act(2), act(1), "u"), example(long, Turn("assistant", "It is 4 I am sure"), act(2), "v"),
              example(long, Turn("assistant", "It is 5 I am sure"), act(2), "w")]
    assert drop_near_duplicates([pair, *others], 0.97)[1] == []
    end = " ".join(f"end{i}" for i in range(TAIL))  # only the end of a state is compared
    states = {"t": f"{long} {end}", "u": f"{end} {end}", "v": end}
    near = [example(said, act(1), act(2), trace_id) for trace_id, said in states.items()]
    assert [d.pair.trace_id for d in drop_near_duplicates(near, 1.0)[1]] == ["u", "v"]
    with pytest.raises(ValueError, match="near=1.5 is no share"):
        drop_near_duplicates(near, 1.5)


# Held out

SECRET = "Please find the invoice of Mrs Adler from March and tell me what she paid for the two chairs and the long table"
SHARED = "You are a careful clerk. Use the tools. Never guess. Answer with one number and nothing else, and then stop at once. "


@pytest.mark.parametrize("part", [0.0, 0.3, 0.45, 0.55, 0.8, 1.0])
def test_a_held_out_prompt_is_found_by_the_share_of_its_runs(part):
    words = SECRET.split()
    shown = " ".join(words[:round(part * len(words))])
    grams = lambda text: {tuple(text.lower().split()[i:i + RUN]) for i in range(len(text.split()) - RUN + 1)}
    share = len(grams(SECRET) & grams(shown)) / len(grams(SECRET))
    for where in (example(shown or "x", act(1), act(2)), example("x", Turn("assistant", shown.upper() or "x"), act(2)),
                  example([Turn("user", "x"), Turn("assistant", tool_calls=(ToolCall("do", {"note": shown}),)),
                           Turn("tool", "y")],
                          act(1), act(2))):
        kept, drops = drop_held_out([where],
                                    {"adler": SECRET, "other": "The quick brown fox jumps over the lazy dog again and again"})
        assert bool(drops) == (share >= LEAK)
        if drops:
            assert drops[0].reason == f"it holds {share:.0%} of the held-out task adler"


@pytest.mark.parametrize("secret", [
    SECRET, SECRET.replace("March and", "March,\nand"),
    "def total(prices):\n    whole = 0\n    for price in prices:\n        whole += price * 3\n    return whole\n",
    "Bitte prüfe, ob die größere Übersicht für Österreich schon fünf Einträge hätte, und lösche die übrigen"])
def test_a_held_out_prompt_in_a_calls_arguments_is_found_as_in_a_message(secret):
    def drops(turn):
        one = example([Turn("user", "x"), turn, Turn("tool", "y")], act(1), act(2))
        return [drop.reason for drop in drop_held_out([one], {"held": secret})[1]]

    told = drops(Turn("assistant", secret))
    nested = Turn("assistant", tool_calls=(ToolCall("do", {"path": "a.py", "edits": [{"new": secret}]}),))
    assert told == drops(nested) != []


def test_a_held_out_prompt_that_another_begins_with_is_found_all_the_same():
    held = {"a": SECRET, "b": SECRET + " and whether the carpenter was paid for the third chair as well"}
    [drop] = drop_held_out([example(SECRET, act(1), act(2))], held)[1]
    assert "100% of the held-out task a" in drop.reason


def test_boilerplate_proves_nothing_and_short_prompts_count_whole():
    held = {f"h{i}": SHARED + f"Task: {' '.join(f'w{i}x{j}' for j in range(12))}" for i in range(4)}
    kept, drops = drop_held_out([example(SHARED + "Task: something else", act(1), act(2)), example(held["h2"], act(1), act(2))],
                                held)
    assert len(kept) == 1 and drops[0].reason == "it holds 100% of the held-out task h2"
    assert drop_held_out([example(held["h0"], act(1), act(2))],
                         {"a": held["h0"], "b": held["h0"]})[1]  # twice the same is no boilerplate
    variants = held | {"v": SECRET, "w": SECRET + " today"}  # two of six share it, which is no boilerplate either
    [drop] = drop_held_out([example(SECRET, act(1), act(2))], variants)[1]
    assert drop.reason == "it holds 100% of the held-out task v"
    short = {"s": "What is 17 + 4?"}
    said = ["So: what is 17 + 4? Tell me.", "What is 17 - 4?", "What is 17 + 40?", "what is 117 + 4?"]
    assert [bool(drop_held_out([example(t, act(1), act(2))], short)[1]) for t in said] == [True, False, False, False]
    by_id = drop_held_out([example("x", act(1), act(2), task_id="s"), example("x", act(1), act(2))], {"s": ""})
    assert len(by_id[0]) == 1 and by_id[1][0].reason == "its task s is held out"


# Template and length

def test_what_the_template_cannot_carry_goes_with_its_reason():
    tokenizer = embedded_tokenizer()
    good = example("x", act(1), Turn("assistant", tool_calls=(ToolCall("do", '{"n": '),)))
    assert drop_unrendered([good], tokenizer)[1] == []
    silent = [("{{ '\\n' + f.name + '(' }}", "{{ '\\n(' }}", "the chat template drops the tool do"),
              ("{{ message.content or '' }}", "", "the chat template drops part of the rejected action"),
              ("{{ (message.content or '') + '<|end|>' }}", "{{ '<|end|>' }}",
               "the chat template drops the user message at turn 0"),
              ("{%- if add_generation_prompt -%}", "{%- if add_generation_prompt -%}{{ 'Now: ' }}",
               "the chat template renders the state differently before the chosen action"),
              ("{{ '<|' + message.role + '|>' }}", "{{ raise_exception('no talking') }}",
               "the chat template does not render it (no talking)"),
              ("f.arguments if f.arguments is string", "f.arguments | tojson if f.arguments is string",
               "the chat template drops part of the rejected action")]
    whole = tokenizer.chat_template
    for old, new, reason in silent:
        assert old in whole
        tokenizer.chat_template = whole.replace(old, new)
        tested = good if "rejected" not in reason or "arguments" in old else replace(good,
                                                                                     pair=replace(good.pair,
                                                                                                  rejected=Turn("assistant",
                                                                                                                "No.")))
        assert [d.reason for d in drop_unrendered([tested], tokenizer)[1]] == [reason]
    tokenizer.chat_template = whole
    half = drop_unrendered([example("half \ud800", act(1), act(2)), good, example("x", Turn("assistant", "\udc00"), act(2))],
                           tokenizer)
    assert len(half[0]) == 1 and [d.reason for d in half[1]] == ["it holds half a surrogate pair, which has no tokens"] * 2


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "phi-3-mini", "deepseek-r1-distill-qwen"])
def test_real_templates(name, shared_data, placed):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
    raw = lambda turns: any(not c.parsed for t in turns for c in t.tool_calls)
    beside = lambda turns: any(t.tool_calls and t.content for t in turns)
    lost = {"qwen3": lambda turns: False, "qwen2.5": raw, "llama3.1": lambda turns: raw(turns) or beside(turns)}
    plain = [replace(e, pair=replace(e.pair, chosen=replace(e.pair.chosen, content=""),
                                     rejected=replace(e.pair.rejected, content="")),
                     state=replace(e.state,
                                   turns=tuple(replace(t, content="" if t.tool_calls else t.content) for t in e.state.turns)))
             for e in placed[:8]]
    kept, drops = drop_unrendered([*placed[:8], *plain], tokenizer)
    if name in lost:  # writes arguments that do not parse as a string in JSON; leaves text beside a call out
        spoilt = [e.pair for e in (*placed[:8], *plain) if lost[name]((*e.state.turns, *e.actions))]
        assert [d.pair for d in drops] == spoilt and kept and all(re.match("the chat template drops", d.reason) for d in drops)
        for e in kept:
            row = e.row()
            whole = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tools=row["tools"],
                                                  return_dict=True)["input_ids"]
            assert len(whole) == e.lengths.prompt + e.lengths.chosen
    else:  # which drop tools without a word
        assert not kept and all(re.match("the chat template drops the (tool|assistant message|tool message)", d.reason)
                                for d in drops)


def test_length_is_that_of_the_longer_action(placed):
    rendered, _ = drop_unrendered(placed, embedded_tokenizer())
    rendered += drop_unrendered([example("x", act(1), Turn("assistant", "so " * 2000))], embedded_tokenizer())[0]
    totals = [e.lengths.prompt + max(e.lengths[1:]) for e in rendered]
    assert totals[-1] == max(totals) > 2000
    for limit in (0, min(totals), sorted(totals)[9], max(totals)):
        kept, drops = drop_long(rendered, limit)
        assert kept == [e for e, n in zip(rendered, totals) if n <= limit] and len(drops) == len(rendered) - len(kept)


# TRL

def test_one_step_of_trl_labels_exactly_the_actions(demo, tmp_path):
    import torch
    from trl import DPOConfig, DPOTrainer

    from composer_replication.envs.toy.model import embedded_model
    tokenizer, model = embedded_tokenizer(), embedded_model()
    made, report = normalise_pairs(place_pairs(*demo), tokenizer)
    made = made[:3] + [example([Turn("system", "Be brief."), Turn("user", "Hello?")], Turn("assistant", "Hi.", "Hmm."),
                               Turn("assistant", "What a day, dear friend!"), tools=())]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = DPOConfig(str(tmp_path), per_device_train_batch_size=4, max_steps=1, learning_rate=1e-3, report_to="none",
                       use_cpu=True,
                       max_length=None, save_strategy="no", disable_tqdm=True, bf16=False)
    reference = copy.deepcopy(model)  # TRL would look for one at the model's path, and this model has none
    trainer = DPOTrainer(model, reference, args=config, train_dataset=to_preference_dataset(made), processing_class=tokenizer)
    assert len(trainer.train_dataset) == len(made)
    rows = list(trainer.train_dataset)
    batch = trainer.data_collator(rows)
    for i, (e, row) in enumerate(zip(made, rows)):
        for side, at in (("chosen", i), ("rejected", i + len(made))):
            labelled = batch["input_ids"][at][batch["completion_mask"][at].bool()].tolist()
            assert tokenizer.decode(labelled) == said(getattr(e.pair, side)), (labelled, row)
            assert row["prompt_ids"] + labelled == batch["input_ids"][at][batch["attention_mask"][at].bool()].tolist()
        assert tokenizer.decode(row["prompt_ids"]).endswith("<|end|><|assistant|>")
        assert e.lengths in (None, (len(row["prompt_ids"]), len(row["chosen_ids"]), len(row["rejected_ids"])))
        assert all(t["function"]["name"] in tokenizer.decode(row["prompt_ids"]) for t in e.state.tools)
    done = trainer.train()
    assert done.training_loss == pytest.approx(np.log(2), abs=1e-3)  # model and reference are still the same
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def said(turn):
    "A turn in the words of the shipped template: typed by hand, without reasoning."
    written = [c.arguments if not c.parsed else json.dumps(c.arguments, ensure_ascii=False) for c in turn.tool_calls]
    calls = [f'<|call|>{{"name": "{c.name}", "arguments": {arguments}}}' for c, arguments in zip(turn.tool_calls, written)]
    return f"{turn.content}{''.join(calls)}<|end|>"


def thought(turn):
    return (f"<think>{turn.thinking}</think>" if turn.thinking else "") + said(turn)


# Our trainer

def test_our_collator_takes_every_pair(demo):
    from composer_replication.losses.batch import ComposerDataCollator, TraceExample
    pairs, traces = demo
    tokenizer = embedded_tokenizer()
    made, _ = normalise_pairs(place_pairs(pairs, traces), tokenizer)
    by_trace = {}
    for one in made:
        by_trace[one.pair.trace_id] = (*by_trace.get(one.pair.trace_id, ()), one.pair)
    collator = ComposerDataCollator(tokenizer)
    trees = [collator.tree(TraceExample(t, pairs=by_trace[t.trace_id])) for t in traces if t.trace_id in by_trace]
    assert collator.excluded == []
    sides = [(t.trace_id, b.turn, b.kind, tokenizer.decode(b.ids[b.start:])) for t in trees for b in t.branches if b.pair >= 0]
    wanted = [(p.trace_id, p.turn, k, thought(getattr(p, k))) for t in traces for p in by_trace.get(t.trace_id, ())
              for k in ("chosen", "rejected")]
    assert sides == wanted


# Files

CALM, LOUD = Turn("assistant", "calm"), Turn("assistant", "LOUD")


def strange():
    "Pairs whose values a table would spoil."
    raw = Turn("assistant", "\u2028é", tool_calls=(ToolCall("do", '{"n": ', "c"), ToolCall("do", {}, None)))
    history = [Turn("system", "S"), Turn("user", "u\n"), act(1, f=0.12345678901, deep={"a": [None, True]}),
               Turn("tool", "0", tool_call_id="call_1", name="do", observation=True), Turn("assistant", ""), Turn("user", "on")]
    return [example(history, raw, act(2, x={}), "a", task_id="k"),
            example("y", act(3, other=[1, "2"]), Turn("assistant", "text"), "b", ())]


@pytest.mark.parametrize("name", ["pairs.jsonl", "deep/er/pairs.jsonl.gz"])
def test_what_is_written_is_read(name, tmp_path, placed):
    made = [*strange(), *placed]
    assert write_pairs(made, tmp_path / name) == len(made)
    again = read_pairs(tmp_path / name)
    assert [e.row() for e in again] == [e.row() for e in made]
    assert [(e.state.key, e.task_id, replace(e.pair, chosen=CALM, rejected=LOUD)) for e in again] == [
        (e.state.key, e.task_id, replace(e.pair, chosen=CALM, rejected=LOUD)) for e in made]
    assert [[action_key(a) for a in e.actions] for e in again] == [[action_key(a) for a in e.actions] for e in made]
    write_pairs(again, tmp_path / "twice.jsonl")
    write_pairs(made, tmp_path / "once.jsonl")
    assert (tmp_path / "twice.jsonl").read_bytes() == (tmp_path / "once.jsonl").read_bytes()


def test_a_dataset_keeps_every_value(tmp_path):
    made = strange()
    for e, row in zip(made, to_preference_dataset(made)):
        assert {c: row[c] for c in ("prompt", "chosen", "rejected", "tools")} == e.row()
        origin = {n: getattr(e.pair, n) for n in ("trace_id", "turn", "source", "votes", "teachers")} | {"task_id": e.task_id}
        assert {n: tuple(row[n]) if isinstance(row[n], list) else row[n] for n in origin} == origin


def test_nothing_half_written(tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_pairs(strange(), path)
    before = path.read_bytes()

    def breaks():
        yield strange()[0]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        write_pairs(breaks(), path)
    with pytest.raises(TraceProblem, match="the pair at turn 1 of h cannot be written as JSON"):
        write_pairs([example("half \ud800", act(1), act(2), "h")], path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


@pytest.mark.parametrize("line, words", [
    (b"{}", "this is no pair of the form composer-pairs/1"), (b"[1]", "the line is a list"),
    (b'{"schema": "composer-pairs/1"', "the line is no JSON"),
    (b'{"schema": "composer-pairs/1", "prompt": 3}', "the message list is a int"), *(
        (json.dumps({"schema": "composer-pairs/1", "trace_id": "a", "turn": 1, "task_id": None, "source": "s", "tools": None,
                     "votes": [], "teachers": [], "prompt": [{"role": "user", "content": "x"}],
                     "chosen": [{"role": "assistant", "content": "y"}],
                     "rejected": [{"role": "assistant", "content": "z"}]} | spoilt).encode(), words) for spoilt, words in (
        ({"chosen": []}, "damaged"), ({"rejected": [{"role": "assistant", "content": "y"}]}, "are the same action"),
        ({"votes": None}, "damaged"), ({"turn": 2}, "stands beside the state at turn 1"), ({"prompt": []}, "holds no message"),
        ({"tools": 3}, "damaged"),
        ({"prompt": [{"role": "oracle", "content": ""}]}, "role 'oracle' is unknown"),
        ({"chosen": "y"}, "the message list is a str"),
        ({"rejected": [{"role": "user", "content": "z"}]}, "not the assistant's")))])
def test_a_damaged_line_is_named(line, words, tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_pairs(strange(), path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises((TraceProblem, InputProblem), match=rf"pairs.jsonl, line 3: .*{re.escape(words)}"):
        read_pairs(path)
    with pytest.raises(TraceProblem, match="No such file"):
        read_pairs(tmp_path / "none.jsonl")


# All of it

def test_the_report_adds_up(demo):
    pairs, traces = demo
    turned = replace(pairs[1], chosen=pairs[1].rejected, rejected=pairs[1].chosen)
    half = replace(pairs[2], chosen=Turn("assistant", "\ud800"))
    long = replace(pairs[3], chosen=Turn("assistant", "so " * 3000))
    held = {traces[-1].task_id: ""}
    given = place_pairs([*pairs, turned, half, long, pairs[0]], traces)
    made, report = normalise_pairs(given, embedded_tokenizer(), held, max_tokens=3000, near=0.85)
    assert report.given == len(pairs) + 4 == report.kept + len(report.drops) and report.kept == len(made)
    assert all(report.counts.values()) and sum(report.counts.values()) == len(report.drops)
    steps = [d.step for d in report.drops]
    assert steps == sorted(steps, key=list(report.counts).index)
    lengths = [(e.lengths.chosen, e.lengths.rejected) for e in made]
    chosen, rejected = map(np.array, zip(*lengths))
    assert str(report).endswith(
        f"chosen {np.median(chosen):g} tokens, rejected {np.median(rejected):g} (medians), "
        f"{np.exp(np.log(chosen / rejected).mean()):.2f} times as long, {(chosen > rejected).mean():.0%} longer")
    nothing, empty = normalise_pairs([], embedded_tokenizer())
    assert nothing == [] and empty.given == 0 and "0 of 0 pairs kept (nothing left out)" in str(empty)
    assert to_preference_dataset(nothing).num_rows == 0


def test_pairs_without_their_traces(demo):
    pairs, traces = demo
    one = Trace("one", (Turn("user", "x"), act(1), Turn("tool", "y"), act(2)))
    with pytest.raises(TraceProblem, match="the trace .* of the pair at turn .* is not among the 1 given"):
        place_pairs(pairs, [one])
    with pytest.raises(TraceProblem, match="turn 2 of one is no turn of the assistant"):
        place_pairs([DPOPair("one", 2, act(1), act(2), "s")], [one])
    with pytest.raises(TraceProblem, match="two traces are called one"):
        place_pairs([], [one, one])
    thought = replace(one, turns=tuple(replace(t, thinking="zqsecret") if t.role == "assistant" else t for t in one.turns))
    for a, b in product((act(3), thought.turns[3]), (act(4), replace(act(5), thinking="zqsecret"))):
        [e] = place_pairs([DPOPair("one", 3, a, b, "s")], [thought])
        assert "zqsecret" not in json.dumps(e.row())
