"Muon per head and per expert: against `torch.optim.Muon` on each block alone, `torch.optim.AdamW`, and `torch.linalg.svd`."
import json
from pathlib import Path

import pytest
import torch
from trainer_script import differences, make, outcome, policy
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from composer_replication.contrib.muon import BlockMuon, block_grids, muon_groups
from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.env import WorldEnv
from composer_replication.recipes.memory_estimate import estimate
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.recipe_file import RecipeProblem
from composer_replication.recipes.run import make_trainer
from composer_replication.training.fit import check_optimizer

HIDDEN, HEADS, KEYS, SIZE, INNER, EXPERTS = 48, 4, 2, 16, 40, 3
SHAPE = dict(vocab_size=640, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KEYS, head_dim=SIZE,
             num_hidden_layers=2, intermediate_size=INNER, pad_token_id=0, bos_token_id=1, eos_token_id=6,
             tie_word_embeddings=False)
FAMILIES = {
    "qwen3": dict(attention_bias=True), "mixtral": dict(num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=INNER, tie_word_embeddings=True)}


MIXTURE = dict(num_experts=2, moe_intermediate_size=INNER, shared_expert_intermediate_size=INNER)


def small(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | FAMILIES[family]), dtype=torch.float32)


def blocks_of(name, weight):
    "The blocks of a weight, cut by hand; None for what is AdamW's."
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("bias") or weight.ndim == 1 or kind in ("embed_tokens", "lm_head", "gate"):
        return None
    if kind in ("q_proj", "k_proj", "v_proj"):
        return [weight[h * SIZE:(h + 1) * SIZE] for h in range(HEADS if kind == "q_proj" else KEYS)]
    if kind == "o_proj":
        return [weight[:, h * SIZE:(h + 1) * SIZE] for h in range(HEADS)]
    if kind == "gate_up_proj" and weight.ndim == 3:
        return [half for e in range(EXPERTS) for half in (weight[e, :INNER], weight[e, INNER:])]
    return list(weight) if weight.ndim == 3 else [weight]


def apart(ours, theirs, start):
    "The largest distance as a share of the largest move."
    return max((a - b).abs().max() / (b - s).abs().max() for a, b, s in zip(ours, theirs, start)).item()


class Oracle:
    "torch's own optimizers on copies: Muon on every block by itself, AdamW on the rest."

    def __init__(self, model, lr, decay, decays, **adam):
        self.start = {n: p.detach().clone() for n, p in model.named_parameters()}
        copies = {n: blocks_of(n, p) for n, p in self.start.items()}
        self.blocks = {n: [torch.nn.Parameter(b.clone()) for b in blocks] for n, blocks in copies.items() if blocks is not None}
        self.rest = {n: torch.nn.Parameter(self.start[n].clone()) for n, blocks in copies.items() if blocks is None}
        for blocks in self.blocks.values():
            assert len({b.shape for b in blocks}) == 1
        self.muon = torch.optim.Muon([block for blocks in self.blocks.values() for block in blocks], lr=lr, weight_decay=decay,
                                     adjust_lr_fn="match_rms_adamw")
        groups = [{"params": [p], "weight_decay": decay if decays(n) else 0.0} for n, p in self.rest.items()]
        self.adamw = torch.optim.AdamW(groups, lr=lr, **adam)

    def step(self, gradients):
        for name, blocks in self.blocks.items():
            for block, gradient in zip(blocks, blocks_of(name, gradients[name])):
                block.grad = gradient.clone()
        for name, weight in self.rest.items():
            weight.grad = gradients[name].clone()
        self.muon.step()
        self.adamw.step()

    def check(self, model):
        for name, weight in model.named_parameters():
            if name in self.rest:
                assert torch.equal(weight, self.rest[name]) and not torch.equal(weight, self.start[name]), name
            else:
                assert apart(blocks_of(name, weight.detach()), self.blocks[name], blocks_of(name, self.start[name])) < 0.02, name


def not_norm_or_bias(name):
    return "norm" not in name and "bias" not in name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_is_torchs_muon_on_it_and_the_rest_is_adamw(family):
    model = small(family)
    decays = [n for n, _ in model.named_parameters() if not_norm_or_bias(n)]
    oracle = Oracle(model, 0.01, 5.0, not_norm_or_bias)
    optimizer = BlockMuon(muon_groups(model, 5.0, decays), lr=0.01)
    ids = torch.randint(7, 640, (4, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        oracle.step({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    oracle.check(model)
    assert block_grids(model).keys() == oracle.blocks.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_orthogonal_in_each_block(family):
    "By `torch.linalg.svd` of the gradient: its singular vectors stay, its singular values come near 1."
    model, generator, lr = small(family), torch.Generator().manual_seed(1), 0.5
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    BlockMuon(muon_groups(model, 0.0, ()), lr=lr).step()
    for name in block_grids(model):
        weight = model.get_parameter(name)
        for gradient, moved in zip(blocks_of(name, weight.grad), blocks_of(name, before[name] - weight.detach())):
            u, values, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
            update = moved.double() / (lr * 0.2 * max(moved.shape) ** 0.5)
            inside = u.mT @ update @ vh.mT
            kept = inside.diag()[values > 0.05 * values.norm()]
            assert 0.6 < kept.min() and kept.max() < 1.25, name
            assert (inside - inside.diag().diag()).abs().max() < 0.05, name
            assert (update.square().sum() - inside.square().sum()).abs() < 0.1, name


def test_bfloat16_weights_and_a_state_that_is_saved_and_loaded(tmp_path):
    "The second half of a run from saved state equals the run without a stop, to the bit."
    def stepped(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            optimizer.step()

    whole = small("mixtral").bfloat16()
    first = BlockMuon(muon_groups(whole, 0.1, ()), lr=0.01)
    stepped(whole, first, range(2))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    again = small("mixtral").bfloat16()
    again.load_state_dict(whole.state_dict())
    second = BlockMuon(muon_groups(again, 0.1, ()), lr=0.5)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    stepped(whole, first, range(2, 4))
    stepped(again, second, range(2, 4))
    assert differences(dict(again.state_dict()), dict(whole.state_dict())) == []
    assert differences(second.state_dict()["state"], first.state_dict()["state"]) == []


# ---- through recipes and the trainer


class Lettered(WorldEnv):
    "The toy world, where an answer earns by its letters: even a random model's rewards differ."

    def reward(self, answer=""):
        return sum(letter in "aeiou" for letter in answer) / 10


@pytest.fixture
def moe_recipe(tmp_path):
    "The toy recipe for a random mixture of experts, with recorded traces for channel 2: `moe_recipe(key=text)`."
    config = AutoConfig.for_model("qwen3_moe", **SHAPE | FAMILIES["qwen3_moe"])
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config.to_dict()))
    given = {"model": f"random:{tmp_path}/moe", "tokenizer": "embedded", "optimizer": "muon",
             "traces": "embedded", "max_trace_tokens": "512",
             "task": f"{__name__}:Lettered", "replay_batch_size": "4",
             "max_steps": "3", "train_rows": "8", "max_completion_length": "96", "max_turn_tokens": "24",
             "gradient_accumulation_steps": "1", "weight_decay": "0.1", "adam_beta1": "0.8", "learning_rate": "0.01",
             "output_dir": str(tmp_path / "out")}
    return lambda **changes: load_recipe("toy", given | changes)


class Watch(TrainerCallback):
    "Gives each step's gradients, as the optimizer has them, to the oracle."

    def __init__(self, oracle):
        self.oracle = oracle

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.oracle.step({n: p.grad for n, p in model.named_parameters()})


def test_a_recipe_trains_a_mixture_of_experts_with_all_channels(moe_recipe):
    recipe = moe_recipe()
    trainer = make_trainer(recipe)
    oracle = Oracle(trainer.model, 0.01, 0.1, not_norm_or_bias, betas=(0.8, 0.999))
    trainer.add_callback(Watch(oracle))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 3 and all(entry["reward_std"] and entry["sdpo/sites"] and entry["replay/pairs"] for entry in log)
    assert isinstance(trainer.optimizer.optimizer, BlockMuon)
    oracle.check(trainer.model)
    state = trainer.optimizer.state_dict()["state"].values()
    kept = sum(v.numel() for s in state for v in s.values() if v.ndim)
    assert estimate(recipe).memory["optimizer"] == 4 * kept


def test_a_resumed_run_equals_the_run_without_a_stop(tmp_path):
    whole = make("frozen", tmp_path / "whole", optimizer="muon")
    whole.train()
    again = make("frozen", tmp_path / "again", model=policy(elsewhere=True), optimizer="muon")
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))
    assert isinstance(again.optimizer.optimizer, BlockMuon)
    assert differences(outcome(again), outcome(whole)) == []


# ---- what is refused


@pytest.mark.parametrize("changes,words", [
    ({"use_peft": "true", "lora_target_modules": "all-linear"}, ("LoRA", "use_peft: false")),
    ({"fsdp": "true", "fsdp_config": "{version: 2}"}, ("FSDP2", "leave optimizer out"))])
def test_a_recipe_is_refused_in_one_sentence(moe_recipe, changes, words):
    with pytest.raises(RecipeProblem) as refused:
        moe_recipe(**changes)
    text = str(refused.value)
    assert all(word in text for word in words) and "\n" not in text and text.count(". ") == 0, text


def test_zero_is_refused(moe_recipe, monkeypatch):
    config = moe_recipe().config
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputProblem, match=r"ZeRO \(DeepSpeed\) leaves each device a part"):
        check_optimizer(config, False)


@pytest.mark.parametrize("family,changes,name", [
    ("phi3", {}, r"self_attn.qkv_proj.weight \(128, 48\)"),
    ("gpt_oss", dict(num_local_experts=2), r"mlp.experts.gate_up_proj \(2, 48, 80\)"),
    ("qwen3_next", MIXTURE | dict(layer_types=["full_attention"] * 2), r"self_attn.q_proj.weight \(128, 48\)"),
    ("qwen3_next", MIXTURE | dict(layer_types=["linear_attention"] * 2), r"linear_attn.conv1d.weight"),
    ("qwen3", dict(head_dim=12), None), ("olmoe", dict(num_experts=2), None),
    ("deepseek_v3", dict(n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=0,
                         q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
     r"self_attn.q_a_proj.weight \(8, 48\)")])
def test_a_layout_that_is_not_known_is_refused_and_no_other(family, changes, name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | changes))
    if name is None:
        assert block_grids(model)
    else:
        with pytest.raises(InputProblem, match=name):
            block_grids(model)
