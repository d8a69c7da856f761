"""A scripted agent plays a task through OpenEnv, through TRL's tool loop and through ours; rewards and traces are compared."""
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remote_env import RemoteDeletionEnv
from transformers import PreTrainedTokenizerBase
from verifiers_play import Script

from composer_replication.core.environment import trl_factory
from composer_replication.core.trace import ToolCall, Trace
from composer_replication.envs.deletion.subject import Subject
from composer_replication.envs.deletion.task import FeatureDeletionTask
from composer_replication.rollout.loop import collect
from composer_replication.rollout.policies import CallablePolicy
from composer_replication.rollout.types import RolloutConfig


@dataclass(frozen=True)
class Played:
    "What became of a script."

    reward: float | None
    steps: tuple[tuple[str, dict, str], ...]  # tool, arguments, what the agent was shown
    answer: str


def played_messages(
    messages: Sequence[Mapping],  # the assistant's and the tools' messages, in order
    reward: float | None,
) -> Played:
    "The steps in messages, as OpenAI's form has them."
    calls = [call["function"] for m in messages for call in m.get("tool_calls") or ()]
    shown = [m["content"] for m in messages if m["role"] == "tool"]
    steps = tuple((call["name"], dict(call["arguments"]), text) for call, text in zip(calls, shown, strict=True))
    return Played(reward, steps, messages[-1].get("content") or "")


def played_trace(trace: Trace) -> Played:
    "What became of the script that a trace is of."
    return played_messages([m for m in trace.to_messages(thinking=False) if m["role"] in ("assistant", "tool")], trace.reward)


def solving_script(
    task: FeatureDeletionTask,
    subject: Subject,
) -> Script:
    "Look, run the tests, call wrongly, bring the original back, run the tests again. It knows the gold: for checks only."
    files = task.changed_files(subject.tree)
    first = next(iter(files))
    return Script((
        ("list_files", {"path": "."}), ("read_file", {"path": first}), ("run_tests", {}), ("read_file", {"file": first}),
        *(("write_file", {"path": path, "text": text}) for path, (text, _) in files.items()), ("run_tests", {}),
        ("shell", {"command": "ls"})), "The feature is back.")


def turn_ids(
    script: Script,
    tokenizer: PreTrainedTokenizerBase,  # with a chat template that writes tool calls
) -> list[list[int]]:  # token ids of each turn
    "A script as a model would have sampled it."
    user = {"role": "user", "content": "go"}
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in script.calls]
    messages = [*({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls),
                {"role": "assistant", "content": script.answer}]
    opened = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    turns = []
    for message in messages:
        text = tokenizer.apply_chat_template([user, message], tokenize=False).removeprefix(opened)
        end = text.index(tokenizer.eos_token) + len(tokenizer.eos_token)
        turns.append(tokenizer.encode(text[:end], add_special_tokens=False))
    return turns


def ours_trace(
    environment: Callable[[], Any],  # makes one
    row: Mapping,  # of `deletion_rows`
    script: Script,
    tokenizer: PreTrainedTokenizerBase,
) -> Trace:
    "The script through `collect`."
    turns = iter(turn_ids(script, tokenizer))

    def generate(ids, sampling, limits, seeds):
        sampled = [next(turns) for _ in ids]
        return sampled, [[0.0] * len(s) for s in sampled]

    limits = RolloutConfig(max_turns=len(script.calls) + 1, max_tokens=1_000_000, tool_timeout=120.0)
    rollout, = collect(CallablePolicy(generate, tokenizer), environment, [row], limits)
    return replace(rollout.trace, reward=rollout.reward)


def play_ours(
    environment: Callable[[], Any],
    row: Mapping,
    script: Script,
    tokenizer: PreTrainedTokenizerBase,
) -> Played:
    "What our loop makes of a script; arguments as `ours_trace`."
    return played_trace(ours_trace(environment, row, script, tokenizer))


def play_trl(
    environment: Callable[[], Any],  # makes one
    row: Mapping,  # of `deletion_rows`
    script: Script,
    tokenizer: PreTrainedTokenizerBase,  # one that TRL can parse
) -> list[Played]:  # one for each of the group
    "The script through TRL's tool loop."
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    turns = turn_ids(script, tokenizer)

    class Scripted(GRPOTrainer):
        "The trainer with the script in place of the model."

        def _generate_single_turn(self, prompt_ids, *others, **options):
            self.turn = getattr(self, "turn", -1) + 1
            return [list(turns[self.turn]) for _ in prompt_ids], None

        def _tool_call_loop(self, *given):
            self.kept = super()._tool_call_loop(*given)
            return self.kept

        def _calculate_rewards(self, *given):
            self.rewards = super()._calculate_rewards(*given)
            return self.rewards

    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         head_dim=8, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=65536))
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(folder, num_generations=2, per_device_train_batch_size=2, max_completion_length=30_000, use_cpu=True,
                          max_tool_calling_iterations=len(script.calls) + 1, report_to="none", bf16=False)
        trainer = Scripted(model, None, args, Dataset.from_list([dict(row)] * 2), processing_class=tokenizer,
                           environment_factory=trl_factory(environment))
        trainer._generate_and_score_completions([dict(row) for _ in range(2)])
    return [played_messages(messages, reward) for messages, reward in zip(trainer.kept[1], trainer.rewards[:, 0].tolist())]


def play_openenv(
    url: str,  # of a server
    row: Mapping,  # of `deletion_rows`
    script: Script,
) -> Played:
    "The script through a client of OpenEnv."
    client = RemoteDeletionEnv(url)
    try:
        client.reset(**row)
        steps = tuple((name, arguments, client.call(ToolCall(name, arguments)).text) for name, arguments in script.calls)
        return Played(client.reward(script.answer), steps, script.answer)
    finally:
        client.close()
