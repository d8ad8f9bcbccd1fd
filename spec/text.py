"""Text for people: figures and tables. `spec.fields` has what is exact, as a YAML has it."""

from __future__ import annotations

from collections.abc import Sequence


def format_number(value: float, digits: int = 3) -> str:
    """Format a number for people: with so many digits, and no exponent below a million."""
    return f"{float(f'{value:.{digits}g}'):g}"


def format_size(size: int) -> str:
    """Format a size in bytes for people: four digits in the largest binary unit."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.4g}{unit}"
    return f"{size}B"


def decimal_size(size: float) -> str:
    """Format a size in bytes for people as disks are sold, by powers of 1000: like 4.2 TB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.3g} {unit}"
    return f"{size:.3g} B"


def bytes_text(count: float) -> str:
    """Bytes in three digits or four, like 1.25G, for a column of a table."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1024
    return f"{count:.0f}P"


def span(seconds: float) -> str:
    """Seconds as an operator reads them."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def seconds(value: float) -> str:
    """A time like 420 ms or 1.23 s."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def aligned(rows: Sequence[Sequence[str]], left: int | None = None, gap: int = 2) -> list[str]:
    """The lines of a table, with a gap between columns; the first `left` columns are flush left, or
    all of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    at = len(widths) if left is None else left
    cells = ([*map(str.ljust, r[:at], widths), *map(str.rjust, r[at:], widths[at:])] for r in rows)
    return [(" " * gap).join(row).rstrip() for row in cells]
