"""Gemma4 forward for the recall training: the modules and weights of transformers, with cheap attention and a damaged second decode.

The prompt is computed once. Its K and V then serve the taught answers and, with one layer's K and V damaged, a second decode of the first
answer: what a decode engine computes after a wrong KV transfer. `decode` is also the real generation of the evaluation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

WINDOW = 64
SLIDING_LAYERS = 5
LONGEST = 4096
GEOMETRIES = {
    "4x1": {"query": 8, "sliding": (4, 64), "global": (1, 128), "hidden": 256, "mlp": 512},
    "16x4": {"query": 16, "sliding": (16, 32), "global": (4, 64), "hidden": 256, "mlp": 512},
}
Kv = tuple[torch.Tensor, torch.Tensor]


def build_model(geometry: str, vocabulary: int, eos: list[int]) -> Gemma4ForCausalLM:
    """A Gemma4 of five sliding-window layers and one global layer, all of it plain configuration."""
    shape = GEOMETRIES[geometry]
    config = Gemma4TextConfig(
        vocab_size=vocabulary, hidden_size=shape["hidden"], intermediate_size=shape["mlp"], num_hidden_layers=SLIDING_LAYERS + 1,
        num_attention_heads=shape["query"], num_key_value_heads=shape["sliding"][0], head_dim=shape["sliding"][1],
        num_global_key_value_heads=shape["global"][0], global_head_dim=shape["global"][1], attention_k_eq_v=True,
        layer_types=["sliding_attention"] * SLIDING_LAYERS + ["full_attention"], sliding_window=WINDOW, max_position_embeddings=16384,
        final_logit_softcapping=30.0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=vocabulary, num_kv_shared_layers=0,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=2, eos_token_id=eos,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config)
    for layer in model.model.layers:
        # Gemma4 scales scores by 1.0; a start at unit norm gives scores of spread sqrt(head_dim), too sharp to learn from.
        nn.init.constant_(layer.self_attn.q_norm.weight, 2.0 * layer.self_attn.head_dim**-0.5)
    return model


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def norm_rotate(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (B, T, heads, head_dim); cos and sin (B or 1, T, 1, head_dim)."""
    wide = functional.rms_norm(x.float(), x.shape[-1:], weight, eps)
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


class RecallNetwork(nn.Module):
    """Wraps a Gemma4ForCausalLM; holds no weights of its own."""

    def __init__(self, model: Gemma4ForCausalLM, characters: list[int]) -> None:
        super().__init__()
        self.model = model
        self.layers = model.model.layers
        self.eps = model.config.rms_norm_eps
        self.heads = tuple(
            attention.k_proj.out_features // attention.head_dim for attention in (self.layers[0].self_attn, self.layers[-1].self_attn)
        )
        self.register_buffer("characters", torch.tensor(characters), persistent=False)
        every = torch.arange(LONGEST)[None]
        for layer in (self.layers[0], self.layers[-1]):
            kind = layer.self_attn.layer_type
            cos, sin = (part[0].float() for part in model.model.rotary_emb(torch.zeros(()), every, kind))
            self.register_buffer(f"cos_{kind}", cos, persistent=False)
            self.register_buffer(f"sin_{kind}", sin, persistent=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scaled embeddings; by index_select, whose gradient a CUDA graph can hold."""
        table = self.model.model.embed_tokens
        return table.weight.index_select(0, tokens.flatten()).view(*tokens.shape, -1) * table.scalar_embed_scale

    def prefill(self, tokens: torch.Tensor) -> tuple[list[Kv], torch.Tensor]:
        """tokens (B, T), T a multiple of the window, padded on the right. Returns K and V of every layer, each (B, T, heads, head_dim),
        and the hidden state (B, T, hidden) that enters the last layer."""
        batch, width = tokens.shape
        x = self.embed(tokens)
        positions = torch.arange(width, device=tokens.device)[None]
        mask = _chunk_mask(batch, width, tokens.device)
        kept: list[Kv] = []
        for layer in self.layers[:-1]:
            q, k, v = self._project(layer, x, self._rotation(positions, layer))
            kept.append((k, v))
            x = self._finish(layer, x, _chunked_attention(q, k, v, mask))
        last = self.layers[-1]
        _, k, v = self._project(last, x, self._rotation(positions, last), with_query=False)
        kept.append((k, v))
        return kept, x

    def read_out(self, kept: list[Kv], x: torch.Tensor, rows: torch.Tensor, scored: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits at positions rows (B, R), and the last layer's log attention (B, query heads, scored rows, T) of some of them."""
        last = self.layers[-1]
        k, v = kept[-1]
        x = x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
        h = rms_norm(x, last.input_layernorm.weight, self.eps)
        q = last.self_attn.q_proj(h).unflatten(-1, (-1, last.self_attn.head_dim))
        q = norm_rotate(q, last.self_attn.q_norm.weight, self.eps, *self._rotation(rows, last))
        allowed = torch.arange(k.shape[1], device=rows.device)[None, None] <= rows[:, :, None]
        logits = self._logits(self._finish(last, x, _attention(q, k, v, allowed)))
        grouped = q[:, scored].unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("brhgd,bthd->bhgrt", grouped, k).float().flatten(1, 2)
        return logits, scores.masked_fill(~allowed[:, None, scored], -1e9).log_softmax(-1)

    def decode(self, kept: list[Kv], tokens: torch.Tensor, start: torch.Tensor, damage: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """Logits (B, A, vocabulary) of the tokens (B, A) at positions start, start + 1, ...: the last prompt token and the answer.

        They see K and V of the prompt before `start` (damaged where `damage` says) and their own, as on a decode engine.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = start[:, None] + steps[None]
        own_allowed = (steps[None] <= steps[:, None])[None].expand(len(tokens), -1, -1)
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            k, v = kept[number]
            sliding = number < SLIDING_LAYERS
            if sliding:
                slots = start[:, None] - WINDOW + 1 + torch.arange(WINDOW - 1, device=tokens.device)[None]
                in_reach = torch.arange(WINDOW - 1, device=tokens.device)[None] >= steps[:, None]
                allowed = (slots >= 0)[:, None, :] & in_reach[None]
            else:
                slots = torch.arange(k.shape[1], device=tokens.device)[None].expand(len(tokens), -1)
                allowed = (slots < start[:, None])[:, None, :].expand(-1, len(steps), -1)
            past_k, past_v = (_read(part, slots, start, number, sliding, damage) for part in (k, v))
            q, own_k, own_v = self._project(layer, x, self._rotation(positions, layer))
            mixed = _attention(q, torch.cat((past_k, own_k), 1), torch.cat((past_v, own_v), 1), torch.cat((allowed, own_allowed), 2))
            x = self._finish(layer, x, mixed)
        return self._logits(x)

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, start: torch.Tensor, new_tokens: int, damages: list[dict[str, torch.Tensor] | None]
    ) -> list[torch.Tensor]:
        """Greedy answers (B, new_tokens) to prompts whose last token is at `start`, one result for each damage (None: no damage)."""
        kept, _ = self.prefill(tokens)
        answers = []
        for damage in damages:
            said = tokens.gather(1, start[:, None])
            for _ in range(new_tokens):
                following = self.decode(kept, said, start, damage)[:, -1].argmax(-1)
                said = torch.cat((said, following[:, None]), 1)
            answers.append(said[:, 1:])
        return answers

    def _rotation(self, positions: torch.Tensor, layer: nn.Module) -> Kv:
        kind = layer.self_attn.layer_type
        tables = getattr(self, f"cos_{kind}"), getattr(self, f"sin_{kind}")
        return tuple(table.index_select(0, positions.flatten()).view(*positions.shape, 1, -1) for table in tables)

    def _project(
        self, layer: nn.Module, x: torch.Tensor, rotation: Kv, with_query: bool = True
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        h = rms_norm(x, layer.input_layernorm.weight, self.eps)
        k = attention.k_proj(h).unflatten(-1, (-1, attention.head_dim))
        v = k if attention.v_proj is None else attention.v_proj(h).unflatten(-1, (-1, attention.head_dim))
        q = None
        if with_query:
            q = attention.q_proj(h).unflatten(-1, (-1, attention.head_dim))
            q = norm_rotate(q, attention.q_norm.weight, self.eps, *rotation)
        return q, norm_rotate(k, attention.k_norm.weight, self.eps, *rotation), rms_norm(v, None, self.eps)

    def _finish(self, layer: nn.Module, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + rms_norm(layer.self_attn.o_proj(mixed), layer.post_attention_layernorm.weight, self.eps)
        h = rms_norm(x, layer.pre_feedforward_layernorm.weight, self.eps)
        h = layer.mlp.down_proj(functional.gelu(layer.mlp.gate_proj(h), approximate="tanh") * layer.mlp.up_proj(h))
        return x + rms_norm(h, layer.post_feedforward_layernorm.weight, self.eps)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(rms_norm(x, self.model.model.norm.weight, self.eps)).float()
        cap = self.model.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap


def _chunk_mask(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """(batch * chunks, 1, window, 2 * window): each query sees the last `window` tokens, itself included."""
    query = torch.arange(WINDOW, device=device)[:, None]
    key = torch.arange(2 * WINDOW, device=device)[None] - WINDOW
    band = (key <= query) & (key > query - WINDOW)
    chunks = band[None].repeat(width // WINDOW, 1, 1)
    chunks[0, :, :WINDOW] = False
    return chunks.repeat(batch, 1, 1)[:, None]


def _chunked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    batch, width, heads, size = q.shape
    repeat = heads // k.shape[2]

    def with_previous(part: torch.Tensor) -> torch.Tensor:
        chunks = part.unflatten(1, (-1, WINDOW))
        previous = functional.pad(chunks[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        both = torch.cat((previous, chunks), 2).flatten(0, 1).transpose(1, 2)
        return both.repeat_interleave(repeat, 1)

    queries = q.unflatten(1, (-1, WINDOW)).flatten(0, 1).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(queries, with_previous(k), with_previous(v), attn_mask=mask, scale=1.0)
    return mixed.transpose(1, 2).reshape(batch, width, heads * size)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """q (B, R, heads, d), k and v (B, S, kv heads, d), allowed (B, R, S)."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (part.transpose(1, 2).repeat_interleave(repeat, 1) for part in (k, v))
    mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=allowed[:, None], scale=1.0)
    return mixed.transpose(1, 2).flatten(2)


def _read(
    part: torch.Tensor, slots: torch.Tensor, start: torch.Tensor, layer: int, sliding: bool, damage: dict[str, torch.Tensor] | None
) -> torch.Tensor:
    """K or V (B, T, heads, d) of the prompt as the slots (B, S) of a decode engine hold it; what a shift leaves free holds zeros."""
    batch, width, heads, size = part.shape
    rows = torch.arange(batch, device=part.device)
    if damage is None:
        return part[rows[:, None], slots.clamp(0, width - 1)]
    hit = damage["layer"] == layer
    name = "sliding" if sliding else "global"
    whole = torch.arange(2 * heads, device=part.device)[None]
    units = torch.where(hit[:, None], damage[f"units_{name}"], whole)
    source = torch.where(hit, damage["source"], rows)
    shifted = slots - torch.where(hit, damage["shift"], 0)[:, None]
    exists = (shifted >= 0) & (shifted < start[:, None])
    keep = torch.where(hit[:, None], damage[f"keep_{name}"], 1)[:, None, :] * exists[:, :, None]
    flat = (source[:, None, None] * width + shifted.clamp(0, width - 1)[:, :, None]) * (2 * heads) + units[:, None, :]
    read = part.reshape(batch * width * heads * 2, size // 2).index_select(0, flat.flatten())
    return (read.view(*flat.shape, size // 2) * keep[..., None].to(read.dtype)).reshape(batch, slots.shape[1], heads, size)
