"""Constraints of several owners, checked against brute force where there is much to choose."""

import itertools
import random

import pytest

from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import FALLBACKS, chosen, with_fallbacks
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.constraint_solver import owned_constraints, say_settings, solve
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.errors import ConfigError, PluginError

BLOCK = "cache.block_size"
SEQS = "scheduler.max_num_seqs"
TOKENS = "scheduler.max_num_batched_tokens"
THREADS = "device.num_threads"


def config(block_size=None, **scheduler):
    return EngineConfig(
        model=ModelConfig(model="demo"),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(**scheduler),
    )


def require(path, op, value, owner="acme", reason="it must"):
    return Constraint(path, op, value, reason, owner=owner)


def prefer(path, op, value, owner="flash", reason="it is faster"):
    return Constraint(path, op, value, reason, "prefer", owner)


def test_no_constraints_change_nothing():
    start = config()
    resolved = solve(start, [])
    assert resolved.config == with_fallbacks(start)
    assert resolved.decisions == ()
    assert str(resolved) == ""


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([require(BLOCK, "==", 16)], 16),
        ([require(BLOCK, "in", (64, 16, 32))], 64),
        ([require(BLOCK, "in", (64, 16, 32)), require(BLOCK, "in", [32, 16])], 16),
        ([require(BLOCK, "in", (64, 16, 32)), require(BLOCK, "<=", 32)], 16),
        ([require(BLOCK, "multiple_of", 16)], 16),
        ([require(BLOCK, "multiple_of", 16), require(BLOCK, "multiple_of", 24)], 48),
        ([require(BLOCK, "<=", 100), require(BLOCK, "multiple_of", 16)], 16),
        ([require(BLOCK, "<=", 12), require(BLOCK, "multiple_of", 8)], 8),
        ([require(BLOCK, ">=", 20), require(BLOCK, "multiple_of", 16)], 32),
        ([require(BLOCK, ">=", 20)], 20),
        ([require(BLOCK, "<=", 64), require(BLOCK, "forbid", 64)], 16),
        ([require(BLOCK, "<=", 64), require(BLOCK, "forbid", 16)], 15),
        ([require(BLOCK, "forbid", 64)], 16),
        ([prefer(BLOCK, "==", 32)], 32),
        ([prefer(BLOCK, "==", 32), require(BLOCK, "multiple_of", 16)], 32),
        ([prefer(BLOCK, "==", 20), require(BLOCK, "multiple_of", 16)], 16),
        ([prefer(BLOCK, "==", 32), prefer(BLOCK, "==", 64)], 32),
        ([prefer(BLOCK, ">=", 100), require(BLOCK, "multiple_of", 64)], 128),
        ([prefer(BLOCK, "==", 32), require(BLOCK, "forbid", 32)], 16),
        ([prefer(BLOCK, "==", 32), require(BLOCK, "forbid", 16)], 32),
    ],
)
def test_open_settings(wishes, expected):
    for order in itertools.permutations(wishes):
        if [wish.op for wish in order if wish.op == "in"] == ["in", "in"]:
            continue  # the first list decides about the order of preference
        if sum(wish.severity == "prefer" for wish in order) > 1:
            continue
        assert solve(config(), order).config.cache.block_size == expected
    assert solve(config(), wishes).config.cache.block_size == expected


def test_auto_is_open():
    resolved = solve(config(), [prefer("model.dtype", "in", ("bfloat16", "float32"))])
    assert resolved.config.model.dtype == "bfloat16"


def test_decisions_name_owner_and_reason():
    resolved = solve(
        config(),
        [require(BLOCK, "multiple_of", 16), prefer(BLOCK, "==", 32), prefer(BLOCK, "<=", 8)],
    )
    (decision,) = resolved.decisions
    assert (decision.path, decision.value) == (BLOCK, 32)
    assert decision.owner == "acme, flash"
    assert decision.reason == "it must; it is faster"
    assert len(resolved.unmet) == 1
    assert str(resolved).splitlines() == [
        "cache.block_size = 32 (acme, flash: it must; it is faster)",
        "not followed: flash prefers cache.block_size <= 8 (it is faster)",
    ]


def test_an_explicit_value_that_fits_stays():
    resolved = solve(config(64), [require(BLOCK, "multiple_of", 16), prefer(BLOCK, "==", 16)])
    assert resolved.config.cache.block_size == 64
    assert resolved.decisions == ()
    assert [wish.owner for wish in resolved.unmet] == ["flash"]


def test_an_explicit_value_that_does_not_fit_names_all_owners():
    wishes = [
        require(BLOCK, "multiple_of", 16, "acme", "pages of 16"),
        require(BLOCK, "<=", 16, "connector", "small messages"),
        require(BLOCK, ">=", 1, "innocent"),
    ]
    with pytest.raises(ConfigError) as caught:
        solve(config(20), wishes)
    message = str(caught.value)
    assert message.startswith("cache.block_size is set to 20, but ")
    assert "acme requires cache.block_size a multiple of 16 (pages of 16)" in message
    assert "connector requires cache.block_size <= 16 (small messages)" in message
    assert "innocent" not in message
    assert "leave it open" in message


def test_requirements_that_contradict_each_other():
    wishes = [require(BLOCK, "==", 16, "acme", "a"), require(BLOCK, "==", 64, "flash", "b")]
    with pytest.raises(ConfigError) as caught:
        solve(config(), wishes)
    for text in ("acme requires cache.block_size 16 (a)", "flash requires cache.block_size 64 (b)"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([require(THREADS, "<=", 100), require(THREADS, "multiple_of", 16)], 96),
        ([require(THREADS, "<=", 64), require(THREADS, "forbid", 64)], 63),
        ([require(THREADS, ">=", 20)], 20),
        ([require(THREADS, "forbid", 64)], None),
        ([prefer(THREADS, "forbid", 64)], None),
        ([prefer(THREADS, "==", 32), require(THREADS, "forbid", 32)], None),
    ],
)
def test_open_settings_without_a_value_of_the_engine(wishes, expected):
    assert solve(config(), wishes).config.device.num_threads == expected


def test_the_engines_values_are_moved_no_further_than_needed():
    moved = solve(config(), [require(SEQS, "<=", 100), require(SEQS, "multiple_of", 8)])
    assert moved.config.get(SEQS) == 96
    assert str(moved.decisions[0]).startswith("scheduler.max_num_seqs = 96 (acme")
    assert solve(config(), [require(SEQS, ">=", 200)]).config.get(SEQS) == 200
    assert solve(config(), [require(SEQS, "<=", 500)]).config.get(SEQS) == 128


def test_defaults_that_are_never_open_are_moved_by_requirements_only():
    logprobs = "model.max_logprobs"
    assert config().get(logprobs) == 20
    assert solve(config(), [require(logprobs, "<=", 5)]).config.get(logprobs) == 5
    with pytest.raises(ConfigError, match="is set to 20"):
        solve(config(), [require(logprobs, "<=", 5)], explicit={logprobs})


@pytest.mark.parametrize("path", FALLBACKS)
def test_whoever_prefers_is_followed_unless_the_user_spoke(path):
    own = FALLBACKS[path]
    other = not own if isinstance(own, bool) else 1
    start = config()
    assert start.get(path) is None
    wishes = [prefer(path, "==", other, "platform x")]

    def settled(config, wishes):
        resolved = solve(config, wishes)
        (item,) = [item for item in resolved.settings if item.path == path]
        assert item.value == resolved.config.get(path)
        return item.value, item.owner

    assert settled(start, []) == (own, "default")
    assert settled(start, wishes) == (other, "platform x")
    assert settled(start, [prefer(path, "==", own, "platform x")]) == (own, "platform x")
    # What the user says holds, whether or not it is what the engine would take.
    assert settled(start.with_value(path, own), wishes) == (own, "user")
    assert settled(start.with_value(path, other), wishes) == (other, "user")
    with pytest.raises(ConfigError, match=f"{path} is set to {own}, but acme requires"):
        solve(start.with_value(path, own), [require(path, "==", other)])


def test_an_open_setting_is_not_used():
    with pytest.raises(RuntimeError, match=r"scheduler\.max_num_seqs is open; solve"):
        chosen(config().scheduler.max_num_seqs, SEQS)
    assert chosen(False, "device.enforce_eager") is False


def test_settings_in_one_line():
    resolved = solve(config(8, max_num_seqs=3), [prefer(TOKENS, "==", 64, "platform x")])
    line = say_settings(resolved.settings)
    assert "cache.block_size 8 (user)" in line
    assert "scheduler.max_num_seqs 3 (user)" in line
    assert "scheduler.max_num_batched_tokens 64 (platform x)" in line
    assert "cache.memory_utilization 0.4 (default)" in line


@pytest.mark.parametrize("wish", [("==", False), ("forbid", True)])
def test_switches(wish):
    path = "cache.enable_prefix_caching"
    assert solve(config(), [require(path, *wish)]).config.get(path) is False


def test_a_forbidden_name_without_an_alternative():
    with pytest.raises(ConfigError, match=r"no value of scheduler\.policy .* acme forbids"):
        solve(config(), [require("scheduler.policy", "forbid", "fcfs")])


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (
            prefer("model.max_logprobs", "==", 5),
            r"flash prefers .* model\.max_logprobs, but that is never left open \(it is 20 ",
        ),
        (prefer("model.model", "==", "x"), "it has no default"),
        (require("cache.blocksize", "==", 1), r"acme constrains .*did you mean cache\.block_size"),
        (require("cache.__class__", "==", 1), "which is no setting"),
        (require(BLOCK, "~", 1), "unknown op '~'"),
        (Constraint(BLOCK, "==", 1, "r", "maybe", "acme"), "unknown severity 'maybe'"),
        (require(BLOCK, "multiple_of", 0), "not a positive integer"),
        (require(BLOCK, "in", "abc"), "not a collection"),
        (require(BLOCK, "<=", "16"), "not a number"),
        (require("scheduler.policy", "<=", 3), "acme requires .* cannot be compared with 'fcfs'"),
        (Constraint("x.y", "==", 1, "r"), "an unnamed owner constrains x.y"),
    ],
)
def test_malformed_constraints_name_their_owner(constraint, expected):
    with pytest.raises(PluginError, match=expected):
        solve(config(), [constraint])


def test_the_result_is_in_range():
    with pytest.raises(ConfigError, match=r"cache\.block_size must be at least 1"):
        solve(config(), [require(BLOCK, "==", 0)])


def test_owners_are_filled_in():
    (constraint,) = owned_constraints([require(BLOCK, "==", 1, owner="")], "platform acme")
    assert constraint.owner == "platform acme"
    for wrong in (None, "text", [1]):
        with pytest.raises(PluginError, match="platform acme gave"):
            owned_constraints(wrong, "platform acme")


def test_against_brute_force():
    generator = random.Random(0)
    for _ in range(500):
        wishes = []
        for _ in range(generator.randint(1, 4)):
            op = generator.choice(["==", "in", "<=", ">=", "multiple_of", "forbid"])
            value = generator.randint(1, 40)
            if op == "in":
                value = tuple(generator.sample(range(1, 41), 12))
            elif op == "multiple_of":
                value = generator.randint(1, 6)
            wishes.append(require(BLOCK, op, value))
        allowed = [n for n in range(1, 200) if all(wish.allows(n) for wish in wishes)]
        current = generator.choice([None, generator.randint(1, 40)])
        # Nothing but forbidden values says nothing about which others there are.
        is_stuck = FALLBACKS[BLOCK] not in allowed and all(wish.op == "forbid" for wish in wishes)
        is_wrong = is_stuck if current is None else current not in allowed
        if not allowed or is_wrong:
            with pytest.raises(ConfigError):
                solve(config(current), wishes)
            continue
        value = solve(config(current), wishes).config.cache.block_size
        assert value in allowed
        assert current in (None, value)
        is_listed = any(wish.op in ("==", "in") for wish in wishes)
        if current is None and not is_listed:
            # The nearest of those that are not above the engine's own, else of those that are.
            own = FALLBACKS[BLOCK]
            assert value == max((n for n in allowed if n <= own), default=min(allowed))
