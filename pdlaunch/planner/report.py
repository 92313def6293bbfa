"""Tables of the planner's results, with one line of explanation where a number surprises."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .command import Result, Search
from .memory import Ledger, Row
from .roleplan import Plan, RolePlan
from .runplan import MeasuredEngine
from .specs import model_dtype

MIB = 1 << 20
_COLOURS = {"error": "red", "warning": "yellow", "info": "dim"}


def _table(title: str, columns: str, rows: Iterable[Iterable[object]]) -> Table:
    """columns: names separated by |; a leading < aligns left."""
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns.split("|"):
        table.add_column(name.removeprefix("<"), justify="left" if name.startswith("<") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(item if isinstance(item, Text) else str(item) for item in row))
    return table


def _say(console: Console, text: str | Text, style: str = "") -> None:
    """One line of text, left to the terminal to wrap, so that piped output keeps its lines and YAML stays YAML."""
    console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=True)


def _number(value: float | None, digits: int = 2, sign: str = "") -> str:
    return "unknown" if value is None else f"{value:{sign},.{digits}f}"


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f}"


def _kinds(role: RolePlan, console: Console) -> None:
    rows = []
    for kind in role.kinds:
        heads = f"{kind.heads} (each on {kind.copies} ranks)" if kind.copies > 1 else str(kind.heads or "")
        page = f"{kind.page_bytes / 1024:,.1f}" if kind.page_bytes else ""
        rows.append((kind.label, kind.layers, heads, kind.block_tokens or "", page, _mib(kind.admission_bytes), _mib(kind.steady_bytes)))
    title = f"{role.role}: one request of {role.admission.tokens:,} tokens on one rank"
    columns = "<layers|count|KV heads per rank|block tokens|page KiB|charged MiB|held MiB"
    console.print(_table(title, columns, rows))


def _explain(role: RolePlan) -> list[str]:
    layout, shape, choice = role.layout, role.layout.shape, role.layout.choice
    lines = []
    if choice.state_bytes:
        lines.append(
            f"one state is {choice.state_bytes:,} bytes = {choice.state_tokens:,} tokens of {choice.token_bytes:,} bytes, "
            f"so the block is {choice.block_size:,} tokens (steps of {choice.alignment}); states are padded by "
            f"{choice.state_padding_percent:.2f} %"
        )
    count = len(layout.groups)
    lines.append(
        f"{count} {'group' if count == 1 else 'groups'} ({layout.grouping.path}); a pool block is {_mib(layout.block_bytes)} MiB; "
        f"charged {role.admission.blocks} blocks = {role.admission.mib:,.2f} MiB ({role.admission.waste_percent:.1f} % never written), "
        f"held {role.steady.blocks} blocks = {role.steady.mib:,.2f} MiB"
    )
    if shape.tensor_parallel > 1:
        whole = role.unsharded_bytes
        lines.append(
            f"this is the price on one of {shape.tensor_parallel} ranks; bytes for KV per GPU divided by the unsharded {_mib(whole)} MiB "
            f"would give {whole / role.admission.bytes:.1f} times too few requests"
        )
    if role.admission.blocks > role.steady.blocks:
        lines.append(
            f"charged exceeds held because vLLM keeps room for {shape.max_in_flight_tokens:,} tokens in flight in every local layer "
            f"({shape.concurrent_batches} x max_num_batched_tokens); between decode steps only the window is held"
        )
    if role.copied_share:
        loss = "" if role.copied_requests is None else f"; {role.copied_gib:,.1f} GiB and {role.copied_requests} requests per engine cache"
        lines.append(f"copies of KV heads (TP above their number) are {100 * role.copied_share:.1f} % of what a request holds{loss}")
    if role.mtp is not None:
        before, after = role.mtp.bytes_before, role.mtp.bytes_after
        effect = ""
        if role.mtp.concurrency_before is not None and role.mtp.concurrency_after is not None:
            effect = f"; {role.mtp.concurrency_before:,.1f} -> {role.mtp.concurrency_after:,.1f} requests charged"
        lines.append(
            f"{shape.speculative_tokens} speculative tokens: block {role.mtp.block_before} -> {role.mtp.block_after}, "
            f"{_mib(before)} -> {_mib(after)} MiB per request ({after / before:.2f}x){effect}"
        )
    return lines


def _ledger_table(title: str, rows: Iterable[Row], end: float | None) -> Table:
    shown: list[tuple[object, ...]] = []
    for row in rows:
        value = _number(row.gib, 2, "" if row.inside else "+")
        shown.append(
            (Text(f"  {row.name}", style="dim") if row.inside else row.name, f"({value})" if row.inside else value, row.source, row.note)
        )
    if end is not None:
        shown.append((Text("KV cache", style="bold"), _number(end), "computed", ""))
    return _table(title, "<per rank|GiB|<source|<note", shown)


def _ledger(role: RolePlan, book: Ledger, console: Console) -> None:
    console.print(_ledger_table(f"{role.role}: memory", book.rows, book.kv_gib))
    if not book.complete:
        _say(console, "  rows are unknown, so the KV cache is an upper bound", "yellow")


def _role(role: RolePlan, console: Console) -> None:
    _kinds(role, console)
    for line in _explain(role):
        _say(console, f"  {line}")
    if role.book is not None:
        _ledger(role, role.book, console)
    if role.refused:
        _say(console, f"  does not start: {role.refused}", "red")
    if role.capacity is not None:
        held = role.capacity.requests(role.steady.tokens, held=True)
        _say(console, f"  {role.capacity.num_blocks:,} blocks; vLLM will print: {role.capacity.line}", "bold")
        copies = role.layout.shape.cache_copies
        _say(console, f"  one cache holds {held} requests of {role.steady.tokens:,} tokens between decode steps; caches: {copies}")
    if role.graph is not None:
        _say(console, f"  CUDA graphs: {role.graph.meaning}")
    levers = [
        (
            lever.change,
            _number(lever.price_percent, 1, "+"),
            "" if lever.held is None else f"{lever.held:+d}",
            _number(lever.printed, 2, "+"),
        )
        if not lever.refused
        else (lever.change, "", "", Text(lever.refused, style="dim"))
        for lever in role.levers
    ]
    if levers:
        console.print(_table(f"{role.role}: levers", "<change|held price %|requests held|concurrency printed", levers))


def _plan(plan: Plan, console: Console) -> None:
    model = plan.model
    dtypes = " and ".join(dict.fromkeys(model_dtype(model, role.layout.shape) for role in plan.roles.values()))
    assumed = " (ASSUMED plain attention)" if model.assumed else ""
    _say(console, f"{model.architecture}: {model.family}{assumed}, {model.decoder_layers} layers, {dtypes}", "bold")
    for role in plan.roles.values():
        _role(role, console)
    if plan.transfer is not None:
        by_group = " + ".join(str(n) for n in plan.transfer.blocks_by_group)
        total = plan.transfer.total_bytes
        _say(
            console,
            f"hand-over of {plan.transfer.tokens:,} tokens: {by_group} blocks, {_mib(plan.transfer.bytes_per_rank)} MiB per decode rank, "
            f"{_mib(total)} MiB ({total:,} bytes) in all; {plan.transfer.reads_per_rank:,} reads per rank, "
            f"{plan.transfer.bytes_per_rank / plan.transfer.reads_per_rank / 1024:,.0f} KiB each on average",
        )
    for finding in plan.findings:
        price = "" if finding.price_requests is None else f" [costs {finding.price_requests} requests per cache]"
        fix = f" -> {finding.fix}{price}" if finding.fix else ""
        _say(console, f"{finding.severity}: {finding.message}{fix}  ({finding.code})", _COLOURS[finding.severity])
    if plan.emitted is not None:
        _say(console, "values for the recipe:", "bold")
        _say(console, plan.emitted.yaml())


def _search(found: Search, console: Console) -> None:
    columns = "<topology|GPUs|weights GiB|KV GiB|block|held per cache|held per engine|held per GPU|printed|<refused because"
    for role, items in found.roles.items():
        rows = [
            (
                c.name,
                c.gpus,
                f"{c.weights_gib:.2f}",
                f"{c.kv_gib:.2f}",
                c.block_size or "",
                c.held,
                c.engine_held,
                f"{c.held_per_gpu:.1f}",
                f"{c.printed:.2f}",
                Text(c.refused, style="dim"),
            )
            for c in items
        ]
        title = f"{role}: requests of {found.tokens:,} tokens, up to {found.gpus} GPUs"
        console.print(_table(title, columns, rows))
    if found.pairs:
        pairs = [
            (p.prefill.name, p.decode.name, p.gpus, p.decode.engine_held, f"{p.held_per_gpu:.1f}", ", ".join(p.errors) or "ok")
            for p in found.pairs
        ]
        console.print(_table("pairs", "<prefill|<decode|GPUs|held at decode|held per GPU|<hand-over", pairs))


def _engine(engine: MeasuredEngine, console: Console) -> None:
    rows = []
    for row in engine.rows:
        rows.append((row.name, _number(row.predicted, 4), _number(row.measured, 4), _number(row.residual, 4, "+"), row.source))
    title = f"{engine.record.name} ({engine.record.role}): predicted against measured: {engine.verdict}"
    console.print(_table(title, "<value|predicted|measured|residual|<source", rows))
    if engine.ledger:
        console.print(_ledger_table("measured memory", engine.ledger, engine.record.fact("kv_gib")))
    if engine.plan is not None and engine.plan.graph is not None:
        _say(console, f"  CUDA graphs: {engine.plan.graph.meaning}")
    if engine.problem:
        _say(console, engine.problem, "yellow")


def render(result: Result, console: Console) -> None:
    """Print a result. A pipe has no width of its own, so tables get one that does not fold them."""
    if not console.is_terminal:
        console.width = max(console.width, 150)
    if isinstance(result, Plan):
        _plan(result, console)
    elif isinstance(result, Search):
        _search(result, console)
    else:
        for engine in result.engines:
            _engine(engine, console)
        rows = [(r.name, _number(r.predicted, 0), _number(r.measured, 0), _number(r.residual, 0, "+"), r.source) for r in result.transfers]
        if rows:
            console.print(_table("cache handed over", "<window|predicted|measured|residual|<source", rows))
