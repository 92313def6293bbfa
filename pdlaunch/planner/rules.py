"""What vLLM demands of one role before it looks at any memory, with vLLM's reasons."""

from __future__ import annotations

from dataclasses import dataclass

from pdlaunch.errors import PlanError

from .layers import Model
from .shape import RoleShape
from .specs import backend_of, model_dtype


@dataclass(frozen=True, slots=True)
class Finding:
    """severity: "error", "warning" or "info". fix: what to change. price_requests: what the fix costs, in whole requests of
    max_model_len that one decode cache then holds fewer; None when it costs none or memory is unknown."""

    severity: str
    code: str
    message: str
    fix: str = ""
    price_requests: int | None = None


def role_findings(model: Model, role: str, shape: RoleShape) -> list[Finding]:
    """Dtype, MTP depth, TP and head rules of one role, with vLLM's reasons and in its order (ModelConfig, SpeculativeConfig,
    verify_with_parallel_config, the models' own assertions)."""
    tp, heads = shape.tensor_parallel, model.attention_heads
    found: list[Finding] = []
    if model.refuses_float16 and model_dtype(model, shape) == "float16":
        message = f"{role}: {model.architecture} does not support float16 (numerical instability)"
        found.append(Finding("error", "dtype-float16", message, "dtype: bfloat16"))
    steps = len(model.drafter)
    if steps > 1 and shape.speculative_tokens > steps and shape.speculative_tokens % steps:
        message = f"{role}: {shape.speculative_tokens} speculative tokens must be divisible by the model's {steps} MTP layers"
        found.append(Finding("error", "mtp-steps", message, f"a multiple of {steps}"))
    if heads % tp:
        message = f"{role}: Total number of attention heads ({heads}) must be divisible by tensor parallel size ({tp})."
        legal = ", ".join(str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0)
        found.append(Finding("error", "tp-attention-heads", message, f"engines.{role}.tensor_parallel: one of {legal}"))
    for attention in model.attention_kinds():
        kv = attention.kv_heads
        if attention.kind not in ("mla", "indexer") and kv % tp and tp % kv:
            message = f"{role}: {kv} KV heads of the {attention.kind} layers neither divide by nor into tensor parallel size {tp}"
            found.append(Finding("error", "tp-kv-heads", message, f"a tensor parallel size that divides {kv} or is a multiple of it"))
        elif kv < tp and not model.copies_heads:
            message = f"{role}: {model.architecture} does not copy KV heads: {kv} of them neither divide nor fill {tp} ranks"
            found.append(Finding("error", "tp-kv-heads", message, f"a tensor parallel size of at most {kv}"))
    if shape.pipeline_parallel > model.decoder_layers:
        message = f"{role}: pipeline_parallel {shape.pipeline_parallel} exceeds the model's {model.decoder_layers} layers"
        found.append(Finding("error", "pp-layers", message, "fewer pipeline stages"))
    if model.max_position and shape.max_model_len > model.max_position:
        message = f"{role}: max_model_len {shape.max_model_len} exceeds max_position_embeddings {model.max_position}"
        found.append(Finding("error", "max-model-len", message, f"max_model_len of at most {model.max_position}"))
    if shape.block_size is not None and not shape.cpu and backend_of(shape).kernel_block(shape.block_size) is None:
        message = f"{role}: block size {shape.block_size} does not suit the kernels of {shape.backend}"
        found.append(Finding("error", "block-backend", message, f"a multiple of {backend_of(shape).smallest}"))
    return found


def refuse(model: Model, shape: RoleShape) -> None:
    """PlanError for the first rule that the role breaks."""
    for finding in role_findings(model, "role", shape):
        if finding.severity == "error":
            raise PlanError(finding.message.removeprefix("role: "), rule="vLLM refuses to start", hint=finding.fix)
