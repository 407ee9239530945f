"""What goes on while a plan is made: what the planner tells, and what of it a person sees.

On a terminal that is one live line: what is being done, trials, the best so far, the time left. Elsewhere it is a plain
line for each trial. Either way it goes to standard error: standard output is the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 90
"""Columns of a terminal that has room for a bar and the time so far."""


class Progress(Protocol):
    """What the planner tells while it works. Calls come from one thread, and return at once."""

    def phase(self, text: str) -> None:
        """What is being done now, in a few words: ``recording``, ``looking at cuda:0``, ``trial 3: warming up``."""

    def expect(self, *, trials: int | None = None, seconds: float | None = None) -> None:
        """Measured trials that are still to be run here, at most, and seconds left for them; None: no limit known.

        Called when trials begin, and again whenever one of the two turns out to be smaller.
        """

    def trial_started(self, text: str) -> None:
        """A trial begins here: ``bf16-amp, micro-batch 8``."""

    def trial_ended(self, text: str, *, tokens_per_s: float | None = None, problem: str = "") -> None:
        """It ended: measured at so many tokens a second, or with a problem, a clause: ``the device ran out of memory``.

        It may end without having started here.
        """

    def best(self, tokens_per_s: float) -> None:
        """Something this fast is known without a trial here: kept from before, or from another worker."""


class NoProgress:
    """Shows nothing, and knows what could be shown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations: list[float] = []
        self._began: float | None = None
        self._deadline: float | None = None
        self.trials_done = 0
        """Trials that ended here."""
        self.trials_at_most: int | None = None
        """Those, and the ones still to be run at most; None: not known."""
        self.best_tokens_per_s: float | None = None
        """The fastest that is known to run."""

    def phase(self, text: str) -> None:
        """See Progress."""

    def expect(self, *, trials: int | None = None, seconds: float | None = None) -> None:
        """See Progress."""
        self.trials_at_most = None if trials is None else self.trials_done + trials
        self._deadline = None if seconds is None else self._clock() + seconds

    def trial_started(self, text: str) -> None:
        """See Progress."""
        self._began = self._clock()

    def trial_ended(self, text: str, *, tokens_per_s: float | None = None, problem: str = "") -> None:
        """See Progress."""
        self.trials_done += 1
        if self._began is not None:
            self._durations.append(self._clock() - self._began)
            self._began = None
        if tokens_per_s is not None and not problem:
            self.best(tokens_per_s)

    def best(self, tokens_per_s: float) -> None:
        """See Progress."""
        self.best_tokens_per_s = max(tokens_per_s, self.best_tokens_per_s or 0.0)

    def seconds_left(self) -> float | None:
        """Until the trials are over, at most: by the time that they may take, and by how long they took so far."""
        now = self._clock()
        bounds = [] if self._deadline is None else [self._deadline - now]
        if self.trials_at_most is not None and self._durations:
            mean = sum(self._durations) / len(self._durations)
            running = 0.0 if self._began is None else min(mean, now - self._began)
            bounds.append((self.trials_at_most - self.trials_done) * mean - running)
        return max(0.0, min(bounds)) if bounds else None


class LineProgress(NoProgress):
    """A plain line for each trial that ended."""

    def __init__(self, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._write = write

    def trial_ended(self, text: str, *, tokens_per_s: float | None = None, problem: str = "") -> None:
        """See Progress."""
        super().trial_ended(text, tokens_per_s=tokens_per_s, problem=problem)
        result = problem or ("" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s")
        self._write("; ".join(part for part in (f"trial {_count(self)}: {text}: {result}", _best(self)) if part))


class BarProgress(NoProgress):
    """One live line at the bottom of a terminal, while it is entered."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Line
        from rich.table import Column

        super().__init__(clock)
        one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        wide = [BarColumn(bar_width=16), TimeElapsedColumn()] if console.width >= WIDE else []
        self._line = Line(
            SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
            TextColumn("{task.description}", markup=False, table_column=one_line),
            *wide[:1],
            _facts_column(self),
            *wide[1:],
            console=console,
            expand=True,
            transient=True,
            refresh_per_second=5,
            # what is printed to standard output while the line is shown would go to standard error
            redirect_stdout=False,
        )
        self._task = self._line.add_task("", total=None)

    def __enter__(self) -> BarProgress:
        self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def phase(self, text: str) -> None:
        """See Progress."""
        self._line.update(self._task, description=text)

    def expect(self, *, trials: int | None = None, seconds: float | None = None) -> None:
        """See Progress."""
        super().expect(trials=trials, seconds=seconds)
        self._line.update(self._task, total=self.trials_at_most, completed=self.trials_done)

    def trial_started(self, text: str) -> None:
        """See Progress."""
        super().trial_started(text)
        self.phase(f"trial {self.trials_done + 1}: {text}")

    def trial_ended(self, text: str, *, tokens_per_s: float | None = None, problem: str = "") -> None:
        """See Progress."""
        super().trial_ended(text, tokens_per_s=tokens_per_s, problem=problem)
        self._line.update(self._task, completed=self.trials_done)


@contextmanager
def showing(*, quiet: bool = False, console: Console | None = None) -> Iterator[NoProgress]:
    """Progress as fits where it goes: live on a terminal, plain lines elsewhere, nothing when quiet.

    ``console`` is standard error's when none is given.
    """
    if quiet:
        yield NoProgress()
        return
    import sys

    from rich.console import Console

    # rich takes FORCE_COLOR for a terminal, and TTY_INTERACTIVE for one that can move its cursor: a log is neither
    console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
    if console.is_terminal and console.is_interactive and not console.is_dumb_terminal:
        with BarProgress(console) as bar:
            yield bar
    else:
        file = console.file
        yield LineProgress(lambda line: print(line, file=file, flush=True))


def _facts_column(progress: NoProgress) -> Any:
    """Trials done, the best so far, the time left: looked up whenever the line is drawn."""
    from rich.progress import ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class Facts(ProgressColumn):
        def render(self, task: object) -> Text:
            return Text(", ".join(_facts(progress)))

    return Facts(table_column=Column(no_wrap=True))


def _facts(progress: NoProgress) -> Iterator[str]:
    if progress.trials_at_most is not None:
        yield f"{progress.trials_done}/{progress.trials_at_most}"
    elif progress.trials_done:
        yield str(progress.trials_done)
    if best := _best(progress):
        yield best
    if (seconds := progress.seconds_left()) is not None:
        minutes, rest = divmod(round(seconds), 60)
        yield f"{minutes}:{rest:02} left at most"


def _count(progress: NoProgress) -> str:
    at_most = progress.trials_at_most
    return f"{progress.trials_done}" if at_most is None else f"{progress.trials_done} of at most {at_most}"


def _best(progress: NoProgress) -> str:
    return "" if progress.best_tokens_per_s is None else f"best {progress.best_tokens_per_s:,.0f} tokens/s"
