"""Everything the planner can say of one role, and of a pair of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdlaunch.errors import PlanError

from .capacity import Capacity, Layout, capacity, plan_layout
from .compat import check_concurrency, check_roles, refusals
from .emit import Emitted, emit
from .layers import Model
from .levers import Lever, levers
from .memory import GraphError, Ledger, graph_error, ledger
from .pair import Pair, needed_patches_of
from .price import Price
from .rules import Finding
from .shape import RoleShape
from .specs import head_replication, heads_per_rank
from .transfer import Transfer, transfer

PAIR = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class KindShare:
    """One kind of layer on one rank. heads: KV heads per rank (0 for a state); copies: ranks that hold the same head.
    page_bytes: of one layer, after unification. block_tokens: of its group. admission_bytes, steady_bytes: of one request on one rank.
    """

    label: str
    layers: int
    heads: int
    copies: int
    block_tokens: int
    page_bytes: int
    admission_bytes: int
    steady_bytes: int


@dataclass(frozen=True, slots=True)
class MtpCost:
    """What the drafter costs: the same role without speculative tokens. Bytes on one rank; requests per cache, None without memory."""

    block_before: int
    block_after: int
    bytes_before: int
    bytes_after: int
    concurrency_before: float | None
    concurrency_after: float | None


@dataclass(frozen=True)
class RolePlan:
    """One role. capacity is None when memory is unknown; refused says why vLLM would not start with that memory.
    unsharded_bytes: admission price of the same request at TP 1, the number that public posts divide by."""

    role: str
    layout: Layout
    kinds: tuple[KindShare, ...]
    admission: Price
    steady: Price
    book: Ledger | None = None
    capacity: Capacity | None = None
    refused: str = ""
    graph: GraphError | None = None
    mtp: MtpCost | None = None
    unsharded_bytes: int = 0
    levers: tuple[Lever, ...] = ()

    @property
    def copied_share(self) -> float:
        """Share of a held request's bytes that other ranks of the same engine hold too (heads copied because TP exceeds them)."""
        copied = sum(kind.steady_bytes * (1 - 1 / kind.copies) for kind in self.kinds)
        return copied / self.steady.bytes

    @property
    def copied_gib(self) -> float | None:
        """GiB of copies in one engine's caches when they are full of such requests, over its TP ranks."""
        if self.book is None:
            return None
        return self.copied_share * self.book.kv_gib * self.layout.shape.tensor_parallel

    @property
    def copied_requests(self) -> int | None:
        """Held requests that one cache would fit more if no head were copied."""
        if self.capacity is None:
            return None
        fits = self.capacity.requests(self.steady.tokens, held=True)
        return int(fits * self.copied_share / (1 - self.copied_share))


@dataclass(frozen=True)
class Plan:
    """The whole answer for a model. tokens: length of the request that is priced (prompt plus output)."""

    model: Model
    tokens: int
    roles: dict[str, RolePlan]
    findings: list[Finding] = field(default_factory=list)
    transfer: Transfer | None = None
    patches_needed: frozenset[str] = frozenset()
    emitted: Emitted | None = None


def _kinds(layout: Layout, admission: Price, steady: Price) -> tuple[KindShare, ...]:
    """Per kind of layer: what it takes of a request. Padding of short groups has its own line, so the parts add up to the price."""
    shape = layout.shape
    labels = {index: layer.geometry.label for index, layer in enumerate(layout.model.layers)}
    geometry = {layer.geometry.label: layer.geometry for layer in layout.model.layers}
    rows: dict[tuple[str, int, int], list[int]] = {}
    for number, group in enumerate(layout.groups):
        for spec, indices in group.specs.items():
            for index in indices:
                key = (labels.get(index, "MTP head"), spec.block_size, spec.page_bytes)
                row = rows.setdefault(key, [0, 0, 0])
                row[0] += 1
                row[1] += admission.by_group[number] * spec.page_bytes
                row[2] += steady.by_group[number] * spec.page_bytes
    found = []
    for (label, block, page), (layers, charged, held) in rows.items():
        kv = getattr(geometry.get(label), "kv_heads", 0)
        heads = heads_per_rank(kv, shape.tensor_parallel) if kv else 0
        copies = head_replication(kv, shape.tensor_parallel) if kv else 1
        found.append(KindShare(label, layers, heads, copies, block, page, charged, held))
    padding = (admission.bytes - sum(k.admission_bytes for k in found), steady.bytes - sum(k.steady_bytes for k in found))
    if any(padding):
        found.append(KindShare("padding of short groups", layout.grouping.padding_layers, 0, 1, 0, 0, *padding))
    return tuple(found)


def _mtp_cost(layout: Layout, tokens: int, kv: int | None) -> MtpCost | None:
    shape = layout.shape
    if not shape.speculative_tokens:
        return None
    without = plan_layout(layout.model, shape.with_changes(speculative_tokens=0))
    counts: list[float | None] = [None, None]
    if kv is not None:
        for i, each in enumerate((without, layout)):
            counts[i] = kv // each.block_bytes / each.admission(tokens).blocks
    before, after = without.admission(tokens).bytes, layout.admission(tokens).bytes
    return MtpCost(without.choice.block_size, layout.choice.block_size, before, after, counts[0], counts[1])


def plan_role(model: Model, role: str, shape: RoleShape, tokens: int) -> RolePlan:
    """One role's layout, prices, ledger and capacity. PlanError when vLLM would refuse the shape itself."""
    layout = plan_layout(model, shape)
    admission, steady = layout.admission(tokens), layout.steady(tokens)
    book = ledger(model, shape)
    cache, refused = None, ""
    if book is not None:
        try:
            cache = capacity(layout, book.kv_bytes)
        except PlanError as error:
            refused = f"{error.what}; {error.hint}"
    return RolePlan(
        role,
        layout,
        _kinds(layout, admission, steady),
        admission,
        steady,
        book,
        cache,
        refused,
        graph_error(shape, layout.steady(tokens).bytes),
        _mtp_cost(layout, tokens, None if book is None else book.kv_bytes),
        plan_layout(model, shape.with_changes(tensor_parallel=1)).admission(tokens).bytes,
        levers(layout, tokens, None if book is None else book.kv_bytes),
    )


def _of_a_pair(model: Model, roles: Mapping[str, RoleShape], role: str, found: tuple[Lever, ...]) -> tuple[Lever, ...]:
    """Levers that vLLM and every patch together would refuse at the handshake are marked; TP is of one role, all else of both."""
    judged = []
    for lever in found:
        shapes = {name: roles[name].with_changes(**({} if _of_one_role(lever) and name != role else lever.changes)) for name in PAIR}
        try:
            layouts = [plan_layout(model, shapes[name]) for name in PAIR]
        except PlanError:
            layouts = []
        if layouts and not lever.refused:
            no = refusals(Pair(model, layouts[0], layouts[1], needed_patches_of(*layouts)))
            lever = replace(lever, held=None, printed=None, price_percent=None, refused=f"no hand-over ({no[0].code})") if no else lever
        judged.append(lever)
    return tuple(judged)


def _of_one_role(lever: Lever) -> bool:
    return set(lever.changes) <= {"tensor_parallel", "max_num_batched_tokens"}


def plan_pair(
    model: Model, roles: Mapping[str, RoleShape], tokens: int, patches: frozenset[str] = frozenset(), concurrency: int | None = None
) -> Plan:
    """Plans of all roles, and for prefill with decode also findings, transfer and the values for the recipe.

    tokens: prompt plus output. concurrency: requests in flight over the whole deployment, when it is known.
    """
    plans = {role: plan_role(model, role, shape, tokens) for role, shape in roles.items()}
    if "prefill" not in plans or "decode" not in plans:
        return Plan(model, tokens, plans)
    plans = {role: replace(plan, levers=_of_a_pair(model, roles, role, plan.levers)) for role, plan in plans.items()}
    prefill, decode = plans["prefill"], plans["decode"]
    findings = check_roles(model, prefill.layout.shape, decode.layout.shape, patches)
    if concurrency is not None and decode.capacity is not None:
        shape = decode.layout.shape
        findings += check_concurrency(shape.cache_copies, decode.capacity.requests(tokens, held=True), shape.max_num_seqs, concurrency)
    return Plan(
        model,
        tokens,
        plans,
        findings,
        transfer(decode.layout, tokens),
        needed_patches_of(prefill.layout, decode.layout),
        emit(prefill.layout, decode.layout, tokens, concurrency, decode.capacity),
    )
