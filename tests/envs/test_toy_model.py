"The embedded models and their tokenizer, seen by the libraries that will use them, and how spike 120 makes them."
import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_replication.envs.toy.model import (
    HABITS,
    TEACHERS,
    build_model,
    embedded_model,
    embedded_path,
    embedded_tokenizer,
)
from composer_replication.envs.toy.traces import toy_traces
from composer_replication.rollout.policies import TransformersPolicy
from composer_replication.traces.error_sites import find_error_sites
from composer_replication.tree.build import build_tree

sys.path.append(str(Path(__file__).parents[2] / "spikes" / "120-lab-bases"))
from bases import base_samples, pretrain, save_weights


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def model():
    return embedded_model()


def test_any_text_survives_the_tokenizer(tokenizer):
    texts = (" ", "é ∑ 漢字 \U0001f600", "a\r\n\tb  c", json.dumps({"k": '"'}), "x" * 5000, "def f(a):\n    return a\n")
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert len(tokenizer("1234567890", add_special_tokens=False).input_ids) == 10  # digits are single
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")


def test_transformers_loads_the_same_models(model):
    ids = torch.arange(40)[None]
    for name in HABITS + TEACHERS:
        theirs = AutoModelForCausalLM.from_pretrained(embedded_path() / name, dtype=torch.float32, local_files_only=True)
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, embedded_model(name)(ids).logits)
    assert len(AutoTokenizer.from_pretrained(embedded_path(), local_files_only=True)) == model.config.vocab_size


def test_what_ships_is_small_and_no_pickle():
    files = {str(p.relative_to(embedded_path())): p.stat().st_size for p in embedded_path().rglob("*") if p.is_file()}
    assert {"tokenizer.json", "README.md", "medium/config.json"} <= set(files)
    assert sum(files.values()) < 13_000_000  # seven agents
    assert not [n for n in files if n.endswith((".bin", ".pt", ".pkl"))]
    for name in HABITS + TEACHERS:
        with safe_open(embedded_path() / name / "model.safetensors", "pt") as weights:
            assert {weights.get_tensor(k).dtype for k in weights.keys()} == {torch.bfloat16}


def test_foreign_weights_are_refused(tmp_path, tokenizer):
    small = build_model(len(tokenizer))
    save_weights(small, tmp_path / "medium")
    torch.testing.assert_close(embedded_model(folder=tmp_path).lm_head.weight, small.lm_head.weight)
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "medium" / "model.safetensors")
    with pytest.raises(ValueError, match="other weights"):
        embedded_model(folder=tmp_path)
    cut = {k: v[:1] for k, v in small.state_dict().items() if k != "lm_head.weight"}
    save_file(cut, tmp_path / "medium" / "model.safetensors")
    with pytest.raises(ValueError, match="other weights"):
        embedded_model(folder=tmp_path)


def test_the_model_calls_out_of_habit_and_follows_the_hint(tokenizer, model):
    "At a call of a tool that is not there: the most likely name without the hint, and with the list of tools behind the prompt."
    policy, followed = TransformersPolicy(model, tokenizer), []
    for trace in toy_traces():
        site = next((s for s in find_error_sites(trace) if s.kind == "tool_not_found" and s.turn == 2), None)
        if site:
            hint = "Only these tools exist here: " + ", ".join(f"`{name}`" for name in sorted(trace.tool_names)) + "."
            tree = build_tree(trace, policy.chat, {site.turn: hint})
            (branch,) = tree.branches
            contexts = tree.ids[:tree.span(site.turn).start], (*tree.ids[:branch.fork], *branch.ids[:branch.start])
            names = []
            for context in contexts:
                ids = model.generate(torch.tensor([context]), max_new_tokens=24, do_sample=False)[0, len(context):]
                names.append(tokenizer.decode(ids).partition('"name": "')[2].partition('"')[0])
            followed.append((names[0] not in trace.tool_names, names[1] in trace.tool_names))
    assert len(followed) >= 8
    habit, follows = (sum(column) / len(followed) for column in zip(*followed, strict=True))
    assert habit > 0.7 and follows > 0.6, (habit, follows)


def test_it_works_without_a_network(monkeypatch):
    def no(*given, **named):
        raise OSError("no network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, no)
    monkeypatch.setattr(socket, "getaddrinfo", no)
    embedded_tokenizer()
    embedded_model()


# How spike 120 makes them.


def test_training_again_gives_the_same_weights(tokenizer):
    pool = list(base_samples("mild", 6, tokenizer))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = pretrain(pool, len(tokenizer), steps=2, batch_size=2, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    again = pretrain(pool, len(tokenizer), steps=2, batch_size=2, progress=False)
    other = pretrain(pool, len(tokenizer), steps=2, batch_size=2, seed=1, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
