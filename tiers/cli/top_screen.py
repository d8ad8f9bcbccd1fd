"""What does `kvtiers top` draw? What `EnginesWatch` saw last, in an app of textual."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from spec.errors import one_line
from spec.text import bytes_text, format_number, span
from tiers.cli.status import HEADS, ghost_lines, notes, row, summary
from tiers.control.engine_status import TierStatus
from tiers.control.watch_engines import HANGS, Account, EnginesWatch, Watched
from tiers.explain.accounts import lines

REDRAWN = 0.5
"""Seconds between looks at what was seen."""
SURE = 5.0
"""Seconds within which a key that changes a tier is to be pressed again."""
LATE = 4.0
"""Seconds without an answer after which the screen says so."""
REQUEST_HEADS = ("request", "state", "prompt", "cached", "computed", "waited ms", "loaded")
WAITS = ("lookup", "notice", "other_load", "load")
"""Of an account's milliseconds: those that the request waited for tiers."""
OTHER_VERSION = "an answer of another version"
NOT_OURS = (LookupError, TypeError, AttributeError, ValueError)
"""What such an answer raises where it is read."""
STATES = {
    "open": "green",
    **dict.fromkeys(("opening", "degraded"), "yellow"),
    **dict.fromkeys(("down", "refused"), "red"),
}
"""Colors of states."""
PAUSES = {"both": "neither loads nor stores", "writes": "stores nothing more"}
Row = tuple[str, ...]


class Lines(Static):
    """A text as it is, without markup. An empty one takes no line."""

    _shown: str | None = None

    def show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self.display = bool(text)
            self.update(Text(text))


class Rows(DataTable[Text]):
    """A table whose first column is cut where the others leave too little room."""

    def __init__(self, heads: Row, **more: Any) -> None:
        super().__init__(cursor_type="row", cell_padding=0, **more)
        self._heads = heads
        self._drawn: object = None

    def fill(self, rows: Mapping[str, Row], width: int) -> None:
        """Show these rows by their keys, in a width. The cursor stays on its row."""
        drawn = list(rows.items()), width
        if drawn == self._drawn:
            return
        self._drawn = drawn
        place, key = self.cursor_row, self.key
        texts = [[Text(cell) for cell in cells] for cells in (self._heads, *rows.values())]
        first, *others = (max(t.cell_len for t in column) for column in zip(*texts, strict=True))
        first = max(6, min(first, width - sum(others) - len(others)))
        self.clear(columns=True)
        for head, size in zip(texts[0], (first, *others), strict=True):
            self.add_column(head, width=size + 1)
        for name, cells in zip(rows, texts[1:], strict=True):
            cells[0].truncate(first, overflow="ellipsis")
            cells[1].stylize(STATES.get(cells[1].plain, ""))
            self.add_row(*cells, key=name)
        self.move_cursor(row=[*rows].index(key) if key in rows else place, animate=False)

    @property
    def key(self) -> str:
        """The key of the cursor's row; empty where no row is."""
        if not self.row_count:
            return ""
        return str(self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value)


class RequestRows(Rows):
    """Requests, each of which has an account."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "explain")]


class AccountScreen(ModalScreen[None]):
    """One request's account, over the other screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "app.pop_screen", "back", key_display="esc")
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(self._text))
        yield Footer()


class Top(App[None]):
    """The tiers of one engine at a time, or its requests."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; padding: 0 1; }
    #head { background: $panel; }
    #problem { color: $text-error; text-style: bold; }
    ContentSwitcher, #detail { height: 1fr; }
    Rows { overflow-x: hidden; padding: 0 0 0 1; }
    #tiers Rows { max-height: 50%; margin: 0 0 1 0; }
    #requests Rows { height: 1fr; border-top: solid $primary; }
    AccountScreen VerticalScroll { margin: 1 2; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "view", "requests or tiers"),
        Binding("p", "pause('both')", "pause"),
        Binding("d", "pause('writes')", "drain"),
        Binding("left", "engine(-1)", "engine before", priority=True),
        Binding("right", "engine(1)", "next engine", priority=True),
        Binding("q,ctrl+c", "quit", "quit", key_display="q", priority=True),
    ]

    def __init__(self, watch: EnginesWatch) -> None:
        """`watch` is the caller's to close."""
        super().__init__()
        self.animation_level = "none"  # each frame crosses a network
        self._watch = watch
        self._chosen: Path | None = None
        self._count = 0
        self._asked: tuple[Path, str, str | None] | None = None
        self._asked_at = 0.0
        self._accounts: dict[str, Account] = {}
        self._head, self._problem = Lines(id="head"), Lines(id="problem")
        self._tiers, self._detail = Rows(HEADS), Lines()
        self._no_requests = Lines()
        self._last, self._slowest = RequestRows(REQUEST_HEADS), RequestRows(REQUEST_HEADS)
        self._last.border_title, self._slowest.border_title = "last", "waited longest"
        self._views = ContentSwitcher(initial="tiers")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._problem
        with self._views:
            with Vertical(id="tiers"):
                yield self._tiers
                with VerticalScroll(id="detail"):
                    yield self._detail
            with Vertical(id="requests"):
                yield self._no_requests
                yield self._last
                yield self._slowest
        yield Footer()

    def on_mount(self) -> None:
        self.draw()
        self.set_interval(REDRAWN, self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A single engine has no keys for others, and requests have none for tiers."""
        if action == "pause":
            return self._views.current == "tiers"
        return action != "engine" or len(self._engines()) > 1

    # -- keys --------------------------------------------------------------------------------

    def action_view(self) -> None:
        self._views.current = "requests" if self._views.current == "tiers" else "tiers"
        self.set_focus(None)
        self.refresh_bindings()
        self.draw()

    def action_engine(self, step: int) -> None:
        paths = [seen.path for seen in self._engines()]
        if self._chosen in paths:
            self._chosen = paths[(paths.index(self._chosen) + step) % len(paths)]
        self.draw()

    def action_pause(self, paused: str) -> None:
        """Have the selected tier pause, or go on if it is paused: the second time in a row."""
        seen = next((seen for seen in self._engines() if seen.path == self._chosen), None)
        tiers = () if seen is None or seen.status is None else seen.status.tiers
        tier = next((tier for tier in tiers if tier.name == self._tiers.key), None)
        if seen is None or tier is None or self._views.current != "tiers":
            return
        change = (seen.path, tier.name, None if tier.paused else paused)
        is_sure = self._asked == change and time.monotonic() - self._asked_at < SURE
        self._asked, self._asked_at = None if is_sure else change, time.monotonic()
        if is_sure:
            self._watch.pause(*change)
        self.draw()

    def _question(self, path: Path) -> str:
        """What the key that was pressed last would do; else what came of the last change."""
        if self._asked is None or time.monotonic() - self._asked_at >= SURE:
            return self._watch.news(path)
        _, tier, paused = self._asked
        what = "goes on" if paused is None else PAUSES[paused]
        return f"press the key again within {SURE:g} s: tier {one_line(tier)} {what}"

    def on_data_table_row_highlighted(self) -> None:
        self.draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        account = self._accounts.get(str(event.row_key.value))
        if account is not None:
            self.push_screen(AccountScreen(account_text(account)))

    # -- drawing -----------------------------------------------------------------------------

    def _engines(self) -> list[Watched]:
        """The engines to show. One that is gone leaves when another is chosen."""
        return [
            seen for seen in self._watch.watched() if not seen.is_gone or seen.path == self._chosen
        ]

    def draw(self) -> None:
        """Show what was seen last of the chosen engine. The view's first table takes the keys where
        nothing does, as behind a table that hid."""
        if self.screen_stack and self.focused is None:  # it has no screen while it closes
            (self._tiers if self._views.current == "tiers" else self._last).focus()
        engines = self._engines()
        seen = next((seen for seen in engines if seen.path == self._chosen), None)
        if seen is None:
            if not engines:
                self._head.show(f"no engine answers in {one_line(str(self._watch.folder))}")
                return
            seen = engines[0]
        self._chosen = seen.path
        if len(engines) != self._count:
            self._count = len(engines)
            self.refresh_bindings()
        self._watch.explain(seen.path if self._views.current == "requests" else None)
        place = f" ({engines.index(seen) + 1} of {len(engines)})" if len(engines) > 1 else ""
        about = "" if seen.status is None else f": {summary(seen.status)}"
        self._head.show(f"engine {seen.engine}{place}{about}")
        self._problem.show(problem(seen, time.monotonic()) or self._question(seen.path))
        width = self.size.width - 1
        tiers = {} if seen.status is None else {tier.name: tier for tier in seen.status.tiers}
        self._tiers.fill({name: row(tier) for name, tier in tiers.items()}, width)
        tier = tiers.get(self._tiers.key)
        detail = [] if tier is None else [*tier_lines(tier)]
        ghosts = [] if seen.status is None else [*ghost_lines(seen.status.ghosts)]
        self._detail.show("\n".join(detail + [""] * bool(ghosts) + ghosts))
        self._draw_requests(seen, width)

    def _draw_requests(self, seen: Watched, width: int) -> None:
        last, slowest = keyed(seen.last or ()), keyed(seen.slowest)
        self._accounts = last | slowest
        none = "the engine is asked" if seen.last is None else "" if last else "no request yet"
        self._no_requests.show(seen.no_requests or none)
        for table, accounts in ((self._last, last), (self._slowest, slowest)):
            table.display = bool(accounts)
            rows = {key: request_row(account) for key, account in accounts.items()}
            table.fill(rows, width - table.styles.scrollbar_size_vertical)


def problem(seen: Watched, now: float) -> str:
    """Why an engine's status is not of now; empty if it is."""
    ago = span(now - seen.since)
    of_then = "" if seen.status is None else f"; this is its answer of {ago} ago"
    if seen.is_gone:
        return f"the engine is gone{of_then}"
    if seen.problem:
        return f"{seen.problem}{of_then}"
    if now - seen.since > LATE:
        return f"{HANGS}{of_then}"
    return "" if seen.status is not None else "the engine is asked"


def tier_lines(tier: TierStatus) -> Iterator[str]:
    """All of the selected tier that its row lacks."""
    fill = bytes_text(tier.used_bytes) if tier.capacity_bytes else row(tier)[2]
    works = "see below" if tier.paused or tier.state != "open" else "reads and writes work"
    yield f"{one_line(tier.name)} ({one_line(tier.type)}): {fill}; {works}"
    yield from notes(tier)
    if tier.token_share is not None:
        yield f"since the start it loaded {tier.token_share:.1%} of the prompts' tokens"
    if tier.load_latency_seconds is not None:
        rate = tier.measured_load_bytes_per_second
        per_second = "" if rate is None else f", then {bytes_text(rate)}/s"
        took = format_number(1000 * tier.load_latency_seconds)
        yield f"a load takes {took} ms{per_second}, as measured"
    counts = {
        "that looked it up": "lookups",
        "that loaded": "hits",
        "that computed sooner": "recompute_preferred",
        "too short to load": "recompute_preferred_engine",
        "that could not wait so long": "recompute_late",
        "whose lookup was given up": "lookup_timeouts",
    }
    sums = {what: tier.sums.get(name, 0.0) for what, name in counts.items()}
    if found := [f"{count:,.0f} {what}" for what, count in sums.items() if count]:
        yield f"requests: {', '.join(found)}"
    if failures := tier.sums.get("tier_failures"):
        yield f"operations that failed: {failures:,.0f}"


def keyed(accounts: Sequence[Account]) -> dict[str, Account]:
    """Accounts by a key each that stays; two requests may have one name."""
    return {f"{account.get('began')} {account.get('request')}": account for account in accounts}


def request_row(account: Account) -> Row:
    """The cells of one request: its last attempt's tokens, and what it waited for tiers in all."""
    try:
        attempts = account["attempts"]
        tokens = attempts[-1] if attempts else {"own_cache": 0, "computed": None, "loaded": {}}
        times = [attempt["milliseconds"] for attempt in attempts]
        waited = sum(of_attempt[wait] or 0.0 for of_attempt in times for wait in WAITS)
        by_tier = {one_line(str(tier)): n for tier, n in tokens["loaded"].items() if n}
        loaded = ", ".join(f"{tier} {n}" for tier, n in by_tier.items())
        if len(by_tier) > 2:  # or they leave no room for the request's name; its account has each
            loaded = f"{sum(by_tier.values())} {'+'.join(by_tier)}"
        computed = "-" if tokens["computed"] is None else f"{tokens['computed']:,}"
        return (
            one_line(str(account["request"])),
            one_line(str(account["state"])),
            *(f"{account['prompt_tokens']:,}", f"{tokens['own_cache']:,}", computed),
            *(f"{waited:,.1f}", loaded),
        )
    except NOT_OURS:
        return (OTHER_VERSION, *[""] * (len(REQUEST_HEADS) - 1))


def account_text(account: Account) -> str:
    try:
        return "\n".join(lines(account))
    except NOT_OURS:
        return OTHER_VERSION
