"""Where trials are kept and shared: the storage text of a request as an Optuna storage."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import cache
from planner.errors import InputError, Problem
from planner.request import without_password

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileOpenLock, JournalFileSymlinkLock

ACCEPTED = (
    "a journal's file (journal:PATH, or a path that ends in .log or .journal), or a database's URL such as "
    "sqlite:///trials.db or postgresql+psycopg://user@host/trials"
)
CONNECT_S = 10
"""Seconds to wait for a database server."""
_CREATING = 10
"""How often creating a new database's tables is tried again because another worker creates them just then."""
_ENDINGS = (".log", ".journal")


def default_journal(name: str) -> Path:
    """Where the study of this name is kept when the request names no storage."""
    return cache.folder() / "studies" / f"{name}.journal"


def journal_path(text: str) -> Path | None:
    """The file that a storage's text names; None where it names a database or nothing known."""
    if text.startswith("journal:"):
        return Path(text.removeprefix("journal:")).expanduser()
    return Path(text).expanduser() if text.endswith(_ENDINGS) and "://" not in text else None


def open_storage(text: str | None, name: str) -> BaseStorage:
    """The storage that a request names; None: the study's own journal in the user's cache.

    Raises InputError for the argument ``storage`` when the text names nothing known, its driver is missing, its server
    does not answer or its file can't be used; OSError where the cache can't be written.
    """
    if text is None:
        return _default(name)
    path = journal_path(text)
    if path is not None:
        try:
            return _journal(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise _refused(text, f"can't be written ({reason})", "name a file in a folder that can") from error
        except ValueError as error:
            raise _refused(text, "is a file, but no journal of trials", "name another file, or remove it") from error
    if "://" not in text:
        raise _refused(text, "", "give one of these")
    return _database(text)


def _refused(text: str, why: str, remedy: str) -> InputError:
    got = f"got {without_password(text)!r}{f', which {why}' if why else ''}"
    return InputError([Problem(argument="storage", message=f"{got}; accepted: {ACCEPTED}; {remedy}")])


# -- journals --------------------------------------------------------------------------------------------------------


def _default(name: str) -> BaseStorage:
    path = default_journal(name)
    try:
        return _journal(path)
    except ValueError:  # nothing is lost that is only here: measurements are kept in files of their own
        path.replace(path.with_name(f"{path.name}.broken-{time.time_ns()}"))
        return _journal(path)


def _journal(path: Path) -> BaseStorage:
    """Raises OSError where the file can't be used, ValueError where it is no journal."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    with path.open("ab"):
        pass
    lock.acquire()
    try:
        _mend(path)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _lock(path: Path) -> JournalFileSymlinkLock | JournalFileOpenLock:
    """By a symbolic link, which also holds on old network file systems; where there are none, by an exclusive file."""
    from optuna.storages.journal import JournalFileOpenLock, JournalFileSymlinkLock

    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as probe:
            (Path(probe) / "link").symlink_to(path)
    except (OSError, NotImplementedError):
        return JournalFileOpenLock(str(path))
    return JournalFileSymlinkLock(str(path))


def _mend(path: Path) -> None:
    """Cut off what a killed process left of its last line: nothing after it could be read. Raises ValueError.

    Optuna's journal (storages/journal/_file.py, append_logs) writes several operations at once, and doesn't look
    whether the line before ended.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    for line in whole.splitlines():
        entry = json.loads(line)
        if not isinstance(entry, dict) or "op_code" not in entry:
            raise ValueError("no journal")
    if len(whole) < len(content):
        if not whole and not content.startswith(b"{"):
            raise ValueError("no journal")
        os.truncate(path, len(whole))


# -- databases -------------------------------------------------------------------------------------------------------


def _database(text: str) -> BaseStorage:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

    try:
        url, engine = _engine(text)
        for _ in range(_CREATING):
            try:
                return RDBStorage(url, engine_kwargs=engine)
            except SQLAlchemyError as error:  # tables are looked for, then created: another worker was in between
                if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                    raise
                time.sleep(0.2)
        return RDBStorage(url, engine_kwargs=engine)
    except ArgumentError as error:
        known = "has no known kind of database" if isinstance(error, NoSuchModuleError) else "is no URL"
        raise _refused(text, known, "give one of these") from error
    except ImportError as error:
        raise _refused(text, "needs a driver that is not installed", _driver(text)) from error
    except (SQLAlchemyError, OSError, RuntimeError) as error:
        why = without_password(_first_line(getattr(error, "orig", None) or error))
        remedy = "start the server, or correct the address, user or password"
        raise _refused(text, f"can't be opened ({why})", remedy) from error


def _engine(text: str) -> tuple[str, dict[str, Any]]:
    """The URL with a driver that is installed, and how to connect."""
    from sqlalchemy.engine import make_url

    url = make_url(text)
    backend = url.get_backend_name()
    if url.drivername == "postgresql" and importlib.util.find_spec("psycopg"):
        url = url.set(drivername="postgresql+psycopg")  # SQLAlchemy's default is psycopg2 before 2.1
    # a server that was restarted meanwhile has closed the connections: look before using one
    options: dict[str, Any] = {"pool_pre_ping": True}
    if backend == "postgresql":
        options["connect_args"] = {"connect_timeout": CONNECT_S}
    if backend == "sqlite":
        options["connect_args"] = {"timeout": 60}  # one writer at a time: others wait
        with suppress(OSError):
            if url.database:
                Path(url.database).expanduser().parent.mkdir(parents=True, exist_ok=True)
    return url.render_as_string(hide_password=False), options


def _driver(text: str) -> str:
    kind = text.split("://", 1)[0]
    if kind.startswith("postgresql"):
        return "pip install 'psycopg[binary]' and start the URL with postgresql+psycopg://"
    return f"install the driver that SQLAlchemy needs for {kind}"


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
