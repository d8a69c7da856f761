"Prices against exact fractions, the shipped table row by row, and every way to write a price wrongly."
import json
from datetime import date
from fractions import Fraction
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.replay.prices import Price, PriceProblem, Usage, parse_price, price_of, price_table

PRICES = st.decimals(0, 100, places=4).map(float)
TOKENS = st.integers(0, 10**7)


def exact(prompt, cached, completion, of_prompt, of_cached, of_completion):
    "The same by fractions, token by token kind: no rounding anywhere."
    kinds = zip((prompt - cached, cached, completion), (of_prompt, of_cached, of_completion))
    return sum(Fraction(n) * Fraction(str(p)) / 10**6 for n, p in kinds)


@given(TOKENS, TOKENS, TOKENS, PRICES, PRICES, st.none() | PRICES)
def test_cost_is_the_sum_of_its_parts_and_never_above_most(prompt, cached, completion, of_prompt, of_completion, of_cached):
    cached = min(cached, prompt)
    price = Price(of_prompt, of_completion, of_cached)
    cost = price.cost(Usage(prompt, completion, cached))
    told = exact(prompt, cached, completion, of_prompt, of_prompt if of_cached is None else of_cached, of_completion)
    assert cost == pytest.approx(float(told), rel=1e-12, abs=1e-15)
    for longest in (completion, completion + 1000):
        assert cost <= price.most(prompt, longest) * (1 + 1e-12)
    dearest = of_prompt if of_cached is None else max(of_prompt, of_cached)
    told = exact(prompt, 0, completion, dearest, 0, of_completion)
    assert price.most(prompt, completion) == pytest.approx(float(told), rel=1e-12)


@pytest.mark.parametrize("counts", [(-1, 0, 0), (0, -1, 0), (5, 5, -1), (5, 5, 6)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(PriceProblem, match="give what was measured"):
        Usage(*counts)


@pytest.mark.parametrize("prices", [(-1, 0), (0, -1), (0, 0, -1), (float("nan"), 0), (0, float("inf")), (1, 1, float("nan"))])
def test_impossible_prices_are_refused(prices):
    with pytest.raises(PriceProblem, match="0 or more"):
        Price(*prices)


def test_every_row_of_the_shipped_table_says_where_it_comes_from():
    path = resources.files("composer_replication") / "data" / "prices.json"
    told = json.loads(path.read_text())
    table = price_table()
    assert 12 <= len(table) == len(told["prices"]) and "only as good as its dates" in told["about"].lower()
    makers = {model.split("/")[0] for model in table}
    assert makers >= {"anthropic", "openai", "google", "deepseek", "qwen", "x-ai", "mistralai"}
    for row in told["prices"]:
        price = table[row["model"]]
        assert (price.prompt, price.completion, price.cached) == (row["prompt"], row["completion"], row["cached"])
        assert 0 < price.prompt <= price.completion <= 100 and (price.cached is None or price.cached <= price.prompt)
        assert price.source == row["source"] and price.source.startswith("https://")
        if price.dated:
            assert date(2025, 1, 1) <= date.fromisoformat(price.dated) <= date(2026, 11, 21)
        else:
            assert "states no date" in row["note"]


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"prices": [{"model": "lab/fox", "prompt": 1, "completion": 2, "note": "mine"}]}))
    assert price_table(path) == {"lab/fox": Price(1, 2)}


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"prices": 3}', '{"prices": [3]}', '{"prices": [{"prompt": 1, "completion": 2}]}',
    '{"prices": [{"model": "a/b", "prompt": 1}]}', '{"prices": [{"model": "a/b", "prompt": "1", "completion": 2}]}',
    '{"prices": [{"model": "a/b", "prompt": -1, "completion": 2}]}',
    '{"prices": [{"model": "a/b", "prompt": NaN, "completion": 2}]}',
    '{"prices": [{"model": "a/b", "prompt": 1, "completion": 2, "per": "thousand"}]}', "\xff\xfe",
    '{"prices": [{"model": "a/b", "prompt": 1, "completion": 2}, {"model": "a/b", "prompt": 3, "completion": 4}]}'])
def test_a_file_that_is_no_table_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "prices.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PriceProblem, match="no price table|two prices") as told:
        price_table(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(PriceProblem, match="cannot be read"):
        price_table(tmp_path / "none.json")


@given(st.text("abcxyz/-.:=0123456789", min_size=1).filter(str.strip), PRICES, PRICES, st.none() | PRICES)
def test_a_price_is_read_back_as_it_was_written(model, prompt, completion, cached):
    text = f"{model}={prompt},{completion}" + ("" if cached is None else f",{cached}")
    name, price = parse_price(text)
    assert name == model and (price.prompt, price.completion, price.cached) == (prompt, completion, cached)


def test_an_unknown_model_is_never_guessed():
    table = price_table()
    known = next(iter(table))
    assert price_of(known, table) is table[known]
    for model in (known.split("/")[1], known.upper(), known + ":free", ""):
        with pytest.raises(PriceProblem, match="--price"):
            price_of(model, table)
