"""Search: every tensor x data parallel shape of a role within a GPU budget, and the pairs that can hand a cache over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdlaunch.errors import PlanError

from .capacity import capacity, plan_layout
from .compat import check_roles
from .layers import Model
from .memory import kv_bytes
from .shape import GIB, RoleShape
from .weights import rank_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """One shape of one role. held: requests of the asked length that one cache holds between decode steps; printed: vLLM's
    "Maximum concurrency" at that length; engine_held: held over all data-parallel caches. refused: why it does not start."""

    shape: RoleShape
    weights_gib: float
    kv_gib: float
    block_size: int
    held: int
    printed: float
    refused: str = ""

    @property
    def gpus(self) -> int:
        return self.shape.gpus

    @property
    def engine_held(self) -> int:
        return self.held * self.shape.cache_copies

    @property
    def held_per_gpu(self) -> float:
        return self.engine_held / self.gpus

    @property
    def name(self) -> str:
        shape = self.shape
        parts = [f"TP{shape.tensor_parallel}"]
        if shape.pipeline_parallel > 1:
            parts.append(f"PP{shape.pipeline_parallel}")
        if shape.data_parallel > 1:
            parts.append(f"DP{shape.data_parallel}")
        return "".join(parts) + ("+EP" if shape.expert_parallel else "")


def shapes(base: RoleShape, gpus: int, *, experts: bool, pipeline: tuple[int, ...] = (1,)) -> Iterator[RoleShape]:
    """Powers of two of TP and DP whose product fits the budget, with and without expert parallelism where there are experts.
    Expert parallelism moves no cache and no weights between ranks of the same TP x DP, but it is another deployment."""
    sizes = [1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus]
    for tp in sizes:
        for pp in pipeline:
            for dp in sizes:
                if tp * pp * dp > gpus:
                    break
                for ep in (False, True) if experts and tp * dp > 1 else (False,):
                    yield base.with_changes(tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, expert_parallel=ep, replicas=1)


def candidate(model: Model, shape: RoleShape, tokens: int) -> Candidate:
    """Price one shape. Its weights are counted anew, because they depend on the shape."""
    weights = rank_bytes(model, shape) / GIB
    available = kv_bytes(model, shape) or 0
    try:
        layout = plan_layout(model, shape)
        cache = capacity(layout, available)
    except PlanError as error:
        return Candidate(shape, weights, available / GIB, 0, 0, 0.0, error.what)
    price = layout.admission(tokens)
    held = cache.requests(tokens, held=True)
    return Candidate(shape, weights, available / GIB, layout.choice.block_size, held, cache.num_blocks / price.blocks)


def search(model: Model, base: RoleShape, gpus: int, tokens: int, *, by: str = "requests_per_gpu") -> list[Candidate]:
    """All shapes within the budget, best first: by "requests_per_gpu" or by "concurrency" (requests of the whole engine); refused last.

    base.gpu_memory_gib must be known. base.memory.weights_gib is ignored: weights follow from each shape.
    """
    if base.gpu_memory_gib is None:
        raise PlanError("GPU memory is unknown", rule="a search compares capacities", hint="--gpu NAME or --gpu-memory-gib")
    experts = any(model.text.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"))
    found = [candidate(model, shape, tokens) for shape in shapes(base, gpus, experts=experts)]

    def order(c: Candidate) -> tuple[bool, float, int, bool]:
        score = c.held_per_gpu if by == "requests_per_gpu" else float(c.engine_held)
        return bool(c.refused), -score, c.gpus, c.shape.expert_parallel

    return sorted(found, key=order)


@dataclass(frozen=True, slots=True)
class PairCandidate:
    """One prefill engine and one decode engine within the budget. errors: codes of what stops the hand-over, needing a patch or a flag."""

    prefill: Candidate
    decode: Candidate
    errors: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus

    @property
    def held_per_gpu(self) -> float:
        return self.decode.engine_held / self.gpus


def _same_topology(one: RoleShape, other: RoleShape) -> bool:
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def search_pairs(
    model: Model,
    prefill: list[Candidate],
    decode: list[Candidate],
    gpus: int,
    patches: frozenset[str],
    own: tuple[RoleShape, RoleShape] | None = None,
    top: int = 8,
) -> list[PairCandidate]:
    """Pairs of the best candidates of each role that fit the budget together; those that can hand over first, then by decode requests
    per GPU of the pair. own: the shapes that were asked about, which are in the list however they rank."""
    best_p, best_d = ([c for c in role if not c.refused][:top] for role in (prefill, decode))
    for best, role, shape in ((best_p, prefill, own and own[0]), (best_d, decode, own and own[1])):
        if shape is not None:
            best += [c for c in role if c.gpus and c not in best and _same_topology(c.shape, shape)]
    found = []
    for p in best_p:
        for d in best_d:
            if p.gpus + d.gpus <= gpus:
                findings = check_roles(model, p.shape, d.shape, patches)
                found.append(PairCandidate(p, d, tuple(sorted({f.code for f in findings if f.severity == "error"}))))
    return sorted(found, key=lambda pair: (bool(pair.errors), -pair.held_per_gpu, pair.gpus))
