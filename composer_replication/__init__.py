"""An open replication of Cursor's Composer 2.5 post-training recipe (channels 1 and 2), plus trace-replay DPO (ours).

Every public name is importable from here and resolved on first use (PEP 562), so that importing the package stays
under 0.3 s and does not import torch.
"""
__version__ = "0.1.0"

import sys
from importlib import import_module

from .core.known_warnings import ignore_known_warnings

ignore_known_warnings()

_ROOMS = {
    "core.trace": "ErrorSite HintContext ToolCall Trace TraceProblem Turn",
    "traces.read": "read_traces",
    "traces.error_sites": "find_error_sites register_detector",
    "traces.export": "to_dataset write_traces",
    "hints.templates": "HINT_TEMPLATES dispatch register",
    "core.hint": "HintGenerator",
    "hints.layers": "CompositeHintGenerator RawErrorHintGenerator RoutingHintGenerator "
                    "TemplateHintGenerator default_composite is_tool_runtime_kind make_layers register_layer",
    "hints.judge_layer": "LLMJudgeHintGenerator",
    "hints.sibling_layer": "SiblingHintGenerator",
    "core.pair": "DPOPair",
    "replay.pairs": "group_pairs sibling_pairs",
    "replay.teachers": "Teacher TeacherCallResult TeacherProblem TraceState replay_trace replay_traces trace_states",
    "replay.panel": "Everyone Sure replay_gated run_replay",
    "replay.vote": "Verdict Vote count_votes extract_dpo_pairs",
    "replay.prices": "Price PriceProblem price_table",
    "replay.ledger": "Ledger LedgerProblem",
    "replay.endpoint": "Endpoint",
    "replay.estimate": "estimate_replay",
    "replay.pool": "TeacherPool",
    "replay.examples": "place_pairs read_pairs to_preference_dataset write_pairs",
    "replay.clean": "normalise_pairs",
    "envs.deletion.task": "FeatureDeletionTask TaskProblem read_tasks write_tasks",
    "contrib.swe_rows.adapters": "SweBenchAdapter SweSmithAdapter",
    "sandbox.base": "Sandbox open_sandbox",
    "sandbox.local": "LocalSubprocessSandbox",
    "sandbox.bubblewrap": "BubblewrapSandbox",
    "sandbox.docker": "DockerSandbox",
    "envs.deletion.subject": "prepare_subject",
    "envs.deletion.tasks.make": "make_tasks",
    "contrib.harbor.export": "write_harbor",
    "envs.deletion.judge.grading": "Grade grade",
    "envs.deletion.judge.monitor": "HackMonitor",
    "envs.deletion.env": "FeatureDeletionEnv deletion_rows",
    "envs.curriculum": "DifficultyCurriculum",
    "envs.rewards": "EffortWeights EpisodeReward LengthEffortPenalty c_length unfinished_todos",
    "tree.template": "ChatFormat TemplateProblem probe_template",
    "tree.build": "AlignmentError Branch Tree build_tree",
    "tree.pack": "PackedBatch pack_trees",
    "tree.forward": "forward_branches forward_trunk",
    "losses.divergences": "generalized_jsd_loss register_divergence register_support",
    "losses.preference": "dpo_loss simpo_loss",
    "losses.distill": "TAIDScheduler entropy_aware_opd_loss taid_loss teacher_entropy",
    "losses.batch": "CollatorConfig ComposerDataCollator TraceExample TraceTurn",
    "losses.compose": "compose_loss",
    "training.objectives": "PO_OBJECTIVES make_dr_grpo_config make_po_config",
    "training.kl": "kl_adjusted_advantages kl_estimate",
    "training.teacher": "TeacherPolicy make_teacher",
    "training.checkpoint": "last_complete_checkpoint",
    "rollout.types": "Episode Rollout RolloutConfig",
    "rollout.policies": "ClientPolicy TransformersPolicy",
    "rollout.loop": "collect run_episodes",
    "core.held_out": "HeldoutSplit",
    "training.guard": "GuardFired HeldOutGuard HeldOutGuardCallback",
    "training.config": "ComposerReplicationConfig",
    "training.trainer": "ComposerReplicationTrainer",
    "recipes.recipe": "load_recipe",
    "experiments.ladder": "ARMS PRESETS ladder",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *__all__])


def _register_views():
    "Where IPython runs, a notebook shows the package's objects by their views."
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    if shell:
        import_module(f"{__name__}.report.display").register(shell.display_formatter.formatters["text/html"])


_register_views()
