"""Engines -> nodes and GPU ids: exactly the GPUs that they need, so that the others stay free for other jobs.

Nodes of unequal GPU counts become the components of a heterogeneous Slurm job, one component per count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdlaunch.cluster import Cluster
from pdlaunch.errors import PlacementError
from pdlaunch.node.spec import NodeSlot
from pdlaunch.recipe import Engine, Recipe, RoleName


@dataclass(frozen=True)
class Rank:
    """The part of an engine on one node: index into Placement.nodes, GPU ids of the job on that node."""

    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class PlacedEngine:
    role: RoleName
    replica: int
    ranks: tuple[Rank, ...]

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True)
class Placement:
    nodes: tuple[NodeSlot, ...]
    """Components in order, nodes of a component together; node 0 runs etcd, NATS and the frontend."""
    engines: tuple[PlacedEngine, ...]

    @property
    def components(self) -> tuple[tuple[NodeSlot, ...], ...]:
        count = 1 + max(n.component for n in self.nodes)
        return tuple(tuple(n for n in self.nodes if n.component == c) for c in range(count))

    @property
    def gpus(self) -> int:
        return sum(n.gpus for n in self.nodes)


@dataclass
class _Node:
    roles: set[str]
    used: int = 0


def place(recipe: Recipe, cluster: Cluster) -> Placement:
    """PlacementError when an engine fits no node and cannot be divided, or all engines need more nodes than the cluster lends."""
    if cluster.launcher == "local":
        return _on_this_machine(recipe, cluster)
    per_node, nodes, engines = cluster.nodes.gpus_per_node, list[_Node](), list[PlacedEngine]()
    for role, engine in recipe.engines.present().items():
        span = _nodes_of(role, engine, recipe, cluster)
        gpus = 0 if recipe.backend == "mocker" or per_node == 0 else engine.gpus // span
        for replica in range(engine.replicas):
            chosen = [i for i, n in enumerate(nodes) if per_node - n.used >= gpus and (recipe.placement == "pack" or n.roles == {role})][
                :span
            ]
            if span > 1 and len(chosen) < span:
                chosen = []
            while len(chosen) < span:
                nodes.append(_Node(set()))
                chosen.append(len(nodes) - 1)
            ranks = []
            for i in chosen:
                ranks.append(Rank(i, tuple(range(nodes[i].used, nodes[i].used + gpus))))
                nodes[i].used += gpus
                nodes[i].roles.add(role)
            engines.append(PlacedEngine(role, replica, tuple(ranks)))
    if len(nodes) > cluster.nodes.max:
        raise PlacementError(
            _too_many(recipe, len(nodes), per_node),
            where=recipe.source.where("engines"),
            rule=f"cluster {cluster.name} lends {cluster.nodes.max} nodes of {per_node} GPUs ({cluster.source.where('nodes.max')})",
            hint="fewer replicas or a smaller tensor_parallel" + ("" if recipe.placement == "pack" else ", or placement: pack"),
        )
    return _by_shape(nodes, engines)


def _too_many(recipe: Recipe, nodes: int, per_node: int) -> str:
    parts = [f"{role} {e.replicas} x {e.gpus} GPUs" for role, e in recipe.engines.present().items()]
    return f"{', '.join(parts)} need {nodes} nodes of {per_node} GPUs (placement: {recipe.placement})"


def _nodes_of(role: RoleName, engine: Engine, recipe: Recipe, cluster: Cluster) -> int:
    """Nodes that one engine spans: 1 when it fits; else the fewest over which its GPUs divide evenly (vLLM --nnodes needs that)."""
    per_node = cluster.nodes.gpus_per_node
    if recipe.backend == "mocker" or per_node == 0 or engine.gpus <= per_node:
        return 1
    where = recipe.source.where(("engines", role, "tensor_parallel"))
    if role == "control" or engine.data_parallel > 1:
        what = "a control engine" if role == "control" else f"data_parallel {engine.data_parallel}"
        raise PlacementError(
            f"{engine.gpus} GPUs for one engine, {per_node} per node",
            where=where,
            rule=f"{what} must fit one node",
            hint="use replicas instead of data_parallel" if engine.data_parallel > 1 else "a smaller tensor_parallel",
        )
    span = next((n for n in range(-(-engine.gpus // per_node), cluster.nodes.max + 1) if engine.gpus % n == 0), 0)
    if span == 0:
        raise PlacementError(
            f"one {role} engine needs {engine.gpus} GPUs",
            where=where,
            rule=f"cluster {cluster.name} lends {cluster.nodes.max} nodes of {per_node} GPUs, and an engine divides evenly over its nodes",
            hint="a smaller tensor_parallel or pipeline_parallel",
        )
    return span


def _by_shape(nodes: list[_Node], engines: list[PlacedEngine]) -> Placement:
    """Number the nodes so that those with equal GPU counts form one component; node 0 keeps being the first engine's first node."""
    shapes: list[int] = []
    for node in nodes:
        if node.used not in shapes:
            shapes.append(node.used)
    order = sorted(range(len(nodes)), key=lambda i: (shapes.index(nodes[i].used), i))
    new_index = {old: new for new, old in enumerate(order)}
    slots, counts = [], dict.fromkeys(range(len(shapes)), 0)
    for old in order:
        component = shapes.index(nodes[old].used)
        slots.append(NodeSlot(component, counts[component], nodes[old].used))
        counts[component] += 1
    moved = tuple(replace(e, ranks=tuple(replace(r, node=new_index[r.node]) for r in e.ranks)) for e in engines)
    return Placement(tuple(slots), moved)


def _on_this_machine(recipe: Recipe, cluster: Cluster) -> Placement:
    """One node. GPUs are dealt out in order; with engines_share_gpus, the least used ones again."""
    have = cluster.nodes.gpus_per_node
    use = dict.fromkeys(range(have), 0)
    engines = []
    for role, engine in recipe.engines.present().items():
        need = 0 if recipe.backend == "mocker" or have == 0 else engine.gpus
        if need > have:
            raise PlacementError(
                f"one {role} engine needs {need} GPUs",
                where=recipe.source.where(("engines", role, "tensor_parallel")),
                rule=f"cluster {cluster.name} has {have} on this machine",
                hint="a smaller tensor_parallel, or another cluster",
            )
        for replica in range(engine.replicas):
            gpus = tuple(sorted(sorted(use, key=lambda g: (use[g], g))[:need]))
            for g in gpus:
                use[g] += 1
            engines.append(PlacedEngine(role, replica, (Rank(0, gpus),)))
    if any(count > 1 for count in use.values()) and not cluster.engines_share_gpus:
        total = sum(e.gpus * e.replicas for e in recipe.engines.present().values())
        raise PlacementError(
            f"the engines need {total} GPUs",
            where=recipe.source.where("engines"),
            rule=f"cluster {cluster.name} has {have} on this machine, and engines_share_gpus is false",
            hint=f"set engines_share_gpus: true in {cluster.source.path} for a proof run, or use fewer GPUs",
        )
    return Placement((NodeSlot(0, 0, sum(1 for count in use.values() if count)),), tuple(engines))
