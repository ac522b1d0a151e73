"""From what a user writes to a policy: presets, parameters, files, installed packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from echo_policies import registry
from echo_policies.api import Policy, Scheduler
from echo_policies.errors import InputError, PolicyLoadError, UnknownNameError
from echo_policies.gates.open import OpenGate
from echo_policies.presets import PRESETS
from echo_policies.registry import available, parse, parse_list
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.rerank import Rerank

FILE = """
from echo_policies.api import Gate, Policy, Scheduler
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.rerank import Rerank

class MyGate(OpenGate):
    margin: float = 0.5

class MyScheduler(Rerank):
    nodes: int = 7

class MyPolicy(Policy):
    alpha: float = 0.1
    gate: Gate = OpenGate()
    scheduler: Scheduler = MyScheduler()

class NeedsAnArgument(Rerank):
    nodes: int

class Plain:
    pass

class Takes:
    def __init__(self, thing):
        pass

READY = MyPolicy(alpha=0.9)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_by_name(name: str) -> None:
    policy = parse(name)
    assert policy.name == name
    assert policy == PRESETS[name]()


def test_values_reach_the_part_that_has_them() -> None:
    policy = parse("echo:w_topk=2,failing_layer=keep,gate_cmp=ge,taus=[]")
    assert policy.parameters()["w_topk"] == 2
    assert policy.parameters()["failing_layer"] == "keep"
    assert policy.parameters()["gate_cmp"] == "ge"
    assert policy.name == "echo:w_topk=2,failing_layer=keep,gate_cmp=ge,taus=[]"
    assert policy.is_calibrated
    assert not parse("echo").is_calibrated


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["echo,chain"], ["echo", "chain"]),
        (["echo:w_topk=1,failing_layer=keep,chain"], ["echo:w_topk=1,failing_layer=keep", "chain"]),
        (
            ["chain", "eagle3:levels=3,top_k=3,nodes=5"],
            ["chain", "eagle3:levels=3,top_k=3,nodes=5"],
        ),
        (["echo:w_topk=1", "echo:w_topk=2"], ["echo:w_topk=1", "echo:w_topk=2"]),
        (["chain:levels=2,chain:levels=3"], ["chain:levels=2", "chain:levels=3"]),
        ([" echo , chain ", ""], ["echo", "chain"]),
        (["chain,chain"], ["chain"]),
        (["echo:depths=[1,4],delta=0.6,chain"], ["echo:depths=[1,4],delta=0.6", "chain"]),
    ],
)
def test_comma_lists(specs: list[str], names: list[str]) -> None:
    assert [policy.name for policy in parse_list(specs)] == names


def test_lists_are_values_too() -> None:
    policy = parse("echo:taus=[[4,0.25],[1,0.5]],w_topk=2")
    assert policy.parameters()["taus"] == ((1, 0.5), (4, 0.25))
    assert policy.parameters()["w_topk"] == 2


def test_at_least_one_policy() -> None:
    with pytest.raises(InputError, match="At least one policy must be named"):
        parse_list([",", ""])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ecoh", r"No policy named 'ecoh'\. Did you mean 'echo'\? Known: .*chain"),
        ("echo:w_tokp=1", r"No parameter of 'echo' named 'w_tokp'\. Did you mean 'w_topk'\?"),
        ("chain:w_topk=1", "No parameter of 'chain' named 'w_topk'"),
        ("echo:name=x", "No parameter of 'echo' named 'name'"),
    ],
)
def test_the_nearest_name_is_offered(spec: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("echo:levels=0", r"levels \(deepest level, D_max\): .*greater than or equal to 1; got 0"),
        ("echo:w_topk=many", "w_topk .*got 'many'"),
        ("echo:failing_layer=lose", "failing_layer .*'drop' or 'keep'"),
        ("echo:w_topk", "NAME:field=value,field=value; got 'w_topk'"),
        ("echo:taus=[[1,2.0]]", "taus must pair a depth >= 1 with a probability"),
        ("static:tree=0/1/10/110", r"Node \(1, 1, 0\) lacks its parent \(1, 1\)"),
    ],
)
def test_bad_values_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(spec)


def test_a_policy_out_of_a_file(file: Path) -> None:
    policy = parse(f"{file}:MyPolicy:alpha=0.3,nodes=5")
    assert type(policy).__name__ == "MyPolicy"
    assert policy.name == "MyPolicy:alpha=0.3,nodes=5"
    assert getattr(policy, "alpha") == 0.3  # noqa: B009 - the class lives in the file
    assert policy.parameters()["nodes"] == 5
    assert getattr(parse(f"{file}:READY"), "alpha") == 0.9  # noqa: B009


def test_a_lone_part_is_paired(file: Path) -> None:
    gate, scheduler = parse(f"{file}:MyGate:margin=0.2"), parse(f"{file}:MyScheduler")
    assert isinstance(gate.scheduler, Elastic)
    assert gate.gate.model_dump() == {"margin": 0.2}
    assert isinstance(scheduler.gate, OpenGate)
    assert isinstance(scheduler.scheduler, Rerank)
    assert scheduler.name == "MyScheduler"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MyPolcy", r"No class in .*mine.py named 'MyPolcy'\. Did you mean 'MyPolicy'\?"),
        ("NeedsAnArgument", "must be built from defaults, but nodes: Field required"),
        ("Takes", "cannot be built without arguments: .*thing"),
        ("Plain", "must be a Policy, Gate or Scheduler; got Plain"),
    ],
)
def test_a_class_that_cannot_be_used(file: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(f"{file}:{name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef broken(:\n", r"mine.py cannot be loaded: SyntaxError: .*\(line 2\)"),
        ("x = 1\n\ny = 1 / 0\n", r"ZeroDivisionError: division by zero \(line 3\)"),
        ("import no_such_module_anywhere\n", r"ModuleNotFoundError: .*\(line 1\)"),
    ],
)
def test_a_file_that_cannot_be_loaded(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(PolicyLoadError, match=message):
        parse(f"{file}:MyPolicy")


def test_a_file_that_is_not_there_or_names_no_class(file: Path) -> None:
    with pytest.raises(PolicyLoadError, match="does not exist"):
        parse(f"{file.parent}/other.py:MyPolicy")
    with pytest.raises(
        InputError, match=r"A policy file needs its class: write .*mine\.py:MyPolicy"
    ):
        parse(str(file))


def test_two_files_of_one_name(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "deeper"
    other.mkdir()
    (other / "mine.py").write_text(FILE.replace("nodes: int = 7", "nodes: int = 9"))
    first, second = parse(f"{file}:MyScheduler"), parse(f"{other}/mine.py:MyScheduler")
    assert [p.parameters()["nodes"] for p in (first, second)] == [7, 9]


class Installed(Rerank):
    """What an installed package would offer."""

    respects_k_max: ClassVar[bool] = False


def install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    points = [
        EntryPoint(name.rstrip("_"), value, registry.ENTRY_POINT_GROUP)
        for name, value in targets.items()
    ]

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "echo_policies"
        return points

    monkeypatch.setattr(registry, "entry_points", entry_points)
    # A name that imports whatever pytest calls this module.
    monkeypatch.setitem(sys.modules, "a_package", sys.modules[__name__])


def test_installed_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, theirs="a_package:Installed", broken="no_such_package:Policy")
    assert {"echo", "theirs", "broken"} <= set(available())
    policy = parse("theirs:nodes=3")
    assert isinstance(policy.scheduler, Installed)
    assert policy.parameters()["nodes"] == 3
    with pytest.raises(PolicyLoadError, match=r"'broken' \(no_such_package:Policy\) cannot be imp"):
        parse("broken")


def test_two_packages_may_not_offer_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, theirs="a_package:Installed", theirs_="b_package:Other")
    with pytest.raises(PolicyLoadError, match="'theirs': a_package:Installed and b_package:Other"):
        parse("theirs")


def test_a_preset_is_not_replaced_by_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, echo="a_package:Installed")
    assert isinstance(parse("echo").scheduler, Elastic)


def test_a_policy_is_named_after_its_class_and_frozen() -> None:
    class Mine(Policy):
        gate: Any = OpenGate()
        scheduler: Any = Rerank()

    policy = Mine()
    assert policy.name == "Mine"
    assert isinstance(policy.scheduler, Scheduler)
    with pytest.raises(ValueError, match="frozen"):
        policy.name = "other"


@pytest.mark.parametrize("tree", ["0", "0/1", "0.10/0", "00/0"])
def test_text_parameters_stay_text(tree):
    """Kind: a value that looks like a number in a field of text."""
    assert parse(f"static:tree={tree}").parameters()["tree"] == tree
