"""The confidence gate: which depths it checks, what passes, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from echo_policies.api import LayerView
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate


def layer(depth: int, *rows: list[float]) -> LayerView:
    """Candidates by path probability; 0 is absent."""
    logp_BW = torch.tensor(rows, dtype=torch.float64).log().float()
    return LayerView(depth, logp_BW > -torch.inf, None, logp_BW)


@pytest.mark.parametrize(
    ("gate_cmp", "passed"), [("gt", [False, False, True]), ("ge", [False, True, True])]
)
def test_the_best_path_is_compared_with_tau(gate_cmp: str, passed: list[bool]) -> None:
    # 0.25 and 0.5 are exact in float32 logs of the same tau.
    gate = ConfidenceGate.model_validate({"gate_cmp": gate_cmp, "taus": ((2, 0.25),)})
    answer_B = gate.evaluate(layer(2, [0.1, 0.2], [0.25, 0.1], [0.1, 0.5]))
    assert answer_B.dtype == torch.bool
    assert answer_B.tolist() == passed


def test_tau_at_its_limits() -> None:
    sure, doubt = layer(1, [1.0]), layer(1, [1e-6])
    assert not ConfidenceGate(taus=((1, 1.0),)).evaluate(sure).item()
    assert ConfidenceGate(taus=((1, 1.0),), gate_cmp="ge").evaluate(sure).item()
    assert ConfidenceGate(taus=((1, 0.0),)).evaluate(doubt).item()


def test_normalized_takes_the_depth_th_root() -> None:
    gate = ConfidenceGate(threshold="normalized", taus=((1, 0.5), (3, 0.5)))
    assert gate.evaluate(layer(3, [0.2], [0.1])).tolist() == [True, False]  # .585, .464
    assert gate.evaluate(layer(1, [0.6], [0.4])).tolist() == [True, False]


def test_every_depth_has_its_own_threshold() -> None:
    gate = ConfidenceGate(taus=((1, 0.9), (2, 0.1)))
    assert not gate.evaluate(layer(1, [0.5])).item()
    assert gate.evaluate(layer(2, [0.5])).item()


def test_checkpoints_are_the_depths_that_have_a_threshold() -> None:
    gate = ConfidenceGate(taus=((6, 0.1), (1, 0.9), (4, 0.5)))
    assert gate.taus == ((1, 0.9), (4, 0.5), (6, 0.1))
    assert [gate.checkpoints(n) for n in (0, 1, 5, 6)] == [(), (1,), (1, 4), (1, 4, 6)]
    assert ConfidenceGate().checkpoints(8) == ()
    assert ConfidenceGate(gate_set="off", taus=((1, 0.5),)).checkpoints(8) == ()


@pytest.mark.parametrize("pair", [(0, 0.5), (1, 1.5), (1, -0.1), (1, math.nan)])
def test_thresholds_are_probabilities(pair: tuple[int, float]) -> None:
    with pytest.raises(ValidationError, match=r"depth >= 1 with a probability in \[0, 1\]"):
        ConfidenceGate(taus=(pair,))


def test_the_open_gate_never_closes_and_never_checks() -> None:
    gate = OpenGate()
    assert gate.evaluate(layer(1, [0.1], [0.0])).tolist() == [True, True]
    assert gate.checkpoints(9) == ()


def test_a_gate_survives_json() -> None:
    gate = ConfidenceGate(taus=((2, 0.1 + 0.2),), gate_cmp="ge", threshold="fixed")
    assert ConfidenceGate.model_validate_json(gate.model_dump_json()) == gate
