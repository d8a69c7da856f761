"""An open replication of Cursor's Composer 2.5 post-training recipe (channels 1 and 2), plus trace-replay DPO (ours).

Every public name is importable from here and resolved on first use (PEP 562), so that importing the package stays
under 0.3 s and does not import torch.
"""
__version__ = "0.1.0"

from importlib import import_module

_ROOMS = {
    "traces.schema": "ErrorSite HintContext ToolCall Trace TraceProblem Turn",
    "traces.read": "read_traces",
    "traces.sites": "find_error_sites register_detector",
    "traces.export": "to_dataset write_traces",
    "hints.templates": "HINT_TEMPLATES dispatch register",
    "hints.layers": "CompositeHintGenerator HintGenerator RawErrorHintGenerator RoutingHintGenerator "
                    "TemplateHintGenerator default_composite is_tool_runtime_kind",
    "hints.judge": "LLMJudgeHintGenerator",
    "hints.sibling": "SiblingHintGenerator",
    "replay.pairs": "DPOPair sibling_pairs",
    "replay.teachers": "Teacher TeacherCallResult TraceState ask_teachers replay_trace replay_traces trace_states",
    "replay.majority": "Verdict Vote count_votes extract_dpo_pairs",
    "replay.prices": "Price PriceProblem price_table",
    "replay.ledger": "Ledger LedgerProblem",
    "replay.endpoint": "Endpoint TeacherProblem",
    "replay.pool": "TeacherPool",
    "replay.gating": "Everyone Sure Worth replay_gated",
    "replay.recorded": "RecordedTeacher",
    "replay.normalise": "normalise_pairs place_pairs read_pairs to_preference_dataset write_pairs",
    "replay.run": "estimate_replay run_replay",
    "envs.task": "FeatureDeletionTask TaskProblem read_tasks write_tasks",
    "envs.adapters": "SweBenchAdapter SweSmithAdapter",
    "envs.sandbox": "LocalSubprocessSandbox Sandbox open_sandbox",
    "envs.bubblewrap": "BubblewrapSandbox",
    "envs.docker": "DockerSandbox",
    "envs.subject": "prepare_subject",
    "envs.deletion": "make_tasks",
    "envs.harbor": "write_harbor",
    "envs.grading": "Grade grade",
    "envs.monitor": "HackMonitor",
    "envs.environment": "FeatureDeletionEnv deletion_rows",
    "envs.curriculum": "DifficultyCurriculum",
    "envs.rewards": "EffortWeights EpisodeReward LengthEffortPenalty c_length unfinished_todos",
    "tree.template": "ChatFormat TemplateProblem probe_template",
    "tree.build": "AlignmentError Branch Tree build_tree",
    "tree.pack": "PackedBatch pack_trees",
    "tree.forward": "forward_branches forward_trunk",
    "losses.jsd": "generalized_jsd_loss",
    "losses.preference": "dpo_loss simpo_loss",
    "losses.distill": "TAIDScheduler entropy_aware_opd_loss taid_loss teacher_entropy",
    "losses.collate": "CollatorConfig ComposerDataCollator TraceExample TraceTurn",
    "losses.compose": "compose_loss",
    "training.objectives": "PO_OBJECTIVES make_dr_grpo_config make_po_config",
    "training.kl": "kl_adjusted_advantages kl_estimate",
    "training.teacher_policy": "TeacherPolicy make_teacher",
    "training.checkpoint": "last_complete_checkpoint",
    "training.episode": "Episode Rollout RolloutConfig",
    "training.policies": "ClientPolicy TransformersPolicy",
    "training.rollout": "collect run_episodes",
    "training.guard": "GuardFired HeldOutGuard HeldOutGuardCallback HeldoutSplit",
    "training.config": "ComposerReplicationConfig",
    "training.setup": "group_pairs",
    "training.trainer": "ComposerReplicationTrainer",
    "training.recipe": "load_recipe",
    "lab.ladder": "ARMS PRESETS ladder",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *__all__])
