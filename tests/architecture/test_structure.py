"""The house rules that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("echo_policies", "traces", "simulator", "gpu_backend")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LONGEST_FILE = 320
LONGEST_FUNCTION = 60
HOST_LOOKS = (".item(", ".tolist(", ".numpy(", ".cpu(", ".nonzero(", "print(")


def test_there_are_sources():
    assert len(SOURCES) > 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_one_noun_long(path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


def test_functions_fit_on_a_screen():
    long = []
    for path in SOURCES:
        if path.name.endswith("cli.py"):
            continue  # one parameter per option
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node)
                length = node.end_lineno - node.lineno - len((doc or "").splitlines())
                if length > LONGEST_FUNCTION:
                    long.append(f"{path.name}:{node.name} has {length} lines")
    assert not long


@pytest.mark.parametrize("folder", ["gates", "schedulers"])
def test_policies_do_not_look_at_values_on_the_host(folder):
    """Kind: a sync hidden in a policy; the contract's dispatch mode does not see all of them."""
    for path in (ROOT / "echo_policies" / folder).glob("*.py"):
        found = [look for look in HOST_LOOKS if look in path.read_text()]
        assert not found, f"{path.name}: {found}"


def test_nothing_but_tests_reads_what_does_not_ship():
    for path in SOURCES + sorted((ROOT / "benchmarks").glob("*.py")):
        assert "../shared" not in path.read_text(), path


def test_no_file_names_a_folder_of_the_machine_it_was_written_on():
    """Kind: a test or a page that works on one machine only."""
    absolute = re.compile(r"""["'`]/(?:work|tmp|home|root|opt)/""")
    for path in [*ROOT.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if ".venv" not in path.parts:
            found = absolute.search(path.read_text())
            assert found is None, f"{path}: {found and found[0]}"
