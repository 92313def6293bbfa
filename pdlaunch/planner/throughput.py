"""Which tokens a throughput counts. Public posts mix three: total (prompt and generated), generated, and per user."""

from __future__ import annotations


def total_to_generated(input_tokens: int, output_tokens: int) -> float:
    """Factor between total and generated tokens of requests of one shape: (ISL + OSL) / OSL. 8192/1024 gives 9."""
    return (input_tokens + output_tokens) / output_tokens


def per_user_rate(gpus: int, generated_per_gpu_s: float, users: int) -> float:
    """Generated tokens per second that one of `users` concurrent users gets, waiting included. Lower than 1000 / median TPOT, which
    counts only the time between tokens of a request that is already being decoded."""
    return gpus * generated_per_gpu_s / users
