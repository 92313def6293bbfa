"""One picture: where a GPU's memory goes, and where one request's bytes go, role by role. Plain SVG, no dependency."""

from __future__ import annotations

from html import escape

from .roleplan import Plan, RolePlan

_COLOURS = ("#3b6ea5", "#e08a3c", "#5a9e6f", "#b65f8e", "#8a7fc0", "#c9b04a", "#6fb3c9", "#999999")
_WIDTH, _BAR, _LEFT = 960, 26, 150
_SPAN = _WIDTH - _LEFT - 20
_MIB = 1 << 20

Part = tuple[str, float]


def ladder_parts(role: RolePlan) -> list[Part]:
    """Rows of the ledger as positive GiB that add up to the GPU's memory; unknown rows are left out (they are inside the KV part)."""
    book = role.book
    if book is None or len(book.rows) < 2:
        return []
    taken = [(row.name, -row.gib) for row in book.rows if row.gib is not None and not row.inside and row.gib < 0]
    return [*taken, ("KV cache" if book.complete else "KV cache (upper bound)", book.kv_gib)]


def request_parts(role: RolePlan, *, held: bool) -> list[Part]:
    """One request's MiB on one rank by kind of layer."""
    return [(kind.label, (kind.steady_bytes if held else kind.admission_bytes) / _MIB) for kind in role.kinds]


def _bar(y: int, name: str, parts: list[Part], unit: str, full: float) -> list[str]:
    lines = [f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>']
    x = float(_LEFT)
    for i, (label, value) in enumerate(parts):
        width = _SPAN * value / full
        text = escape(f"{label}: {value:,.2f} {unit}")
        colour = _COLOURS[i % len(_COLOURS)]
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"><title>{text}</title></rect>')
        if width > 90:
            lines.append(f'<text x="{x + 5:.1f}" y="{y + 17}" fill="#fff">{escape(label[: int(width / 7)])}</text>')
        x += width
    lines.append(f'<text x="{x + 5:.1f}" y="{y + 17}">{sum(value for _, value in parts):,.1f} {unit}</text>')
    return lines


def _legend(y: int, parts: list[Part], unit: str) -> tuple[list[str], int]:
    lines = []
    for i, (label, value) in enumerate(parts):
        row, column = divmod(i, 3)
        x, top = _LEFT + column * 270, y + row * 18
        lines.append(f'<rect x="{x}" y="{top}" width="10" height="10" fill="{_COLOURS[i % len(_COLOURS)]}"/>')
        lines.append(f'<text x="{x + 15}" y="{top + 9}" font-size="11">{escape(label)} {value:,.2f} {unit}</text>')
    return lines, y + (len(parts) + 2) // 3 * 18 + 8


def _section(y: int, title: str, bars: list[tuple[str, list[Part]]], unit: str) -> tuple[list[str], int]:
    """A heading, one bar per entry on a common scale, and a legend under each."""
    bars = [(name, parts) for name, parts in bars if parts]
    if not bars:
        return [], y
    full = 1.15 * max(sum(value for _, value in parts) for _, parts in bars)
    lines = [f'<text x="10" y="{y + 14}" font-weight="bold" font-size="14">{escape(title)}</text>']
    y += 26
    for name, parts in bars:
        lines += _bar(y, name, parts, unit, full)
        legend, y = _legend(y + _BAR + 6, parts, unit)
        lines += legend
    return lines, y + 6


def drawn(plan: Plan) -> str:
    """The SVG text."""
    lines, y = _section(10, "One GPU's memory", [(name, ladder_parts(role)) for name, role in plan.roles.items()], "GiB")
    bars = [
        (f"{name}, {word}", request_parts(role, held=held))
        for name, role in plan.roles.items()
        for word, held in (("charged", False), ("held", True))
    ]
    more, y = _section(y, f"One request of {plan.tokens:,} tokens on one rank", bars, "MiB")
    body = "\n".join([*lines, *more])
    style = "text{font-family:system-ui,sans-serif;font-size:12px}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" role="img">'
    title = escape(f"{plan.model.architecture}: memory and price of a request")
    return f'{head}\n<title>{title}</title>\n<style>{style}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
