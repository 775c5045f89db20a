"""Sweeps: words of the command line to axes, all combinations in order, and names that tell combinations apart."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ops.queue.sweep import MOST_RUNS, Axis, label, parse_axis, plain, product, short_keys
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("seed=1", "seed", ("1",)),
        ("trainer.learning_rate=1e-5,3e-5", "trainer.learning_rate", ("1e-5", "3e-5")),
        ("rollout.stop=[a,b],[c]", "rollout.stop", ("[a,b]", "[c]")),
        (
            "trainer.loss={type: dapo, clip: 1},{type: cispo}",
            "trainer.loss",
            ("{type: dapo, clip: 1}", "{type: cispo}"),
        ),
        ("""model.path='a,b',"c,d" """, "model.path", ("'a,b'", '"c,d"')),
        ("a.b=x=1,y=2", "a.b", ("x=1", "y=2")),
        ("seed= 1 , 2", "seed", ("1", "2")),
    ],
)
def test_values_are_divided_at_commas_outside_of_brackets_and_quotes(
    text: str, key: str, values: tuple[str, ...]
) -> None:
    """Everything else of a value is YAML."""
    assert parse_axis(text) == Axis(key, values)


@pytest.mark.parametrize("text", ["seed", "seed=", "=1,2", "seed=1,,2", "seed=1,", ""])
def test_a_word_of_another_form_is_refused_with_an_example(text: str) -> None:
    """The word itself is quoted."""
    with pytest.raises(ConfigError, match=r"^--sweep .*write KEY=VALUE,VALUE,…"):
        parse_axis(text)


@pytest.mark.parametrize("key", ["name", "output_dir", "ledger.path"])
def test_keys_that_a_sweep_sets_itself_are_refused(key: str) -> None:
    """They follow from the other keys."""
    with pytest.raises(ConfigError, match=key):
        parse_axis(f"{key}=a,b")


def test_values_and_keys_given_twice_are_refused() -> None:
    """The same run would be there twice, or one of two lists would be ignored."""
    with pytest.raises(ConfigError, match="1 is given twice"):
        parse_axis("seed=1,2,1")
    with pytest.raises(ConfigError, match="seed is given twice"):
        product([Axis("seed", ("1",)), Axis("seed", ("2",))])


@pytest.mark.parametrize("sizes", [(), (1,), (2, 3), (2, 3, 4)])
def test_the_product_has_each_combination_once_the_last_key_fastest(sizes: tuple[int, ...]) -> None:
    """As nested loops would make them."""
    axes = [Axis(f"k{n}", tuple(map(str, range(size)))) for n, size in enumerate(sizes)]
    found = product(axes)
    number = 1
    for size in sizes:
        number *= size
    assert len(set(found)) == len(found) == number
    assert found == sorted(found)


def test_the_number_of_runs_is_bounded() -> None:
    """256 are allowed, 257 are not."""
    assert len(product([Axis("seed", tuple(map(str, range(MOST_RUNS))))])) == MOST_RUNS
    with pytest.raises(ConfigError, match="257 runs; 256 are the most"):
        product([Axis("seed", tuple(map(str, range(MOST_RUNS + 1))))])


def test_names_are_readable() -> None:
    """Keys are as short as they can be, values as they were written."""
    axes = [Axis("trainer.learning_rate", ("1e-5",)), Axis("seed", ("1",))]
    assert label(axes, ("1e-5", "1")) == "learning_rate-1e-5__seed-1"
    assert short_keys(["trainer.loss.type", "reward.advantage.type"]) == ["loss.type", "advantage.type"]


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["seed"], ["seed"]),
        (["trainer.loss.type", "reward.advantage.type"], ["loss.type", "advantage.type"]),
        (["model.path", "trainer.sft.path"], ["model.path", "sft.path"]),
        (["a.x", "b.a.x"], ["a.x", "b.a.x"]),
    ],
)
def test_keys_are_shortened_to_ends_that_tell_them_apart(keys: list[str], short: list[str]) -> None:
    """From the last part on; whole if the whole key is the end of another."""
    assert short_keys(keys) == short


@pytest.mark.parametrize("value", ["a/b", "[1,2]", "ä", "x" * 41, "a__b", " ", "-"])
def test_a_value_that_can_not_be_written_out_has_a_digest(value: str) -> None:
    """The rest stays readable."""
    assert re.search(r"(^|-)[0-9a-f]{6}$", plain(value))
    assert plain("a/b").startswith("a-b-")


@given(st.lists(st.text(min_size=1, max_size=60), min_size=2, max_size=6, unique=True))
def test_different_values_have_different_names_of_allowed_letters(values: list[str]) -> None:
    """Folder names and `name` allow letters, digits, `_`, `.` and `-`."""
    axes = [Axis("trainer.learning_rate", tuple(values))]
    names = [label(axes, (value,)) for value in values]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


@given(st.tuples(*[st.text("ab_-", min_size=1, max_size=5)] * 4))
def test_two_combinations_never_look_alike(texts: tuple[str, str, str, str]) -> None:
    """Separators inside of values do not shift the border between two keys."""
    axes = [Axis("x", ("",)), Axis("y", ("",))]
    first, second = texts[:2], texts[2:]
    assert (label(axes, first) == label(axes, second)) == (first == second)


def test_further_values_leave_the_names_of_earlier_runs_alone() -> None:
    """A sweep that is started again with more values finds its runs."""
    before = product([Axis("seed", ("1", "2"))])
    axes = [Axis("seed", ("1", "2", "3"))]
    assert {label([Axis("seed", ("1", "2"))], values) for values in before} <= {label(axes, v) for v in product(axes)}
