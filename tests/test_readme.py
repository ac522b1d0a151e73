"""Commands and files of README and of the guide to policies, executed as they are printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "policies.md").read_text()
BLOCK = re.compile(
    r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL
)
BLOCKS = [match.groupdict() for text in (README, GUIDE) for match in BLOCK.finditer(text)]


def commands() -> list[str]:
    """Every `simulate` line, in order, setup lines left out."""
    lines = [
        line for block in BLOCKS if block["kind"] == "bash" for line in block["text"].split("\n")
    ]
    return [line for line in lines if line.startswith("simulate ")]


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    for block in BLOCKS:
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
    assert len(commands()) > 10
    for command in commands():
        arguments = shlex.split(command, comments=True)[1:]
        run = subprocess.run(
            [sys.executable, "-m", "simulator.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"


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
