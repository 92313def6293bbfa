"""vLLM 0.31.0's KV cache arithmetic, before a GPU is booked."""
