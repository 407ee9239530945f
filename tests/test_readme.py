"""The README says what is so."""

import re

import pytest
import readme
from click.testing import CliRunner

from planner import cli
from planner.emit.engines import ENGINES
from planner.request import make_worker_request

TEXT = readme.README.read_text()


def blocks(language):
    """The README's code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def headings(report):
    """A report's lines that start at the margin and hold no numbers: its sections."""
    return [line for line in report.splitlines() if line and not line.startswith(" ") and ":" not in line][1:]


def test_help_is_the_commands_help():
    """The options shown are the command's (python tests/readme.py help writes them)."""
    assert readme.help_text().splitlines() == readme.generated(TEXT, "help").splitlines()


def test_two_commands_stand_first():
    """Set-up with the main job, then set-up with the tests."""
    expected = ["pip install . && plan --vram 8GB --model bert-base-uncased", "pip install '.[test]' && pytest"]
    assert expected == blocks("bash")[0].splitlines()


def test_plan_commands_parse():
    """Every plan command shown is one that the command line takes."""
    shown = [line.split() for block in blocks("bash") for line in block.splitlines() if line.startswith("plan ")]
    for words in shown:
        if words[1] == "export":
            params = cli.command.commands["export"].make_context("export", words[2:]).params
            assert params["to"] in ENGINES
            continue
        if words[1] == "worker":
            params = cli.command.commands["worker"].make_context("worker", words[2:]).params
            assert make_worker_request(**{k: v for k, v in params.items() if k != "quiet"})
            continue
        if words[1] == "compare":
            assert cli.command.commands["compare"].make_context("compare", words[2:]).params["data"]
            continue
        context = cli.command.make_context("plan", words[1:])
        outputs = ("out", "snapshot", "as_json", "quiet")
        assert cli._request({k: v for k, v in context.params.items() if k not in outputs}, None)
    assert shown


def test_exit_codes_are_the_commands():
    """The table of exit codes says what the help says."""
    table = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|$", TEXT, re.MULTILINE))
    help_line = " ".join(CliRunner().invoke(cli.command, ["--help"]).output.split())
    assert table
    assert [] == [f"{code} {text}" for code, text in table.items() if f"{code} {text}" not in help_line]


@pytest.mark.slow
def test_sample_plan_has_the_sections_of_a_real_one():
    """The sample is a real report (python tests/readme.py plan writes it); its numbers move with the libraries."""
    shown = headings(readme.generated(TEXT, "plan"))
    assert "Choice" in shown
    assert headings(readme.sample_plan()) == shown


@pytest.mark.slow
def test_python_blocks_run(tmp_path, monkeypatch):
    """The Python shown runs from top to bottom."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["p"].peak.total_bytes <= namespace["p"].peak.ceiling_bytes
