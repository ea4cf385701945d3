"""benchmarks/structured_beside_vllm.py: Quire's part of it, and its table."""

from benchmarks.structured_beside_vllm import Answers, quire, table
from quire import LLM
from quire.bench.claims import ARTICLES, SCHEMA


def test_jump_ahead_gives_the_same_answers_in_fewer_steps():
    llm = LLM(max_model_len=256, max_num_seqs=2)
    prompts = [llm.get_tokenizer().encode(text) for text in ARTICLES[:2]]
    alone, ahead = (quire(llm, prompts, jump_ahead)([100, 100], SCHEMA) for jump_ahead in (False, True))
    assert ahead.token_ids == alone.token_ids
    assert ahead.steps < alone.steps
    assert quire(llm, prompts, True)([7, 5], None).lengths == [7, 5]


def test_the_table_has_medians_and_the_best_round():
    pairs = [(Answers(seconds, 10, [[1] * 10, [1] * 6]), Answers(1.0, 10, [[1] * 16])) for seconds in (2.0, 1.0, 4.0)]
    assert table({"an engine": pairs}).splitlines()[-1] == (
        "| an engine | 16 | 10 | 200.0 (100.0) | 8 (16) | 10 | 100.0 (100.0) | 16 (16) | 50% |"
    )
