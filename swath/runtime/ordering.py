"""Whether what one process writes to memory is seen by others in the order in which it was written."""

from __future__ import annotations

import platform


def keeps_order() -> bool:
    """Whether this machine keeps the order of stores, as x86 does.

    Python has no instruction that would keep it elsewhere: there, whatever relies on it goes by way of a lock, or of a
    call of the system that both sides make.
    """
    return platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
