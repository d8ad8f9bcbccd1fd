"""Every error class of kvtiers, as one tree.

KVTiersError             (in spec/errors.py)
├── SpecError            a chain can't be used; has a line for each reason
├── TierError            a tier could not do what it was asked; the guard makes it a miss
│   ├── TierUnavailable  it may work again: a refused connection, a timeout, an I/O error
│   │   └── TierRefused  its user may not do that there
│   ├── TierFull         no room could be made
│   ├── TierUnusable     not as it is configured: logged once at open, the chain works without it
│   └── TierNotOpen      not now: its place is missing, full or read-only; tried again
├── RecordError          bytes that are not the record they should be
│   └── OtherFormat      whole ones, as another version of kvtiers writes them
├── TraceError           a file that is no trace; has the file and line
└── RecordingError       requests can't be recorded for now

Others stand beside the code that raises them: UnknownPlugin and BrokenPlugin in spec/plugins.py,
UnsupportedEngine in engine/versions.py, StreamError and ServerError in remote/, NotPinned in host/.
"""

from __future__ import annotations

import threading

from spec.errors import KVTiersError as KVTiersError


class TierError(KVTiersError):
    """A tier could not do what it was asked."""


class TierUnavailable(TierError):
    """The tier failed for now and may work again later."""


class TierRefused(TierUnavailable):
    """The tier's user, or its credentials, may not do that there."""


class TierFull(TierError):
    """The tier has no room and could make none."""


class TierUnusable(TierError):
    """The tier can't work as it is configured; only a change by the operator helps."""


class TierNotOpen(TierError):
    """The tier can't be opened for now, and may be later, without a change of its settings."""


class RecordError(KVTiersError):
    """Stored bytes are not the record they were looked up as."""


class OtherFormat(RecordError):
    """Stored bytes are whole, and of a format that another version of kvtiers reads: they are no
    damage."""


class TraceError(KVTiersError):
    """A file is no trace, or has a line that is none of a request."""


class RecordingError(KVTiersError):
    """Requests can't be recorded for now; says what would help."""


def ends_process(error: BaseException) -> bool:
    """Whether it asks this process to end. On another thread a plugin called exit, which fails. Its
    class counts, whatever its `__class__` says."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and issubclass(type(error), KeyboardInterrupt | SystemExit)
