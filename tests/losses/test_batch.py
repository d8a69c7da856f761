"""The collator: alignment by index, reported exclusions, the shipped traces, and real ones."""
from collections import Counter
from dataclasses import replace

import pytest
import torch

from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.experiments.hint_score import repairs
from composer_replication.hints.layers import default_composite
from composer_replication.losses.batch import CollatorConfig, ComposerDataCollator, TraceExample, TraceTurn, check_by_index
from composer_replication.replay.pairs import DPOPair
from composer_replication.rollout.fork import find_forks
from composer_replication.traces.error_sites import SiteFinder
from composer_replication.traces.habits import repeated_call
from composer_replication.training.config import ComposerReplicationConfig
from composer_replication.tree.pack import pack_trees
from composer_replication.tree.recorded import recorded_parts
from composer_replication.tree.text import AlignmentError


def call(tool, thinking=None, **arguments):
    return Turn("assistant", "", thinking, (ToolCall(tool, arguments, "c"),))


def result(text, failed=False):
    return Turn("tool", text, tool_call_id="c", observation=True, failed=failed)


def tool(name):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}


TRACE = Trace("notes", (
    Turn("user", "How many lines has notes.txt?"), call("list_files", "First, what is there?"), result("notes.txt"),
    call("line_count", "Now count.", path="notes.txt"), result("Error: unknown tool line_count", True),
    call("read_file", path="notes.txt"), result("a\nb\n"), Turn("assistant", "Two.")),
    tools=(tool("list_files"), tool("read_file")))
PAIR = DPOPair("notes", 3, TRACE.turns[5], TRACE.turns[3], "sibling:error:other")
HINT = TraceTurn(3, "Only list_files and read_file exist.", "template")
EXAMPLE = TraceExample(TRACE, (HINT,), (PAIR,))


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.mark.parametrize("placement", ("target", "start"))
def test_both_sides_read_back_the_error_turn(tokenizer, placement):
    batch = ComposerDataCollator(tokenizer, CollatorConfig(placement=placement))([TraceExample(TRACE), EXAMPLE])
    assert (batch.sites, batch.pairs) == (1, 1) and set(batch.sdpo_student[:, 0].tolist()) == {1}
    (r, s), (q, t) = batch.sdpo_student.T, batch.sdpo_teacher.T
    assert batch.input_ids[r, s + 1].tolist() == batch.branch_ids[q, t + 1].tolist() == batch.sdpo_labels.tolist()
    assert "line_count" in tokenizer.decode(batch.sdpo_labels) and "Now count." in tokenizer.decode(batch.sdpo_labels)
    whole = tokenizer.decode(batch.input_ids[1])
    assert HINT.hint not in whole  # the student never sees the hint
    seen_by_teacher = tokenizer.decode(batch.branch_ids[1, :batch.sdpo_teacher[-1, 1] + 1])
    assert HINT.hint in seen_by_teacher
    tree = batch.trees[1]  # the hint enters right before the error turn, or before anything was said
    assert (tree.branches[0].fork < tree.span(1).start) == (placement == "start")


def test_a_batch_whose_tokens_are_not_their_labels_is_refused(tokenizer):
    batch = ComposerDataCollator(tokenizer)([EXAMPLE])
    check_by_index(batch)
    for name in ("sdpo_student", "sdpo_teacher", "pair_positions"):
        moved = getattr(batch, name) - torch.tensor([0, 1])
        with pytest.raises(AlignmentError, match="'notes'.*build the batch"):
            check_by_index(replace(batch, **{name: moved}))


def test_a_packer_that_misaligns_is_caught(tokenizer, monkeypatch):
    def shifted(trees, pad):
        batch = pack_trees(trees, pad)
        return replace(batch, sdpo_teacher=batch.sdpo_teacher - torch.tensor([0, 1]))
    monkeypatch.setattr("composer_replication.losses.batch.pack_trees", shifted)
    with pytest.raises(AlignmentError):
        ComposerDataCollator(tokenizer)([EXAMPLE])


def test_thinking_is_kept_by_default_and_can_be_left_out(tokenizer):
    kept = ComposerDataCollator(tokenizer)([EXAMPLE])
    stripped = ComposerDataCollator(tokenizer, CollatorConfig(strip_thinking=True))([EXAMPLE])
    assert "Now count." in tokenizer.decode(kept.sdpo_labels) and "Now count." not in tokenizer.decode(stripped.sdpo_labels)
    assert stripped.completion_mask.sum() < kept.completion_mask.sum()


def test_the_hook_is_asked_where_an_example_brings_no_hint(tokenizer):
    asked = []
    def hook(kind, meta):
        asked.append((kind, meta.trace.trace_id, meta.site.turn))
        return "Look at the list of tools."
    batch = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=hook))([TraceExample(TRACE), EXAMPLE])
    assert asked == [("tool_not_found", "notes", 3)] and batch.sites == 2
    silent = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=lambda kind, meta: None))
    assert silent([TraceExample(TRACE)]).sites == 0
    assert silent.excluded == [("notes", 3, "no layer had a hint")]


def traced(*steps):
    "A trace of turns, each of calls: name, arguments and what came back."
    turns = [Turn("user", "Make the numbers come out.")]
    for n, step in enumerate(steps):
        calls = tuple(ToolCall(name, given, f"{n}.{k}") for k, (name, given, _) in enumerate(step))
        turns += [Turn("assistant", tool_calls=calls),
                  *(Turn("tool", text, tool_call_id=c.id, observation=True) for c, (*_, text) in zip(calls, step))]
    return Trace("run", (*turns, Turn("assistant", "Done.")), tools=(tool("bash"), tool("read_file")))


LOST = ("read_file", {"path": "x"}, "Error: no such file")
MEANT = ("bash", {"command": "# this should fail\npython a.py"}, "exit code: 1\nValueError: as it should")
TRACEBACK = ('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    total = 1 / nothing\n'
             "ZeroDivisionError: division by zero")
BROKE = ("bash", {"command": "python a.py"}, f"exit code: 1\n{TRACEBACK}")
WROTE = ("bash", {"command": "cat > a.py <<'E'\ntotal = 1 / nothing\nE"}, "")
LOOKED = ("bash", {"command": "ls"}, "a.py")
RECORDED = {"two errors of a turn": traced([LOST, BROKE]), "a wanted failure": traced([MEANT]),
            "a wanted failure and an error": traced([MEANT, LOST]), "an error and a habit": traced([LOOKED], [LOOKED, LOST]),
            "an error of an earlier turn": traced([WROTE], [LOOKED], [BROKE]),
            "the same error again and again": traced([LOST], [LOST], [LOST])}
FINDERS = {"shown": SiteFinder(), "cause": SiteFinder(blame="cause"), "habit": SiteFinder((repeated_call,))}


@pytest.mark.parametrize("finder", FINDERS.values(), ids=FINDERS)
@pytest.mark.parametrize("trace", RECORDED.values(), ids=RECORDED)
def test_the_collator_hints_the_turns_that_training_on_recorded_traces_hints(tokenizer, trace, finder):
    asked = {"collator": [], "training": []}
    def source(by):
        def hook(kind, meta):
            asked[by].append((meta.site.turn, meta.site.evidence_turn))
            return f"Mind this {kind}."
        return hook
    collate = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=source("collator"), find_sites=finder))
    tree = collate.tree(TraceExample(trace))
    config = ComposerReplicationConfig("out", report_to="none", bf16=False)
    trees, _ = recorded_parts(TraceExample(trace), collate.chat, config, source("training"), find_sites=finder)
    assert [(b.turn, b.label) for b in tree.branches] == [(b.turn, b.label) for part in trees for b in part.branches]
    turns = [turn for turn, _ in asked["collator"]]
    assert asked["collator"] == asked["training"] and len(set(turns)) == len(turns)
    assert collate.excluded == [("run", site.turn, "the failure was wanted") for site in finder(trace) if site.turn not in turns]
    assert {site.turn for site in finder(trace) if not site.wanted} == set(turns)


def test_a_wanted_failure_is_said_to_be_one_wherever_hints_are_asked_for(tokenizer):
    trace, left_out = RECORDED["a wanted failure"], {"fork": Counter(), "repair": Counter()}
    collate = ComposerDataCollator(tokenizer, CollatorConfig(hint_generator=lambda kind, meta: "Mind this."))
    collate.tree(TraceExample(trace))
    config = ComposerReplicationConfig("out", report_to="none", bf16=False)
    trees, why = recorded_parts(TraceExample(trace), collate.chat, config, default_composite())
    assert not trees and not find_forks([trace], default_composite(), left_out["fork"])
    assert not [*repairs([trace], default_composite(), left_out["repair"])]
    reason = "the failure was wanted"
    assert why == reason and [said for *_, said in collate.excluded] == [reason]
    assert all(+counted == Counter([reason]) for counted in left_out.values())


def test_every_site_is_either_in_the_batch_or_reported(tokenizer):
    turns = tuple(TraceTurn(i, f"hint {i}") for i in range(-1, 10)) + (TraceTurn(3, "again"), TraceTurn(5, ""))
    collate = ComposerDataCollator(tokenizer)
    batch = collate([TraceExample(TRACE, turns)])
    assert batch.sites + len(collate.excluded) == len(turns)
    assert sorted(b.turn for b in batch.trees[0].branches) == [1, 3, 5, 7]
    assert all(reason and trace_id == "notes" for trace_id, _, reason in collate.excluded)


@pytest.mark.data
def test_real_error_turns_are_aligned_or_reported(shared_data):
    from itertools import islice

    from transformers import AutoTokenizer

    from composer_replication.traces.error_sites import find_error_sites
    from composer_replication.traces.read import read_traces
    collate = ComposerDataCollator(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "qwen2.5"),
                                   CollatorConfig(max_tokens=6000, hint_generator=default_composite()))
    for name in ("taubench_airline_gpt4o", "miniswe_deepseek_chat_dev", "tau2_airline_multimodel"):
        failing = (t for t in read_traces(shared_data / "traces" / f"{name}.jsonl.gz") if find_error_sites(t))
        for trace in islice(failing, 3):
            collate.excluded.clear()
            tree = collate.tree(TraceExample(trace))
            if tree is None:
                assert collate.excluded[-1][1] == -1
                continue
            sites, placed = {s.turn for s in find_error_sites(trace)}, {b.turn for b in tree.branches}
            assert placed <= sites and sites - placed <= {turn for _, turn, _ in collate.excluded}
            assert placed or collate.excluded
            check_by_index(pack_trees([tree], 0))
