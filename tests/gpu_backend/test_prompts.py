"""Prompt files: what is taken from them and how a broken one is named."""

from pathlib import Path

import pytest

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig, build_config
from gpu_backend.prompts import ask, encode_chat, load_questions, task_name
from tests.gpu_backend.tiny import tiny_tokenizer, write_prompts


def load(path, **changes):
    return load_questions(path, "t", tiny_tokenizer(), RecordConfig(**changes))


def test_data_set_is_named_by_the_file():
    assert task_name(Path("a/humaneval.question.jsonl")) == "humaneval"
    assert task_name(Path("sum.question.jsonl")) == "cnn_dm"


def test_first_turn_in_the_chat_template():
    assert encode_chat(tiny_tokenizer(), ["w010 w011"]) == [10, 11, 3]


def test_tokenizer_without_a_template_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        encode_chat(tokenizer, ["w010"])


def test_later_turn_holds_the_earlier_answers(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 7, "turns": ["w010", "w011", "w012"]}\n')
    (question,) = load(path, max_new_tokens=8)
    assert question.longest_prompt == 4 + 2 * 8
    second = ask(question, ["w020 w021"], tiny_tokenizer())
    assert (second.turn, second.token_ids) == (2, [10, 20, 21, 11, 3])
    assert second.label == "t question 7, turn 2"


def test_every_turn_is_a_request(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["w010", "w011"]}\n' * 3)
    turns = [len(question.turns) for question in load(path, requests_per_set=3)]
    assert turns == [2, 1]
    assert [len(question.turns) for question in load(path, turns=1)] == [1, 1, 1]


def test_splits_alternate(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 6)
    splits = [prompt.split[0] for prompt in load(path)]
    assert splits == ["e", "c"] * 3
    share = load(path, calibration_fraction=0.0)
    assert {prompt.split for prompt in share} == {"evaluation"}


def test_long_prompts_are_passed_over(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 6)
    taken = load(path, max_prompt_tokens=7, requests_per_set=2)
    assert [prompt.question_id for prompt in taken] == ["0", "1"]
    with pytest.raises(InputError, match=r"p\.jsonl: no prompt has at most 3 tokens"):
        load(path, max_prompt_tokens=3)


@pytest.mark.parametrize(
    "line",
    ["{broken", '{"turns": []}', '{"question_id": 1}', "[1]", '{"turns": ["w1", 2]}'],
)
def test_broken_line_is_named(tmp_path, line):
    path = write_prompts(tmp_path / "p.jsonl", 2)
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"p\.jsonl, line 4: a prompt must be"):
        load(path)


def test_repeated_question_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 1, "turns": ["w1"]}\n' * 2)
    with pytest.raises(InputError, match=r"line 2: question_id '1' occurs twice"):
        load(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl cannot be read"):
        load(tmp_path / "none.jsonl")


def test_settings_are_checked():
    with pytest.raises(InputError, match=r"record\.levels: .* got 0"):
        build_config(levels=0)
    with pytest.raises(InputError, match="chain_levels must be at least levels"):
        build_config(levels=30)
    with pytest.raises(InputError, match=r"record\.dtype: .*float32.* got 'f4'"):
        build_config(dtype="f4")
