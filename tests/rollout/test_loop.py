"Rollouts under faults: broken calls, hanging tools, broken environments, budgets, and exact trees for real templates."
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import Folder, config, scripted

from composer_replication.core.tools import ToolResult
from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.rollout.loop import collect, run_episodes
from composer_replication.rollout.policies import CallablePolicy
from composer_replication.rollout.types import Ending, Episode, RolloutConfig
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.tree.build import build_tree
from composer_replication.tree.chat import TemplateProblem


def reads(lines):
    "A policy that says line after line, whatever it is told."
    return scripted(lambda text: lines[text.count("<|assistant|>") - 1])


def call(text):
    return f"<|call|>{text}"


def one(lines, settings=None, environment=Folder, **row):
    policy = reads(lines)
    rollout, = collect(policy, environment, [{"prompt": "Look."} | row], settings or config())
    if rollout.trace.turns[-1].role != "user":
        check(rollout, policy)
    return rollout


def check(rollout, policy):
    "What must hold of every rollout."
    assert len(rollout.completion_ids) == len(rollout.completion_mask) == len(rollout.logprobs)
    tree = build_tree(rollout.trace, policy.chat)
    assert tree.ids == rollout.prompt_ids + rollout.completion_ids
    masked = [i for i, m in zip(rollout.completion_ids, rollout.completion_mask) if m]
    told = [t for t in rollout.trace.turns if t.role == "assistant"]
    assert masked == [i for t in told for i in t.token_ids] and len(tree.spans) == len(told)
    assert [p for p, m in zip(rollout.logprobs, rollout.completion_mask) if m] == [p for t in told for p in t.logprobs]
    assert all(p == 0.0 for p, m in zip(rollout.logprobs, rollout.completion_mask) if not m)


FAILURES = [
    ('{"name": "ls", "arguments": {"path": "a"}', "json_decode", "json_decode"),
    ('{"name": "ls", "arguments": ["a"]}', "json_decode", "json_decode"),
    ('{"arguments": {}}', "json_decode", "json_decode"),
    ("ls a", "json_decode", "json_decode"),
    ("", "json_decode", "json_decode"),
    ('{"name": "dir", "arguments": {}}', "tool_not_found", "tool_not_found"),
    ('{"name": "reset", "arguments": {}}', "tool_not_found", "tool_not_found"),
    ('{"name": "ls", "arguments": {"path": 3}}', "type_error", "type_error"),
    ('{"name": "ls", "arguments": {"folder": "a"}}', "type_error", "type_error"),
    ('{"name": "wait", "arguments": {}}', "type_error", "type_error"),
    ('{"name": "ls", "arguments": {"path": "missing"}}', "runtime_error", "runtime_error"),
]


@pytest.mark.parametrize("text,reason,kind", FAILURES)
def test_failures_are_answered_and_found(text, reason, kind):
    rollout = one([f"I try.{call(text)}", call('{"name": "ls", "arguments": {}}'), "Two files."])
    failed = rollout.trace.turns[2]
    assert (failed.role, failed.failed, failed.fail_reason) == ("tool", True, reason)
    site, = find_error_sites(rollout.trace)
    assert (site.turn, site.evidence_turn, site.kind) == (1, 2, kind)
    assert (rollout.ending, rollout.reward) == (Ending.DONE, 1.0)
    tree = build_tree(rollout.trace, reads([]).chat, hints={1: "Look again at how it is called."})
    assert not tree.refused
    branch, = tree.branches
    assert branch.ids[branch.start:] == rollout.trace.turns[1].token_ids


def test_calls_of_one_turn_run_in_order_and_coroutines_are_waited_for():
    calls = [call('{"name": "ls", "arguments": {"path": "x"}}'), call("{"), call('{"name": "later", "arguments": {}}')]
    rollout = one(["".join(calls), "So."])
    assert [t.content for t in rollout.trace.turns[2:5]] == ["a.py b.py in x", rollout.trace.turns[3].content, "later"]
    assert [t.tool_call_id for t in rollout.trace.turns[2:5]] == [c.id for c in rollout.trace.turns[1].tool_calls]
    assert rollout.trace.turns[3].fail_reason == "json_decode"


def test_tools_of_different_rollouts_run_at_once():
    together = threading.Barrier(8)  # nobody goes on before all are there

    class Meets(Folder):
        def wait(self, seconds: float) -> str:
            together.wait(seconds)
            return "met"

    lines = [call('{"name": "wait", "arguments": {"seconds": 25}}'), "Done."]
    rollouts = collect(reads(lines), Meets, [{"prompt": "Look."}] * 8, config())
    assert [r.trace.turns[2].content for r in rollouts] == ["met"] * 8


def test_a_process_with_a_hung_tool_still_ends():
    code = ("import time\nfrom composer_replication.rollout.tool_threads import run_chains\n"
            "print(run_chains([[lambda: time.sleep(3600)]], limit=0.1)[0][0].late)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.strip()) == (0, "True")


def test_broken_environments_are_not_scored():
    class Strange:
        tools = ({"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {
            "type": "object", "properties": {}}}},)

        def reset(self, **row):
            self.fails = row["fails"]
            if self.fails == "reset":
                raise OSError("no room")

        def call(self, call):
            if self.fails == "call":
                raise OSError("no room")
            return "fine" if self.fails == "text" else ToolResult("fine")

        def reward(self, answer=""):
            assert answer == "Done."
            return {"reward": 1 / 0 if self.fails == "reward" else 1.0, "nan": float("nan"), "none": None}.get(self.fails, 1.0)

        def close(self):
            pass

    rows = [{"prompt": "Look.", "fails": f} for f in ("reset", "call", "text", "reward", "nan", "none", "")]
    policy = reads([call('{"name": "ls", "arguments": {}}'), "Done."])
    rollouts = collect(policy, Strange, rows, config())
    assert [(r.ending, r.reward) for r in rollouts] == [("error", None)] * 5 + [("done", None), ("done", 1.0)]
    assert all("no room" in r.problem for r in rollouts[:2]) and "ZeroDivisionError" in rollouts[3].problem
    assert rollouts[2].problem == "the call of 'ls' raised TypeError: it gave a str; give a ToolResult"
    for rollout in rollouts[1:]:
        check(rollout, policy)


def test_environments_are_closed():
    made = []

    class Counted(Folder):
        def __init__(self):
            made.append(self)

    collect(reads(["Done."]), Counted, [{"prompt": "Look."}] * 2, config())
    assert [e.closed for e in made] == [True, True]

    def scarce():
        if len(made) == 5:
            raise OSError("no more of them")
        return Counted()

    with pytest.raises(OSError, match="no more"):
        collect(reads(["Done."]), scarce, [{"prompt": "Look."}] * 9, config())
    assert [e.closed for e in made] == [True] * 5


def test_budgets():
    lines = [call('{"name": "ls", "arguments": {}}')] * 9
    full = one(lines, config(max_turns=9, max_tokens=2000))
    assert (full.ending, full.reward) == ("turns", 1.0) and full.trace.turns[-1].role == "tool"
    for limit in range(1, len(full.completion_ids) + 2, 7):
        rollout = one(lines, config(max_turns=9, max_tokens=limit))
        assert len(rollout.completion_ids) <= limit
        assert rollout.completion_ids == full.completion_ids[:len(rollout.completion_ids)]
        assert rollout.ending == ("turns" if limit >= len(full.completion_ids) else "tokens")
        assert rollout.completion_mask[-1] == 1
    cut = one(lines, config(max_turn_tokens=6))
    assert (cut.ending, len(cut.completion_ids), find_error_sites(cut.trace)) == ("tokens", 6, [])


def test_bad_input_is_refused():
    environment = Folder()
    environment.reset()
    episode = Episode([{"role": "user", "content": "Look."}], environment, "t", "t-0")
    with pytest.raises(ValueError, match="'t-0' occurs more than once"):
        run_episodes(reads([]), [episode, episode], config())
    bare = embedded_tokenizer()
    bare.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
                          "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    with pytest.raises(TemplateProblem, match="renders no tool calls"):
        run_episodes(CallablePolicy(None, bare), [episode], config())

    class Undescribed:
        def ls(self, path): ...

    with pytest.raises(ValueError, match="Undescribed.ls makes no tool"):
        run_episodes(reads([]), [Episode(episode.prompt, Undescribed(), "t", "t-0")], config())


PIECES = st.sampled_from(['<|call|>', '{"name": "ls", "arguments": {}}', '{"name": "ls"', "{", "}", "<think>", "</think>", "\n\n",
                          " ", "text", "<|user|>", "<|tool|>", "é", '"', "\\", "<tool_call>", "name"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=1, max_size=4), st.integers(1, 120))
def test_whatever_is_sampled_the_tree_is_exact(lines, limit):
    rollout = one([*lines, "The end."], config(max_turns=len(lines) + 1, max_tokens=limit))
    assert rollout.ending in ("done", "turns", "tokens") and rollout.reward == 1.0


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "mistral-v3", "deepseek-v3.1", "kimi-k2", "qwen3-coder",
                                  "gemma4-STANDIN-vocab"])
def test_trees_of_real_templates_are_exact(name, shared_data):
    from transformers import AutoTokenizer

    from composer_replication.core.trace import ToolCall, Turn
    from composer_replication.tree.template import probe_template
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
    if name == "qwen3-coder":  # as TRL describes the same markup for Qwen3.5
        from trl.chat_template_utils import qwen3_5_template
        tokenizer.response_template = qwen3_5_template
    chat = probe_template(tokenizer)

    def line(turn):
        "A call as the template writes it, broken now and then, or an answer at the end."
        if turn == 5:
            return "It is done."
        call = ToolCall("ls", {"path": f"folder {turn}"}, f"call_{turn}")
        messages, _, _ = chat.tooled.messages([Turn("user", "q"), Turn("assistant", tool_calls=(call,))], [True, True])
        text = chat.render(chat.tooled, messages, ())
        text = text.partition(chat.render(chat.tooled, messages[:1], ()))[2] or text.partition("q")[2]
        text = text.removeprefix(chat.tooled.prompt).removeprefix(chat.tooled.blank).removesuffix(chat.tooled.after)
        text = text[text.index("[TOOL_CALLS]"):] if "[TOOL_CALLS]" in text else text
        text = text.removesuffix(chat.tooled.end)
        return text.replace('"}', '"', 1) if turn == 2 else text

    turn = iter(range(9))

    def generate(ids, sampling, limits, seeds):
        said = tokenizer.encode(line(next(turn)), add_special_tokens=False) + [chat.encode(chat.tooled.end, chat.anchor)[-1]]
        return [said], [[-0.1] * len(said)]

    policy = CallablePolicy(generate, tokenizer)
    rollout, = collect(policy, Folder, [{"prompt": "Look."}], config(max_turns=8, max_tokens=4000))
    check(rollout, policy)
    assert rollout.ending == "done", rollout.problem
    results = [t for t in rollout.trace.turns if t.role == "tool"]
    assert len(results) == 5 and sum(bool(t.failed) for t in results) <= 1
    if name not in ("qwen3-coder", "gemma4-STANDIN-vocab"):
        assert results[2].fail_reason == "json_decode"


@pytest.mark.parametrize("arguments", [
    "[123456789012345678901234567890]", "123456789012345678901", '["\\ud800"]', "[" * 300 + "]" * 300, "[" * 1100,
    '{"a": ' + "9" * 4400 + "}", '{"a": 123456789012345678901234567890}', '{"a": NaN}'])
def test_calls_that_no_file_could_hold_are_answered(arguments, tmp_path):
    "They come back as errors, the other rows play on, and the traces can be written and read again."
    from composer_replication.traces.export import write_traces
    from composer_replication.traces.read import read_traces

    class Adder:
        def reset(self, **row):
            pass

        def add(self, a: int) -> str:
            """
            Add.

            Args:
                a: What.
            """
            return "added"

        def get_reward(self):
            return 1.0

    tokenizer = embedded_tokenizer()
    ids = tokenizer(f'<|call|>{{"name": "add", "arguments": {arguments}}}<|end|>')["input_ids"]
    done = tokenizer("ok<|end|>")["input_ids"]

    def generate(rows, sampling, limits, seeds):
        new = [ids if len(row) < 100 + len(ids) // 2 and i == 0 else done for i, row in enumerate(rows)]
        return new, [[0.0] * len(n) for n in new]

    row = {"prompt": [{"role": "user", "content": "add"}]}
    odd, plain = collect(CallablePolicy(generate, tokenizer), Adder, [row, row], RolloutConfig(max_tokens=8000, max_turns=3))
    answer = next(t for t in odd.trace.turns if t.role == "tool")
    assert answer.failed and answer.fail_reason == "json_decode" and plain.reward == 1.0
    write_traces([odd.trace, plain.trace], tmp_path / "traces.jsonl")
    assert [t.turns for t in read_traces(tmp_path / "traces.jsonl")] == [odd.trace.turns, plain.trace.turns]
