"""Constraints of several owners, checked against brute force where there is much to choose."""

import itertools
import random

import pytest

from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.errors import ConfigError, PluginError

BLOCK = "cache.block_size"
SEQS = "scheduler.max_num_seqs"


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
    assert resolved.config == start
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
        ([require(BLOCK, "<=", 100), require(BLOCK, "multiple_of", 16)], 96),
        ([require(BLOCK, ">=", 20), require(BLOCK, "multiple_of", 16)], 32),
        ([require(BLOCK, ">=", 20)], 20),
        ([require(BLOCK, "<=", 64), require(BLOCK, "forbid", 64)], 63),
        ([require(BLOCK, "forbid", 64)], None),
        ([prefer(BLOCK, "==", 32)], 32),
        ([prefer(BLOCK, "==", 32), require(BLOCK, "multiple_of", 16)], 32),
        ([prefer(BLOCK, "==", 20), require(BLOCK, "multiple_of", 16)], 16),
        ([prefer(BLOCK, "==", 32), prefer(BLOCK, "==", 64)], 32),
        ([prefer(BLOCK, ">=", 100), require(BLOCK, "multiple_of", 64)], 128),
        ([prefer(BLOCK, "==", 32), require(BLOCK, "forbid", 32)], None),
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


def test_defaults_are_moved_by_requirements_only():
    assert config().get(SEQS) == 128
    moved = solve(config(), [require(SEQS, "<=", 100), require(SEQS, "multiple_of", 8)])
    assert moved.config.get(SEQS) == 96
    assert str(moved.decisions[0]).startswith("scheduler.max_num_seqs = 96 (acme")
    assert solve(config(), [prefer(SEQS, "==", 8)]).config.get(SEQS) == 128
    assert solve(config(), [require(SEQS, ">=", 200)]).config.get(SEQS) == 200


def test_a_default_that_the_user_stated_is_the_users():
    with pytest.raises(ConfigError, match="is set to 128"):
        solve(config(), [require(SEQS, "<=", 64)], explicit={SEQS})


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
        if not allowed or (current is not None and current not in allowed):
            with pytest.raises(ConfigError):
                solve(config(current), wishes)
        else:
            chosen = solve(config(current), wishes).config.cache.block_size
            if chosen is None:
                assert all(wish.op == "forbid" for wish in wishes)
            else:
                assert chosen in allowed
                assert current in (None, chosen)
