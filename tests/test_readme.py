"""Commands and files of README and of the guide to policies, executed as they are printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "policies.md").read_text()
BLOCK = re.compile(
    r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL
)
BLOCKS = [match.groupdict() for text in (README, GUIDE) for match in BLOCK.finditer(text)]


def commands(block) -> list[list[str]]:
    """Arguments of every `simulate` line of a block, in order, setup lines left out."""
    lines = block["text"].split("\n") if block["kind"] == "bash" else []
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("simulate ")]


COMMANDS = [found for found in map(commands, BLOCKS) if found]


def test_commands_are_found():
    assert sum(map(len, COMMANDS)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: " ".join(block[0][:2]))
def test_every_command_runs(block, tmp_path, monkeypatch, capsys):
    """In one process, because each that is started imports torch and scipy for seconds."""
    monkeypatch.chdir(tmp_path)
    for printed in BLOCKS:
        if printed["file"]:
            Path(printed["file"]).write_text(printed["text"])
    for arguments in block:
        monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
        status: object = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code or 0
        said = capsys.readouterr()
        assert status == 0, f"{shlex.join(sys.argv)}\n{said.out}\n{said.err}"


def test_a_command_runs_in_a_process_of_its_own():
    arguments = next(each for block in COMMANDS for each in block if "validate" in each)
    subprocess.run([sys.executable, "-m", "simulator.cli", *arguments], timeout=300, check=True)


@pytest.mark.slow
def test_python_block_runs(capsys):
    for block in BLOCKS:
        if block["kind"] == "python" and not block["file"]:
            exec(compile(block["text"], "README.md", "exec"), {})
    assert "tok/s" in capsys.readouterr().out


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
