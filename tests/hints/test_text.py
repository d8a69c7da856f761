"Sentences, clamping and diagnoses over generated input."

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_replication.hints.diagnose import _SPAN, diagnose
from composer_replication.hints.text import clamp, sentences, shorten

# The oracle is construction: sentences are put together from words that hold no end, so their number is known.
INSIDE = [
    "foo.py",
    "3.14",
    "v1.2.3",
    "e.g. this",
    "i.e. that",
    "vs. those",
    "a/b.c",
    "../x",
    "`a. b! c?`",
    "x.y()",
    "cf. it",
    "“so”",
    "(or not)",
    "git add . now",
    "$HOME/.bashrc",
    "12:30",
    "no. 7",
    "etc. and",
]
SHORT = "al no mr ms dr eq cf vs eg ie etc fig sec mrs incl prof resp approx".split()  # a dot behind these ends no sentence
word = st.one_of(
    st.sampled_from(INSIDE),
    st.text(string.ascii_letters, min_size=2, max_size=8).filter(lambda w: w.lower() not in SHORT),
)
sentence = st.builds(
    lambda words, last, end: " ".join([*words, last]) + end,
    st.lists(word, min_size=1, max_size=8),
    st.sampled_from(["here", "there", "`code`", "foo.py", "(all)", '"it"']),
    st.sampled_from([".", "!", "?", "...", '."', ".)"]),
)


@given(st.lists(sentence, min_size=1, max_size=6), st.sampled_from([" ", "  ", "\n", "\n\n", "\n- "]))
def test_sentences_are_those_it_was_made_of(made, between):
    assert sentences(between.join(made)) == [" ".join(s.split()) for s in made]


@given(st.lists(sentence, min_size=1, max_size=6), st.integers(1, 4))
def test_clamp_keeps_the_first_sentences(made, limit):
    assert clamp(" ".join(made), limit, 10_000) == " ".join(" ".join(s.split()) for s in made[:limit])


@settings(max_examples=300)
@example("`? 11`", 1, 5)
@example("1\n\n1", 2, 5)
@given(st.text(st.sampled_from("aB1 .!?…\n`'\")(-*é。"), max_size=400), st.integers(1, 3), st.integers(5, 80))
def test_clamp_never_exceeds_a_limit(text, max_sentences, max_chars):
    short = clamp(text, max_sentences, max_chars)
    assert len(short) <= max_chars
    assert "\n" not in short
    assert len(sentences(short)) <= max_sentences
    assert clamp(short, max_sentences, max_chars) == short  # nothing more to cut


def test_a_long_sentence_is_cut_between_words():
    assert clamp("word " * 400, 2, 600).endswith("word…") and len(clamp("word " * 400, 2, 600)) <= 600
    assert shorten("x" * 50, 10) == "x" * 9 + "…"


@given(st.text(max_size=300))
def test_diagnose_never_crashes_and_is_one_bounded_sentence(text):
    said = diagnose(text)
    assert said is None or 0 < len(said) < 600


@pytest.mark.parametrize(
    "error, says",
    [
        ("Error executing query: Unknown column 's.name' in 'field list'", "`s` has no such column"),
        (
            "Error executing query: You have an error in your SQL syntax; check the manual that corresponds to your "
            "MySQL server version for "
            "the right syntax to use near '' at line 1",
            "ends too early",
        ),
        ("You have an error in your SQL syntax; check the manual near '\\*) FROM t WHERE a = 'b'' at line 1", "backslash"),
        (
            "You have an error in your SQL syntax; check the manual near 'from singer order by age desc limit 1' at line 1",
            "does not parse",
        ),
        (
            "You have an error in your SQL syntax; check the manual near 'to learn more about it' at line 1",
            "without words of explanation",
        ),
        (
            "<returncode>1</returncode>\n<output>\nTraceback (most recent call last):\n"
            '  File "a.py", line 1, in <module>\n'
            "    import wrapt\nModuleNotFoundError: No module named 'wrapt'\n</output>",
            "`wrapt` is not installed",
        ),
        ("<returncode>127</returncode>\n<output>\nbash: line 1: tree: command not found\n</output>", "`tree`"),
        (
            "<returncode>2</returncode>\n<output>\ngrep: src/core/default.cfg: No such file or directory\n</output>",
            "`src/core/default.cfg`",
        ),
        ("<returncode>1</returncode>\n<output>\nerror: corrupt patch at line 12\n</output>", "patch does not fit"),
        ("Error: payment method certificate_7504069 not found", "an earlier booking may have used it up"),
        ("OSError: [Errno 6] No such device or address: '/dev/tty'", "a pipe does not reach it"),
        ("bash: /dev/tty: No such device or address", "a pipe does not reach it"),
        ("String 'def f():\n    pass' not found in a/b.py", "exactly as written"),
        ("strings: 'flash.img': No such file", "`flash.img`"),
        (
            'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "http://localhost:5000/"',
            "start the service",
        ),
        ("urllib3.exceptions.NewConnectionError: Connection refused", "network"),
        (
            'Status Code: 404. Response: {"error":{"code":404,"message":"Anime with ID 12345 not found."}}. '
            "You should choose one of: (1) change",
            "(Anime with ID 12345 not found)",
        ),
        ("Error: User  not found", "no such user"),
        ("Error: payment amount does not add up, total price is 1203, but paid 833", "1203"),
        ("AttributeError: `np.Inf` was removed in the NumPy 2.0 release. Use `np.inf` instead.", "NumPy 2.0 release"),
        (
            "Your proposed edit has introduced new syntax error(s).\n\nERRORS:\n- E999 IndentationError: unexpected indent\n",
            "IndentationError",
        ),
    ],
)
def test_diagnoses_of_real_error_texts(error, says):
    said = diagnose(error)
    assert says in said and len(sentences(said)) == 1


def test_the_exception_at_the_end_is_read_before_the_log_above_it():
    log = (
        "warning: the first mirror timed out\nno such table: t\n"
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'wrapt'\n"
    )
    assert "`wrapt`" in diagnose(log)


def test_diagnose_has_nothing_to_say_about_output_that_is_no_known_error():
    assert diagnose("<returncode>0</returncode>\n<output>\n3 passed in 0.1s\n</output>") is None
    assert diagnose("") is None


def test_a_log_of_megabytes_is_read_at_its_ends_only():
    import time

    log = "x = 1; y = 'near'\n" * 400_000
    start = time.process_time()
    assert "`wrapt`" in diagnose(log + "ModuleNotFoundError: No module named 'wrapt'\n")
    assert time.process_time() - start < 20
    assert len(log) > 1000 * _SPAN
