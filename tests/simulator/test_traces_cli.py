"""`simulate traces`: what the commands write, say and refuse."""

from __future__ import annotations

import json

import pytest

from tests.simulator.test_cli import run
from tests.traces.build import subset
from traces.store import load, save


@pytest.fixture
def shards(trace, tmp_path):
    files = [tmp_path / "one.safetensors", tmp_path / "two.pkl"]
    for file, requests in zip(files, (range(5), range(5, trace.num_requests)), strict=True):
        save(subset(trace, requests), file)
    return files


def test_shards_merge_into_an_identical_recording(
    capsys, monkeypatch, trace, trace_file, shards, tmp_path
):
    out_file, report = tmp_path / "all.safetensors", tmp_path / "report.json"
    status, out, _ = run(capsys, monkeypatch, "traces", "merge", *shards, "--out", out_file)
    assert status == 0
    merged = load(out_file)
    assert merged.digest in out
    assert merged.header.name == trace.header.name
    assert merged.num_positions == trace.num_positions
    policy = ("--policy", "chain:levels=2,static:tree=0/1", "--json", report)
    status, out, _ = run(capsys, monkeypatch, "traces", "compare", trace_file, out_file, *policy)
    assert status == 0
    assert "identical: all 12 requests" in out
    assert "joined from one.safetensors" in out  # the headers still tell them apart
    written = json.loads(report.read_text())
    assert written["is_identical"]
    assert written["positions"] == trace.num_positions
    assert [row["policy"] for row in written["policies"]] == ["chain:levels=2", "static:tree=0/1"]


def test_a_merge_may_be_named(capsys, monkeypatch, shards, tmp_path):
    out_file = tmp_path / "all.pkl"
    args = ("traces", "merge", *shards, "--out", out_file, "--name", "whole")
    assert run(capsys, monkeypatch, *args)[0] == 0
    assert load(out_file).header.name == "whole"


def test_differences_are_listed_with_status_0(capsys, monkeypatch, trace_file, shards):
    status, out, _ = run(capsys, monkeypatch, "traces", "compare", trace_file, shards[0])
    assert status == 0
    assert "identical" not in out
    assert "only in A: 7 requests: maths/5, " in out
    assert "chain:levels=8" in out
    assert "eagle3: not replayed." in out


def test_the_card_is_readable_and_its_json_complete(
    capsys, monkeypatch, trace, trace_file, tmp_path
):
    file = tmp_path / "card.json"
    status, out, _ = run(capsys, monkeypatch, "traces", "info", trace_file, "--json", file)
    assert status == 0
    assert trace.digest in out
    for heading in ("median [least to most]", "given the levels before", "AUC 1", "ICC", ">32"):
        assert heading in out
    assert max(map(len, out.splitlines())) <= 200
    card = json.loads(file.read_text())
    assert card["overall"]["positions"] == trace.num_positions
    assert sorted(card["by_task"]) == ["chat", "code", "maths"]
    shares = card["overall"]["within_first"]["1"]["cumulative"]
    assert len(shares) == trace.header.chain_levels
    assert f"{shares[0]:.3f}" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "{file}", "{file}", "--out", "x.txt"], ".safetensors or .pkl"),
        (["merge", "{file}", "--out", "{folder}/x.pkl"], "Two or more"),
        (
            ["merge", "{file}", "{file}", "--out", "{folder}/x.pkl"],
            "joined traces only; chat/0 is in",
        ),
        (["compare", "{file}", "{file}", "--policy", "ecoh"], "Did you mean 'echo'"),
        (["compare", "{file}", "nothere"], "No trace named"),
        (["compare", "{file}", "qwen2.5-coder-1.5b"], "agree in tokenizer"),
        (["info", "{file}", "--json", "/nowhere/x.json"], "create the folder"),
    ],
)
def test_user_errors_are_one_sentence(capsys, monkeypatch, trace_file, tmp_path, arguments, words):
    filled = [text.format(file=trace_file, folder=tmp_path) for text in arguments]
    status, _, err = run(capsys, monkeypatch, "traces", *filled)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
