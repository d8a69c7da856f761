"Whole commands on traces: output, exit codes, bad input, and the same table twice."
import gzip
import json
import os
from pathlib import Path

import pytest

from composer_replication.envs.toy.model import embedded_tokenizer
from composer_replication.envs.toy.traces import toy_path

DEMO = toy_path()


def test_errors_and_hints_as_json_lines_name_exactly_what_was_promised(rows):
    sites, hinted = rows("traces", "errors", DEMO), rows("hints", "list", DEMO)
    assert len(sites) > 50 and all(set(r) == {"trace_id", "message_index", "kind", "evidence_index"} for r in sites)
    assert all(r["message_index"] < r["evidence_index"] for r in sites)
    assert [{k: r[k] for k in sites[0]} for r in hinted] == sites
    more = {"action", "error", "hint", "layer", "lost_turns", "lost_tokens"}
    assert set(hinted[0]) == {*sites[0], *more} and any(r["hint"] for r in hinted)


def test_bad_files_give_a_sentence_each_and_the_rest_goes_on(call, tmp_path):
    whole = gzip.decompress(DEMO.read_bytes())
    lines = whole.splitlines(keepends=True)
    bad = {"truncated.jsonl.gz": gzip.compress(whole)[:-2000], "half.jsonl": lines[0] + lines[1][:300],
           "broken.jsonl": lines[0] + b'{"messages": "\xff\xfe"}\n' + lines[1], "foreign.jsonl": b'{"a": 1}\n',
           "empty.jsonl": b""}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    done = call("traces", "show", *sorted(bad), DEMO, "--json")
    counts = {Path(r["file"]).name: r["traces"] for r in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == 0 and [counts[f"{name}.jsonl"] for name in ("half", "broken", "foreign")] == [1, 2, 0]
    assert counts["toy_traces.jsonl.gz"] == len(lines) and 0 < counts["truncated.jsonl.gz"] < len(lines)
    warnings = {name: [w for w in done.stderr.splitlines() if name in w] for name in bad}
    assert all(len(said) == 1 and said[0].endswith(".") and ";" in said[0] for said in warnings.values()), warnings
    assert len(done.stderr.splitlines()) == len(bad) and "line 2" in warnings["half.jsonl"][0]
    strict = call("traces", "errors", "foreign.jsonl", DEMO, "--json", "--strict")
    assert strict.exit_code == 1 and strict.stdout == "" and "foreign.jsonl" in strict.stderr


def chat(call_error="Error: no such thing", trace_id="t", calls=1):
    "An OpenAI chat whose last call fails."
    look = lambda i: {"name": "look", "arguments": f'{{"at": {i}}}'}
    tool_calls = [{"id": f"c{i}", "type": "function", "function": look(i)} for i in range(calls)]
    results = ["fine"] * (calls - 1) + [call_error]
    return {"trace_id": trace_id, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": tool_calls},
        *({"role": "tool", "tool_call_id": f"c{i}", "content": said} for i, said in enumerate(results)),
        {"role": "assistant", "content": "Done."}]}


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("words, said", [
    (["explore", "empty.jsonl"], "no trace could be read"),
    (["traces", "show", "foreign.jsonl", "--json"], "no trace could be read"),
    (["explore", "--model", "nowhere"], "neither a folder nor in the hub's cache"),
    (["explore", "--model", "small"], "vocabulary 64"),
    (["explore", "--out", "empty.jsonl/o"], "--out"),
    (["hints", "list", "pipe"], "cannot be read twice"),
    (["hints", "list", "--tools", "nowhere.json", "empty.jsonl"], "tools cannot be read"),
    *((["hints", "list", "good.jsonl", "--tools", f"tools{i}.json"], "no list of tool schemas") for i in range(3))])
def test_what_cannot_run_ends_with_one_sentence(call, tmp_path, words, said):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    (tmp_path / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "foreign.jsonl", {"a": 1})
    write(tmp_path / "good.jsonl", chat())
    for i, tools in enumerate(('[{"name": 1}]', '[{"function": 5}]', '[{"function": {"name": 3}}]')):
        (tmp_path / f"tools{i}.json").write_text(tools)
    if "small" in words:
        Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=1, num_key_value_heads=1)).save_pretrained("small")
        embedded_tokenizer().save_pretrained("small")
    done = call(*words)
    assert done.exit_code == 1 and said in done.stderr and done.stderr.count("error: ") == 1 and not done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["traces", "errors"], ["hints", "list"]])
def test_text_that_looks_like_markup_is_only_text(call, words, tmp_path):
    write(tmp_path / "x[b].jsonl", chat("Error: no [/usr/x] and [/b] here", trace_id="[/x]"), {"a[/b]": 1})
    done = call(*words, "x[b].jsonl")
    assert done.exit_code == 0 and "x[b].jsonl" in done.stderr, done.output


def test_two_traces_of_one_name_are_told_apart(rows, tmp_path):
    files = [write(tmp_path / folder / "run.jsonl", {"messages": chat(said)["messages"]})
             for folder, said in (("a", "Error: no such thing"), ("b", "fine"))]
    assert {r["trace_id"] for r in rows("traces", "errors", *files[::-1])} == {"run@2"}
