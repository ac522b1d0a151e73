"""The model against published measurements of real engines, as shipped and cross-validated.

The data is outside the repository (`tests.simulator.outside`).
"""

import pytest

from simulator.cost.accuracy import accuracy, affine_in_sample
from simulator.cost.constants import shipped, shipped_file
from simulator.cost.fit import cross_validate, fit_constants
from simulator.cost.host import ENGINES
from simulator.cost.parameters import FITTED_NAMES, NEUTRAL
from simulator.cost.predict import predict_all, without_flags
from simulator.cost.stepfile import read_steps
from tests.simulator.outside import STEP_TIMES

pytestmark = pytest.mark.skipif(not STEP_TIMES.exists(), reason=f"{STEP_TIMES} is not there")


@pytest.fixture(scope="module")
def steps():
    return without_flags(read_steps(STEP_TIMES, ENGINES))


def test_every_row_is_read(steps):
    assert len(steps) == 168
    assert {step.kind for step in steps} == {"decode_step", "serving_tpot", "spec_cycle"}


def test_shipped_constants_in_sample(steps):
    found = accuracy(steps, predict_all(steps))
    assert found.overall.median <= 0.045
    assert found.overall.p90 <= 0.13
    assert found.by_kind["spec_cycle"].median <= 0.07


@pytest.mark.slow
def test_rows_of_groups_that_were_left_out(steps):
    found = accuracy(steps, cross_validate(steps))
    assert found.overall.median <= 0.07
    assert found.overall.p90 <= 0.16
    assert found.by_kind["spec_cycle"].median <= 0.07


@pytest.mark.slow
def test_shipped_constants_are_what_the_fit_gives(steps):
    found = fit_constants(steps, NEUTRAL)
    assert set(found.names) == set(FITTED_NAMES) == set(shipped_file().names)
    for name in found.names:
        assert getattr(found.parameters, name) == pytest.approx(getattr(shipped(), name), rel=1e-3)


def test_simpler_models_are_worse(steps):
    ours = accuracy(steps, predict_all(steps)).overall
    assert accuracy(steps, predict_all(steps, pure_roofline=True)).overall.median > 0.3
    known, line_ms = affine_in_sample(steps)
    assert len(known) < len(steps)  # a line needs six rows of its own machine
    assert accuracy(known, line_ms).overall.p90 > ours.p90
