"""Measured step times from CSV files: what is refused, and which rows belong together."""

import pytest

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.step_group import select_rows
from simulator.cost.step_rows import read_step_rows

HEADER = "model,tp,batch,context,tokens,ms"
GOOD = "m,2,1,256,1,2.0"


@pytest.fixture
def write(tmp_path):
    def written(lines, header=HEADER):
        path = tmp_path / "steps.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        return path

    return written


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("0.007", r"line 3: ms must be in milliseconds.* got 0.007, and it looks like seconds"),
        ("7000000", "got 7e.06, and it looks like microseconds"),
        ('"7,1"', "line 3: ms must be a number of at least 0, with a decimal point; got '7,1'"),
        ("-1", "ms must be a number of at least 0, with a decimal point; got '-1'"),
        ("nan", "got 'nan'"),
        ("", "got ''"),
    ],
)
def test_times_that_cannot_be_are_refused_with_their_line(cell, message, write):
    with pytest.raises(InputError, match=message):
        read_step_rows(write([GOOD, f"m,2,4,1024,1,{cell}"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m,2,0,1024,1,3", "line 2: batch must be a number of at least 1"),
        ("m,2,1.5,1024,1,3", "line 2: batch must be a whole number; got 1.5"),
        ("m,x,1,1024,1,3", "line 2: tp must be a number of at least 1.* got 'x'"),
        ("m,2,1,-4,1,3", "context must be a number of at least 0"),
        ("m,2,1,1024,0.5,3", "tokens must be a number of at least 1"),
        ("m,2,1", "got ''"),
    ],
)
def test_counts_that_cannot_be_are_refused(line, message, write):
    with pytest.raises(InputError, match=message):
        read_step_rows(write([line]))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("model,tp,batch,context,tokens", "a column 'ms' or 'measured_ms'; it has neither"),
        ("model,tp,batch,tokens,ms", "a column 'context'; it has not"),
        (HEADER + ",measured_ms", "it has both"),
        ("", "header is empty"),
    ],
)
def test_a_header_that_does_not_do_is_refused(header, message, write):
    with pytest.raises(InputError, match=message):
        read_step_rows(write([], header))


def test_a_file_without_rows_or_no_file_is_refused(write, tmp_path):
    with pytest.raises(InputError, match="at least one row"):
        read_step_rows(write([]))
    with pytest.raises(InputError, match="reading failed"):
        read_step_rows(tmp_path / "none.csv")


def test_a_group_is_one_model_tp_and_engine(write):
    lines = [
        "qwen3-8b,1,4,340,1,7.0,sglang 0.5.3,decode_step,",
        "qwen3-8b,1,4,340,1,7.4,trtllm 1.2,decode_step,",
        "qwen3-8b,1,4,340,1,9.4,trtllm 1.2,decode_step,slow",
        "qwen3-8b,1,4,340,16,9.0,trtllm 1.2,spec_cycle,",
        "qwen3-8b,2,4,340,16,9.0,trtllm 1.2,spec_cycle,",
    ]
    rows = read_step_rows(write(lines, HEADER + ",engine,kind,flag"))
    with pytest.raises(InputError, match="one engine; those of qwen3-8b at tp 1 have 'sglang"):
        select_rows(rows, "qwen3-8b", 1)
    group = select_rows(rows, "qwen3-8b", 1, engine="trtllm")
    assert [row.ms for row in group.rows] == [7.4]
    assert group.describe()["rows_left_out"] == {"flagged": 1, "spec_cycle": 1}
    with pytest.raises(UnknownNameError, match="Did you mean 'qwen3-8b'"):
        select_rows(rows, "qwen-8b", 1)
    with pytest.raises(UnknownNameError, match="No engine in the step times"):
        select_rows(rows, "qwen3-8b", 1, engine="vllm")
    with pytest.raises(InputError, match="was measured at tp 1, 2; got tp 4"):
        select_rows(rows, "qwen3-8b", 4)
    with pytest.raises(InputError, match=r"all 1 rows chosen .* speculative cycles"):
        select_rows(rows, "qwen3-8b", 2)
