"""The Optuna study that holds the trials of one request: shared by its workers, and gone on with after a crash.

No two workers run the same configuration. A worker stores its choice first, then looks at the trials with lower
numbers, which the storage hands out in order: it yields to any of them that has chosen the same, and waits for those
that have not chosen yet (Lamport, "A New Solution of Dijkstra's Concurrent Programming Problem", 1974: the bakery).
A worker that died is found by its process on its own host, and by its trial's age from another one; its trial is
told FAIL, which takes it out of everybody's way, and its configuration may be run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from planner.errors import InputError, Problem, TrialError
from planner.measure.protocol import ABOUT_THE_CONFIGURATION, OUT_OF_MEMORY, Measurement
from planner.storages import journal_path, open_storage
from planner.workers import is_alive, this_worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optuna.storages import BaseStorage

Choice = Mapping[str, str]
"""Field of the configuration to its value's word, as in Space.values."""

CHOOSING_S = 10.0
"""A trial that has not stored its choice for this long is taken for dead: choosing takes a fraction of a second."""
POLL_S = 0.05
"""Between two looks at the others' trials."""
STORAGE_RETRIES_S = 30.0
"""How long a database that went away is waited for before the search gives up."""
YIELDED = "another worker runs it"
"""Reason of a trial that yielded: it does not count."""
INTERRUPTED = "interrupted"
"""Reason of a trial that its user stopped."""
_LOST = "its worker died"


@dataclass(frozen=True, kw_only=True)
class Told:
    """A trial of the study, whoever ran it."""

    choice: Choice
    """What was chosen."""
    measurement: Measurement | None
    """What came out; None while it runs."""
    since: float
    """When it began, in seconds of Unix time as its worker's clock shows it."""
    kept: bool
    """Whether it was not run but measured before this study."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A configuration that this worker alone may run."""

    trial: Trial
    """Optuna's trial."""
    choice: Choice
    """What is to be run."""


class _Chosen(BaseSampler):
    """Hands Optuna the choice that was made: sampling "relative" means all parameters at once."""

    def __init__(self, space: Mapping[str, Sequence[str]], seed: int) -> None:
        self.choice: Choice = {}
        self._space = {name: CategoricalDistribution(list(values)) for name, values in space.items()}
        self._others = RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every field of the configuration."""
        return dict(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The choice."""
        return dict(self.choice)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Not reached for the fields of a configuration; any value for another one."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)


class SharedStudy:
    """The trials of one request in a storage. One for each process; not for threads.

    ``name`` is a digest of everything that decides the outcome, ``space`` the values of each field, ``about`` what a
    worker that joins has to know, ``limit_s`` how long one of this worker's trials can take at most.
    """

    def __init__(
        self,
        storage: str | None,
        *,
        name: str,
        space: Mapping[str, Sequence[str]],
        about: Mapping[str, Any] | None = None,
        limit_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # what happens to trials is told by progress
        self.space = {field: list(values) for field, values in space.items()}
        self.limit_s = limit_s
        self._sampler = _Chosen(self.space, seed)
        self._worker = {**this_worker(), "limit_s": limit_s}
        self.problem = ""
        """Why trials are kept in memory alone, in one line; empty where they are not."""
        self._mine: set[int] = set()
        self._seen: list[FrozenTrial] = []
        self._name, self._is_default = name, storage is None
        try:
            opened = open_storage(storage, name)
            self.study = self._create(opened)
            if about is not None and "about" not in self.study.user_attrs:
                self.study.set_user_attr("about", dict(about))
        except OSError as error:
            self._move_to_memory(error)

    def _create(self, storage: BaseStorage) -> optuna.Study:
        return optuna.create_study(
            storage=storage, study_name=self._name, direction="maximize", sampler=self._sampler, load_if_exists=True
        )

    def _move_to_memory(self, error: OSError) -> None:
        """The journal in the user's cache can't be written any more: go on without, with what was read last."""
        if not self._is_default:
            raise TrialError(f"the trials' journal can't be written ({error.strerror or error})") from error
        self.problem = f"trials can't be kept ({error.strerror or error}): an interrupted search will begin anew"
        self.study = self._create(InMemoryStorage())
        self.study.add_trials([trial for trial in self._seen if trial.state.is_finished()])
        self._mine.clear()

    def trials(self) -> list[Told]:
        """What runs, ended with a measurement, or failed with one."""
        found: list[Told] = []
        for trial in self._all():
            choice, running = self._choice(trial), trial.state == TrialState.RUNNING
            measurement = None if running else _measurement_of(trial)
            if choice is None or not (running or measurement):
                continue
            since = float(trial.user_attrs.get("worker", {}).get("since", 0.0))
            kept = bool(trial.user_attrs.get("kept"))
            found.append(Told(choice=choice, measurement=measurement, since=since, kept=kept))
        return found

    def claim(self, choice: Choice, *, repeat: bool = False) -> Claim | None:
        """The right to run a configuration; None when another worker has it, or has measured it.

        ``repeat``: run it again although it was measured.
        """
        try:
            return self._claim(choice, repeat=repeat)
        except OSError as error:
            self._move_to_memory(error)
            return self._claim(choice, repeat=repeat)

    def _claim(self, choice: Choice, *, repeat: bool) -> Claim | None:
        self._sampler.choice = choice
        trial: Trial = _persistently(self.study.ask)
        self._mine.add(trial.number)
        try:
            _persistently(lambda: trial.set_user_attr("worker", {**self._worker, "since": time.time()}))
            stored = _persistently(
                lambda: {field: trial.suggest_categorical(field, values) for field, values in self.space.items()}
            )
            won = self._comes_first(trial, stored, repeat=repeat)
            if not won:
                self._end(trial, TrialState.PRUNED, reason=YIELDED)
        except UpdateFinishedTrialError:  # the others took this process for dead
            won = False
        except KeyboardInterrupt:
            self._end(trial, TrialState.FAIL, reason=INTERRUPTED)
            raise
        if not won:
            self._mine.discard(trial.number)
            return None
        return Claim(trial=trial, choice=stored)

    def tell(self, claim: Claim, measurement: Measurement, *, over_bytes: float) -> None:
        """What came out. ``over_bytes``: by how much it was over the ceiling, as far as that is known.

        What ran has its speed as value; what didn't fit, or can't be used, 0 and a constraint that is violated: a
        sampler learns from both. What says nothing about the configuration is FAIL, from which none learns.
        """
        state, value, constraints = _outcome(measurement, over_bytes)
        try:
            _persistently(lambda: claim.trial.set_user_attr("measurement", measurement.to_json()))
            for name, violation in constraints.items():
                _persistently(partial(claim.trial.set_constraint, name, violation))
            _persistently(lambda: self.study.tell(claim.trial, value, state=state))
        except (UpdateFinishedTrialError, ValueError):
            if self._state(claim.trial.number) != TrialState.COMPLETE:  # others took this process for dead
                self._add(claim.choice, measurement, over_bytes, worker={**self._worker, "since": time.time()})
        except OSError as error:
            self._move_to_memory(error)
            self._add(claim.choice, measurement, over_bytes)
        finally:
            self._mine.discard(claim.trial.number)

    def give_up(self, claim: Claim) -> None:
        """The trial was interrupted; its configuration may be run again."""
        self._end(claim.trial, TrialState.FAIL, reason=INTERRUPTED)
        self._mine.discard(claim.trial.number)

    def add_kept(self, choice: Choice, measurement: Measurement, *, over_bytes: float) -> None:
        """A measurement from before this study, so that every worker has it."""
        try:
            self._add(choice, measurement, over_bytes, kept=True)
        except OSError as error:
            self._move_to_memory(error)
            self._add(choice, measurement, over_bytes, kept=True)

    def bury(self) -> int:
        """Tell FAIL for trials whose workers died; how many there were."""
        return sum(
            self._end(trial, TrialState.FAIL, reason=_LOST)
            for trial in self._all()
            if trial.state == TrialState.RUNNING and trial.number not in self._mine and self._is_lost(trial)
        )

    # -- others' trials ----------------------------------------------------------------------------------------------

    def _all(self) -> list[FrozenTrial]:
        self._seen = list(_persistently(lambda: self.study.get_trials(deepcopy=False)))
        return self._seen

    def _state(self, number: int) -> TrialState | None:
        return next((trial.state for trial in self._all() if trial.number == number), None)

    def _choice(self, trial: FrozenTrial) -> Choice | None:
        """What a trial has chosen; None while it has not stored all of it."""
        return dict(trial.params) if trial.params.keys() == self.space.keys() else None

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker is None:  # died before it said who it is, or is about to
            started = trial.datetime_start
            return started is not None and time.time() - started.timestamp() > CHOOSING_S
        if worker["host"] == self._worker["host"]:
            return worker["pid"] == self._worker["pid"] or not is_alive(worker)
        return bool(time.time() - worker["since"] > worker["limit_s"] + CHOOSING_S)

    def _comes_first(self, trial: Trial, choice: Choice, *, repeat: bool) -> bool:
        """Whether no trial with a lower number has the same choice, once all of them have chosen."""
        patience = time.monotonic() + CHOOSING_S
        while True:
            found = self._all()
            elders = [t for t in found if t.number < trial.number]
            if any(self._holds(elder, choice, repeat=repeat) for elder in elders):
                return False
            undecided = [t for t in elders if t.state == TrialState.RUNNING and self._choice(t) is None]
            if not undecided:
                return any(t.number == trial.number and t.state == TrialState.RUNNING for t in found)
            for elder in undecided:
                if time.monotonic() > patience or self._is_lost(elder):
                    self._end(elder, TrialState.FAIL, reason=_LOST)
            time.sleep(POLL_S)

    def _holds(self, trial: FrozenTrial, choice: Choice, *, repeat: bool) -> bool:
        if self._choice(trial) != choice:
            return False
        if trial.state == TrialState.RUNNING:
            return trial.number in self._mine or not self._is_lost(trial)
        return not repeat and trial.state == TrialState.COMPLETE and _measurement_of(trial) is not None

    # -- writing -----------------------------------------------------------------------------------------------------

    def _end(self, trial: Trial | FrozenTrial, state: TrialState, *, reason: str) -> bool:
        """Whether it was this call that ended the trial."""
        try:
            if isinstance(trial, Trial):
                _persistently(lambda: trial.set_user_attr("reason", reason))
            _persistently(lambda: self.study.tell(trial.number, state=state))
        except (UpdateFinishedTrialError, ValueError):  # ended meanwhile
            return False
        except OSError as error:
            self._move_to_memory(error)
        return True

    def _add(self, choice: Choice, measurement: Measurement, over_bytes: float, **attributes: Any) -> None:
        state, value, constraints = _outcome(measurement, over_bytes)
        trial = create_trial(
            state=state,
            value=value,
            params=dict(choice),
            distributions={field: CategoricalDistribution(values) for field, values in self.space.items()},
            user_attrs={"measurement": measurement.to_json(), **attributes},
            constraints=constraints,
        )
        _persistently(lambda: self.study.add_trial(trial))


def _measurement_of(trial: FrozenTrial) -> Measurement | None:
    """What a trial ended with; None for one that has none, or that somebody else put into the study."""
    try:
        return Measurement.from_json(trial.user_attrs["measurement"])
    except (KeyError, TypeError, ValueError):
        return None


def _outcome(measurement: Measurement, over_bytes: float) -> tuple[TrialState, float | None, dict[str, float]]:
    """State, value and constraints that a measurement is told with; constraints of at most zero are kept."""
    if measurement.ok:
        return TrialState.COMPLETE, float(measurement.tokens_per_s or 0.0), {"memory": min(over_bytes, 0.0)}
    if measurement.status in OUT_OF_MEMORY:
        return TrialState.COMPLETE, 0.0, {"memory": max(over_bytes, 1.0)}
    if measurement.status in ABOUT_THE_CONFIGURATION:
        return TrialState.COMPLETE, 0.0, {"usable": 1.0}
    return TrialState.FAIL, None, {}


def known_studies(storage: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and ``about`` of each study in a storage, oldest first. Raises InputError as ``open_storage`` does."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = journal_path(storage)
    if path is not None and not path.exists():
        message = f"got {storage!r}, which is not there; accepted: the storage of a search; start that first"
        raise InputError([Problem(argument="storage", message=message)])
    opened = open_storage(storage, "")
    summaries: Iterable[Any] = optuna.get_all_study_summaries(storage=opened, include_best_trial=False)
    return [(s.study_name, dict(s.user_attrs["about"])) for s in summaries if "about" in s.user_attrs]


def _persistently(call: Callable[[], Any]) -> Any:
    """Call again while the storage's server is away, for a while. Raises TrialError when it stays away."""
    from sqlalchemy.exc import DBAPIError

    deadline = time.monotonic() + STORAGE_RETRIES_S
    while True:
        try:
            return call()
        except (StorageInternalError, DBAPIError) as error:
            if time.monotonic() > deadline:
                text = " ".join(str(error).split())[:200]
                raise TrialError(f"the storage of the trials went away ({text}); what was measured is kept") from error
            time.sleep(1.0)
