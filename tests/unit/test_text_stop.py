import itertools
import random

import pytest

from cardan.core.text.stop import StopMatcher


def brute_force(text, stops, include_stop):
    """The first prefix that ends with a stop string decides; the longest such string wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def run(pieces, stops, include_stop):
    matcher = StopMatcher(stops, include_stop)
    longest = max(map(len, stops), default=1)
    out, fed, matched = "", "", None
    for piece in pieces:
        result = matcher.push(piece)
        out += result.text_to_emit
        fed += piece
        if matched is None:
            matched = result.matched
            if matched is None:
                held = fed[len(out) :]
                assert fed.startswith(out)
                assert len(held) <= longest - 1
                expected = max(
                    (
                        n
                        for n in range(len(fed) + 1)
                        for s in stops
                        if n < len(s) and _tail(fed, n, s)
                    ),
                    default=0,
                )
                assert len(held) == expected
        else:
            assert result.text_to_emit == ""
            assert result.matched == matched
    assert matcher.matched == matched
    return out + matcher.flush(), matched


def _tail(text, n, stop):
    return n == 0 or (text.endswith(stop[:n]) and len(stop[:n]) == n)


def chunkings(text):
    for cuts in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for i, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:i])
                start = i
        yield [*pieces, text[start:]]


@pytest.mark.parametrize("include_stop", [False, True])
def test_equals_brute_force_at_every_chunking(include_stop):
    rng = random.Random(7)
    for _ in range(150):
        text = "".join(rng.choice("abc") for _ in range(rng.randint(0, 7)))
        stops = [
            "".join(rng.choice("abc") for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(0, 4))
        ]
        expected = brute_force(text, stops, include_stop)
        for pieces in chunkings(text):
            assert run(pieces, stops, include_stop) == expected, (text, stops, pieces)


def test_long_random_texts():
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice("ab \n日") for _ in range(rng.randint(0, 200)))
        stops = [
            "".join(rng.choice("ab \n日") for _ in range(rng.randint(3, 9)))
            for _ in range(rng.randint(1, 5))
        ]
        pieces, rest = [], text
        while rest:
            n = rng.randint(0, 6)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert run(pieces, stops, False) == brute_force(text, stops, False)


def test_the_match_that_ends_first_wins():
    result = StopMatcher(["abcd", "bc"], False).push("xabcd")
    assert (result.text_to_emit, result.matched) == ("xa", "bc")


def test_equal_end_takes_the_longest():
    result = StopMatcher(["c", "bc", "abc"], False).push("xabc!")
    assert (result.text_to_emit, result.matched) == ("x", "abc")


def test_include_stop_drops_what_follows():
    result = StopMatcher(["\n\n"], True).push("one\n\ntwo")
    assert (result.text_to_emit, result.matched) == ("one\n\n", "\n\n")


def test_holds_only_what_can_become_a_stop():
    matcher = StopMatcher(["<|end|>"], False)
    assert matcher.push("a < b <").text_to_emit == "a < b "
    assert matcher.push("|").text_to_emit == ""
    assert matcher.push("x").text_to_emit == "<|x"
    assert matcher.push("<|en").text_to_emit == ""
    assert matcher.flush() == "<|en"
    assert matcher.flush() == ""


def test_without_stops_nothing_is_held():
    assert StopMatcher([], False).push("abc").text_to_emit == "abc"


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match=r"stop\[1\] is an empty string"):
        StopMatcher(["a", ""], False)
