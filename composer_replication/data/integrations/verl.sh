# SDPO (channel 2) and Dr.GRPO (channel 1) in verl 0.9.1. NOT RUN: verl's own configuration takes these settings (tested on a CPU); no training was started.
export VERL_USE_EXTERNAL_MODULES=composer_replication.contrib.verl  # on every machine, before Ray starts there
python -m verl.trainer.main_ppo \
    data.train_files=train.parquet data.val_files=val.parquet \
    data.max_prompt_length=4096 data.max_response_length=4096 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-Coder-7B-Instruct \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.policy_loss.loss_mode=composer_dr_grpo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.loss_scale_factor=4096 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=my_package.HintedAgentLoopManager \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    distillation.enabled=True \
    distillation.nnodes=1 \
    distillation.n_gpus_per_node=1 \
    distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-Coder-7B-Instruct \
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1 \
    distillation.distillation_loss.loss_mode=composer_sdpo \
    distillation.distillation_loss.topk=20 \
    distillation.distillation_loss.use_task_rewards=True \
    distillation.distillation_loss.use_policy_gradient=False \
    distillation.distillation_loss.distillation_loss_coef=10.0
