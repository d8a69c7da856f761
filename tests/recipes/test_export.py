"Export against peft's own forward, in float32 and in a half type; the card of a real run; names that cannot be had."
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from composer_replication.core.errors import InputProblem
from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
from composer_replication.recipes.checkpoint import RUN_FILE, load_checkpoint
from composer_replication.recipes.export import base_line, export_checkpoint, model_card
from composer_replication.recipes.models import find_model
from composer_replication.recipes.recipe import load_recipe
from composer_replication.recipes.record import run_settings, write_record
from composer_replication.recipes.run import run_recipe

IDS = torch.tensor([[5, 17, 40, 3, 99]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def base_folder(path, dtype):
    model = embedded_model().to(dtype)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=6, pad_token_id=0)
    model.save_pretrained(path)
    embedded_tokenizer().save_pretrained(path)
    return path


def adapter_on(base, path):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    model.save_pretrained(path)
    return model.eval()


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_merged_adapter_is_a_plain_model_of_the_bases_type(dtype, close, tmp_path):
    adapted = adapter_on(base_folder(tmp_path / "base", dtype), tmp_path / "run" / "checkpoint-7")
    done = export_checkpoint(str(tmp_path / "run" / "checkpoint-7"), tmp_path / "plain", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    expected = logits(adapted)
    assert plain.dtype == dtype and done.dtype == str(dtype)[6:] and done.step == 7
    assert (logits(plain) - expected).abs().max() <= close * expected.abs().max()
    assert (logits(plain) - logits(embedded_model())).abs().max() > 0.01  # the adapter is in it
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer.chat_template == embedded_tokenizer().chat_template
    assert not any((tmp_path / "plain").glob("adapter*")) and (tmp_path / "plain" / "model.safetensors").is_file()


def test_whole_weights_are_copied_with_their_generation_config(tmp_path):
    base_folder(tmp_path / "checkpoint-4", torch.bfloat16)
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"large")
    done = export_checkpoint(str(tmp_path / "checkpoint-4"), tmp_path / "plain")
    assert done.difference == 0 and done.step == 4 and not (tmp_path / "plain" / "optimizer.pt").exists()
    assert GenerationConfig.from_pretrained(tmp_path / "plain").temperature == 0.7
    assert "Not recorded: the checkpoint has no run.json." in (tmp_path / "plain" / "README.md").read_text()


def test_an_export_that_is_another_model_is_refused(tmp_path, monkeypatch):
    import composer_replication.recipes.export as module
    adapter_on(base_folder(tmp_path / "base", torch.float32), tmp_path / "a")
    monkeypatch.setattr(module, "load_checkpoint", lambda name, **options: load_checkpoint(
        str(tmp_path / "base") if "partial" in name else name, **options))  # what would be read back
    with pytest.raises(InputProblem, match="logits differ"):
        export_checkpoint(str(tmp_path / "a"), tmp_path / "plain", merge=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "base"]


@pytest.mark.parametrize("settings", [{}, {"use_peft": "true", "lora_r": "4", "lora_target_modules": "[q_proj, v_proj]"}])
def test_the_card_of_a_run_is_true(settings, tmp_path):
    run = tmp_path / "run"
    small = {"output_dir": str(run), "max_steps": "1", "max_completion_length": "64", "max_turns": "1", "train_rows": "8",
             "gradient_accumulation_steps": "1", "save_steps": "1", "beta_replay": "0", "replay_pairs": "null"}
    run_recipe(load_recipe("toy", small | settings))
    record = json.loads((run / RUN_FILE).read_text())
    assert len(record["trained_on"]) == 8 and record["settings"]["alpha_sdpo"] == 1.0 and record["seeds"]["seed"] == 0
    card = (run / "README.md").read_text()
    assert "None" not in card and "0.87 million parameters" in card and "| optimizer steps | 1 |" in card and "2601.20802" in card
    assert "Trace-replay" not in card and "base_model" not in card.split("---")[1]
    export_checkpoint(str(run), tmp_path / "plain", merge=True)
    exported = (tmp_path / "plain" / "README.md").read_text()
    kept = (tmp_path / "plain" / RUN_FILE).read_text()
    assert ("LoRA, merged" in exported) == bool(settings) and str(tmp_path) not in exported + kept
    assert "command" not in json.loads(kept)
    trained = load_checkpoint(str(run), device="cpu").model
    assert torch.allclose(logits(load_checkpoint(str(tmp_path / "plain"), device="cpu").model), logits(trained), atol=1e-4)


def test_the_base_of_a_card(tmp_path):
    assert base_line("Qwen/Qwen3-8B") == ("[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B)", "Qwen/Qwen3-8B")
    (tmp_path / "provenance.json").write_text('{"model": "SmolLM2", "licence": "Apache-2.0"}')
    assert base_line(str(tmp_path)) == ("SmolLM2 (Apache-2.0)", None)
    assert "no part of Cursor's recipe" in model_card({"settings": {"model": "embedded", "beta_replay": 0.1}}, 1)
    offline = model_card({"settings": {"model": "embedded", "task": None, "alpha_sdpo": 1.0}}, 1)
    assert "Policy objective" not in offline and "| task | none: recorded traces |" in offline


def test_a_key_further_down_in_a_setting_is_not_recorded():
    recipe = load_recipe("toy", {"model_init_kwargs": "{token: hf_x, dtype: auto}"})
    shown = run_settings(recipe)["model_init_kwargs"]
    assert "hf_x" not in shown and "auto" in shown


def test_a_resumed_run_remembers_what_the_earlier_ones_trained_on(tmp_path):
    recipe = load_recipe("toy", {"output_dir": str(tmp_path), "resume": "true"})
    write_record(recipe, [{"task_id": "a"}, {"task_id": "b"}])
    assert write_record(recipe, [{"task_id": "c"}])["trained_on"] == ["a", "b", "c"]


def test_a_name_that_cannot_be_had_is_refused(monkeypatch):
    from huggingface_hub import HfApi, constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputProblem, match="HF_HUB_OFFLINE"):
        find_model("nobody/nothing")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def ask(self, name, timeout):
        assert timeout <= 5
        raise TimeoutError("the network swallows everything")

    monkeypatch.setattr(HfApi, "model_info", ask)
    with pytest.raises(InputProblem, match="does not answer"):
        find_model("nobody/nothing")


def test_what_lies_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = tmp_path / "snapshot"
    base_folder(snapshot, torch.float32)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(snapshot / file))
    assert find_model("some/body") == snapshot
    (snapshot / "model.safetensors").unlink()
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputProblem):
        find_model("some/body")  # its configuration alone is no model


def test_a_runs_folder_is_its_last_complete_checkpoint(tmp_path):
    with pytest.raises(InputProblem, match="neither a model nor a run"):
        find_model(str(tmp_path))
    from composer_replication.training.checkpoint import mark_complete
    for step in (2, 10, 30):
        base_folder(tmp_path / f"checkpoint-{step}", torch.float32)
        if step != 30:
            mark_complete(tmp_path / f"checkpoint-{step}")
    assert find_model(str(tmp_path)).name == "checkpoint-10"


def test_a_reporter_that_is_not_installed_is_said_before_anything_slow(monkeypatch):
    import composer_replication.recipes.checks as module
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(InputProblem, match=r"report_to=trackio needs the package trackio, which is not installed; pip install"):
        module.check_reporters(["trackio"])
    monkeypatch.setattr(module, "find_spec", lambda name: name == "tensorboardX" or None)
    module.check_reporters(["tensorboard", "something of one's own"])


def test_a_fetched_model_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_MODELS", str(tmp_path))
    with pytest.raises(InputProblem, match="'smollm2' is not on this machine; fetch it with `composer-rl models get smollm2`"):
        find_model("smollm2")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert find_model("smollm2") == tmp_path / "smollm2"
