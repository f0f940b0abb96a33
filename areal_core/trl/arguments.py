"""The arguments of TRL's `GRPOConfig`, with the names and defaults of TRL 1.16, sorted by what areal does with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

NO_EFFECT: Final[dict[str, str]] = {
    "disable_dropout": "areal trains without dropout",
    **dict.fromkeys(
        ("logging_strategy", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node",
         "logging_nan_inf_filter", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics", "debug"),
        "areal logs every step",
    ),
    **dict.fromkeys(
        ("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
        "trainer.run.samples() has answers of the policy",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
         "prediction_loss_only", "batch_eval_metrics", "include_for_metrics", "do_train", "do_eval", "do_predict",
         "eval_delay"),
        "areal evaluates with the inference engine, and sizes its batches",
    ),
    **dict.fromkeys(
        ("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
         "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
         "pad_to_multiple_of"),
        "areal packs its batches without padding",
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config", "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "tf32",
         "bf16_full_eval", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache",
         "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
         "ddp_timeout", "accelerator_config", "average_tokens_across_devices", "ds3_gather_for_generation",
         "local_rank", "use_cpu"),
        "areal chooses kernels, memory and devices by the machine",
    ),
    **dict.fromkeys(
        ("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host",
         "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization",
         "vllm_max_model_length", "vllm_tensor_parallel_size", "cache_implementation",
         "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
        "areal starts the fastest installed inference engine and places it on the machine's GPUs",
    ),
    **dict.fromkeys(
        ("save_only_model", "save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint",
         "ignore_data_skip"),
        "checkpoints of areal are whole, and Ctrl-C writes one",
    ),
    **dict.fromkeys(
        ("ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
         "entropy_target", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
         "max_tool_calling_iterations", "metric_for_best_model", "greater_is_better", "hub_strategy", "hub_token",
         "hub_private_repo", "hub_model_id", "hub_always_push", "hub_revision", "length_column_name", "project",
         "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
         "label_names"),
        "it configures a feature that areal does not have",
    ),
}  # fmt: skip
"""Arguments that change nothing of what is trained: areal does it in its own way, which the text says."""

REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "fp16": (False, "areal computes in bfloat16 or float32: set bf16"),
    "fp16_full_eval": (False, "areal computes in bfloat16 or float32: set bf16"),
    "optim_args": (None, "the optimizer is AdamW"),
    "optim_target_modules": (None, "the optimizer is AdamW for all parameters"),
    "lr_scheduler_kwargs": (None, "schedules are constant, linear and cosine"),
    "label_smoothing_factor": (0.0, "areal has no label smoothing"),
    "neftune_noise_alpha": (None, "areal adds no noise to embeddings"),
    "cast_lm_head_to_fp32": (False, "areal computes log-probabilities in float32, and the head's product in the dtype"),
    "auto_find_batch_size": (False, "a batch has the size that is set; memory is planned before the start"),
    "data_seed": (None, "one seed orders the data and samples"),
    "train_sampling_strategy": ("random", "rows are shuffled, or in order: shuffle_dataset"),
    "remove_unused_columns": (False, "rewards get every column; remove columns from the data set"),
    "generation_kwargs": (None, "set temperature, top_p, top_k, min_p or repetition_penalty"),
    "vllm_structured_outputs_regex": (None, "areal does not constrain answers"),
    "top_entropy_quantile": (1.0, "areal trains on every token"),
    "sync_ref_model": (False, "the reference model stays as it was before the run"),
    "use_adaptive_entropy": (False, "see the regularizer adaptive_entropy of areal"),
    "log_completions_hub_repo": (None, "areal uploads nothing"),
    "push_to_hub": (False, "areal uploads nothing: upload trainer.run.model"),
    "load_best_model_at_end": (False, "trainer.run.best has the best model"),
    "parallelism_config": (None, "use train_engine.parallel of areal"),
    "fsdp": (None, "areal shards with FSDP2 over the GPUs that train"),
    "fsdp_config": (None, "areal shards with FSDP2 over the GPUs that train"),
    "deepspeed": (None, "use train_engine: deepspeed of areal"),
    "resume_from_checkpoint": (None, "trainer.train(resume_from_checkpoint=True) resumes the newest run"),
    "vllm_importance_sampling_cap": (None, "TRL calls it vllm_importance_sampling_clip_max"),
}
"""Arguments that areal has no equal of, with TRL's defaults, which are the only values that it accepts."""


@dataclass
class _Honored:
    """Arguments of TRL's `GRPOConfig` that areal honors, with TRL's defaults."""

    output_dir: str | None = None
    # model
    model_init_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False
    bf16: bool | None = None
    gradient_checkpointing: bool = True
    router_aux_loss_coef: float | None = None
    # optimizer
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    optim: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    # batches and steps
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_generations: int = 8
    num_iterations: int = 1
    shuffle_dataset: bool = True
    seed: int = 42
    full_determinism: bool = False
    # generation
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    chat_template_kwargs: dict[str, Any] | None = None
    use_vllm: bool = False
    # loss
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str | bool = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    # evaluation, checkpoints, logs
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    num_generations_eval: int | None = None
    logging_steps: float = 10
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    report_to: str | list[str] | None = "none"
    run_name: str | None = None


HONORED: Final = frozenset(field.name for field in fields(_Honored))


class GRPOConfig(_Honored):
    """TRL's `GRPOConfig`, for `GRPOTrainer`. It takes every argument of TRL's; `GRPOTrainer` reports what it cannot do.

    Args:
        output_dir: folder for runs and for `save_model`; by default MODEL-GRPO.
        arguments: as in TRL, with TRL's defaults.

    Attributes:
        others: the arguments that areal does not map onto its own config, as they were given.
    """

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        super().__init__(output_dir, **{name: value for name, value in arguments.items() if name in HONORED})
        self.others = {name: value for name, value in arguments.items() if name not in HONORED}

    def __getattr__(self, name: str) -> Any:
        """Return an argument of `others`, or TRL's default of one that areal refuses; None where areal has no default.

        Raises:
            AttributeError: TRL has no such argument.
        """
        others = self.__dict__.get("others", {})
        if name not in others and name not in NO_EFFECT and name not in REFUSED:
            raise AttributeError(f"TRL's GRPOConfig has no {name!r}")
        return others.get(name, REFUSED.get(name, (None, ""))[0])
