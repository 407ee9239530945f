"""Ctrl-C and SIGTERM: both raise KeyboardInterrupt, and neither is lost.

The first one asks for what there is so far, the second one ends all work on its way out, a third one kills.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SOON_S = 0.05
"""After this, an interrupt that was dropped comes again."""


class Interrupts:
    """Those that came to this process."""

    def __init__(self) -> None:
        self.came = 0
        """How many."""
        self._again = False

    def arrange(self) -> None:
        """Handle both signals from now on; called in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # a shell starts its background jobs with Ctrl-C ignored: it is meant for others
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)
        sys.unraisablehook = self._unraisable

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if not self._again:
            self.came += 1
        self._again = False
        if self.came > 1:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    def _unraisable(self, what: Any) -> None:
        """Python drops what is raised inside a weak reference's callback, where the recorder learns of frees.

        The interrupt comes again. What is being recorded meanwhile, which misses that free, is not kept.
        """
        if not isinstance(what.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(what)
            return
        from planner import cache

        cache.close()
        self._again = True
        # interrupting here and now would be dropped just the same
        timer = threading.Timer(SOON_S, _interrupt_main_thread)
        timer.daemon = True
        timer.start()


def _interrupt_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):
        # a real signal, which ends a wait as well
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


@contextmanager
def interrupts_as_they_are() -> Iterator[None]:
    """An interrupt that a library's code on its way out turned into another error is an interrupt again.

    Optuna 5, study/_optimize.py, _run_trial: its ``finally`` reads a variable that an interrupt left unset.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__context__
        raise


INTERRUPTS = Interrupts()
"""The command's."""
