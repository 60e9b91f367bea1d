"""Several ranks as one executor: what they are told, and what becomes of their failures."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rank_child import Executor, digest_of

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.plugins import PluginConfig
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.core.interfaces.executor import TokenMask
from cardan.core.runner.rank_messages import COMMANDS, Done, Forward, Load, RankOrder, encode
from cardan.core.runner.rank_processes import RankFailed, RankProcesses
from cardan.core.runner.ranked_executor import RankedExecutor
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import BlockCopies, BlockEdits, NewRow, SchedulerOutput

COMMAND = [sys.executable, str(Path(__file__).parent / "rank_child.py")]


class Local(Executor):
    """Rank 0 in this process; ``error`` is what a forward of it ends with."""

    def __init__(self, rank, options, error):
        super().__init__(rank, options)
        self.error = error

    def load(self, model, source):
        self.note("load")

    def forward(self, step):
        if self.error is not None:
            raise self.error
        super().forward(step)


def int32(*values):
    return np.array(values, np.int32)


def a_step(step_id=7):
    rng = np.random.default_rng(step_id)
    row = NewRow(
        row=3,
        key=1 << 40,
        token_ids=rng.integers(0, 1000, 50).astype(np.int32),
        num_prompt_tokens=49,
        num_computed_tokens=16,
        params=SamplingParams(temperature=0.5, logit_bias={5: 1.5}, stop=["x"], extra_args={}),
        seed=2**63 - 1,
        stop_token_ids=(1, 2),
        bad_words_token_ids=((3,), (4, 5)),
        block_ids=(int32(9, 8, 7), int32()),
    )
    return SchedulerOutput(
        step_id=step_id,
        new_rows=[row],
        freed_rows=[1, 0],
        block_edits=(BlockEdits(int32(3), int32(2), int32(11)),) * 2,
        block_copies=(BlockCopies(int32(4), int32(5)),) * 2,
        rows=int32(3),
        keys=np.array([1 << 40], np.int64),
        num_scheduled_tokens=int32(34),
        num_computed_tokens=int32(16),
        samples=np.array([True]),
    )


@pytest.fixture
def start():
    """Starts ranks 1 to ``num_ranks`` - 1 with options; ended after the test."""
    started = []

    def make(num_ranks=2, command=COMMAND, patience=20.0, end=5.0, **options):
        ranks = RankProcesses(command, patience, end)
        started.append(ranks)
        config = EngineConfig(
            model=ModelConfig(model="none"), plugins=PluginConfig(options=options)
        )
        info = DeviceInfo(platform="test", index=0, name="test", arch="test")
        for rank in range(1, num_ranks):
            ranks.start(RankOrder(rank, num_ranks, "file:///none", "test", info, config), {})
        return ranks

    yield make
    for ranks in started:
        ranks.close()


def executor_of(ranks, error=None, **options):
    ranks.await_opened()
    return RankedExecutor(Local(0, options, error), ranks)


def run_steps(executor, count):
    for step_id in range(count):
        executor.forward(a_step(step_id))
        time.sleep(0.01)


def tell_steps(ranks, count):
    for step_id in range(count):
        ranks.tell(Forward(a_step(step_id)))


def test_a_plan_arrives_as_it_was_sent():
    step = a_step()
    arrived = COMMANDS.decode(encode(Forward(step))).step
    row, sent = arrived.new_rows[0], step.new_rows[0]
    assert row.params == sent.params
    assert (row.key, row.seed, row.stop_token_ids) == (sent.key, sent.seed, sent.stop_token_ids)
    assert row.bad_words_token_ids == sent.bad_words_token_ids
    pairs = [
        (row.token_ids, sent.token_ids),
        *zip(row.block_ids, sent.block_ids, strict=True),
        (arrived.keys, step.keys),
        (arrived.samples, step.samples),
        (arrived.block_edits[1].block_ids, step.block_edits[1].block_ids),
        (arrived.block_copies[0].targets, step.block_copies[0].targets),
    ]
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype
        assert found.flags.writeable
        np.testing.assert_array_equal(found, wanted)
    assert digest_of(arrived) == digest_of(step)


def test_all_ranks_do_the_same(start, tmp_path):
    log, own = tmp_path / "log", tmp_path / "own"
    executor = executor_of(start(log=str(log)), log=str(own))
    executor.load(None, None)
    assert executor.available_kv_bytes(0.5) == 499  # of rank 1, which has less
    spec = KVCacheSpec("full", 16, 2, 8, 8, "float32")
    executor.bind_kv(KVCacheConfig((KVCacheGroup((0, 1), spec),), 12))
    executor.warmup()
    for step_id, mask in ((1, None), (2, TokenMask([3], np.array([[5, -1]], np.int32)))):
        step = a_step(step_id)
        executor.forward(step)
        executor.sample(step, mask)
    executor.sleep(2)
    assert executor.wake(["kv", "weights"]) == []
    executor.close()
    lines = own.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["load", "bind_kv 12"]
    assert lines[-4:-2] == ["sample 2 [3] [[5, -1]]", "sleep 2"]
    assert lines[-2:] == ["wake ['kv', 'weights']", "close"]
    assert log.read_text(encoding="utf-8").splitlines() == [*lines, "closed"]


def sleep_and_step(executor):
    executor.sleep(1)
    executor.wake(["kv"])
    run_steps(executor, 50)


@pytest.mark.parametrize(
    ("act", "place"), [("full@sleep", 0), ("full@wake", 1), ("full@forward", 0)]
)
def test_ranks_go_on_together_or_not_at_all(start, act, place):
    """A single executor survives this; of several some would be elsewhere."""
    executor = executor_of(start(act=act if place else ""), act="" if place else act)
    with pytest.raises(RankFailed, match=f"rank {place}: no memory left"):
        sleep_and_step(executor)


@pytest.mark.parametrize("place", [0, 1])
def test_a_refusal_to_wake_is_the_end_of_all_ranks(start, place):
    """The engine goes on after a ``ConfigError``, but a rank is gone or has answers unread."""
    act = "config@wake"
    executor = executor_of(start(act=act if place else ""), act="" if place else act)
    executor.sleep(2)
    with pytest.raises(RankFailed, match=r"model.dtype is odd"):
        executor.wake(["weights"])


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        ("config@open", ConfigError, r"^rank 1: model.dtype is odd; choose another$"),
        ("fail@open", RankFailed, r"^rank 1: ValueError: nothing left on rank 1$"),
        ("die@open", RankFailed, r"^rank 1 was ended by SIGKILL$"),
    ],
)
def test_a_rank_that_cannot_start(start, act, error, message):
    ranks = start(act=act)
    with pytest.raises(error, match=message):
        ranks.await_opened()


def test_a_process_that_is_no_rank(start):
    with pytest.raises(RankFailed, match="rank 1 exited with code 3"):
        start(command=[sys.executable, "-c", "import sys; sys.exit(3)"]).await_opened()


def test_a_failed_load_names_rank_and_cause(start):
    executor = executor_of(start(3, act="fail@load"))
    with pytest.raises(RankFailed, match="rank 2: ValueError: nothing left on rank 2"):
        executor.load(None, None)  # rank 2 is the first to fail, rank 1 speaks first


def test_what_rank_0_complains_of_itself_is_left_alone(start):
    executor = executor_of(start(act="fail@forward"), ConfigError("no such thing"))
    with pytest.raises(ConfigError, match="no such thing"):
        executor.forward(a_step())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("die@forward", "rank 1 was ended by SIGKILL"),
        ("fail@forward", "rank 1: ValueError: nothing left on rank 1"),
        ("", "a collective failed"),  # of unknown cause: as rank 0 saw it
    ],
)
def test_a_step_that_fails_names_the_rank_behind_it(start, act, message):
    executor = executor_of(start(act=act), CardanError("a collective failed"))
    with pytest.raises(CardanError, match=message):
        executor.forward(a_step())


def test_a_rank_that_died_between_steps(start):
    ranks = start()
    executor = executor_of(ranks)
    os.kill(ranks.pids[0], 9)
    with pytest.raises(RankFailed, match="rank 1 was ended by SIGKILL"):
        run_steps(executor, 100)


def test_a_rank_that_hangs_is_given_up_and_killed(start):
    ranks = start(act="hang@load", end=0.2)
    executor = executor_of(ranks)
    ranks.tell(Load())
    with pytest.raises(RankFailed, match="rank 1 did not answer in time"):
        ranks.answers(Done, 0.2)
    pid = ranks.pids[0]
    executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stopped_rank_takes_no_messages_for_ever(start):
    ranks = start(act="hang@forward", patience=0.3, end=0.2)
    ranks.await_opened()
    with pytest.raises(RankFailed, match=r"rank 1 took no message for 0\.3 s: it is"):
        tell_steps(ranks, 100_000)


def test_ranks_end_with_the_process_that_started_them():
    """Even one that hangs: the end of the socket ends it."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_runner_ranks as t, os\n"
        "ranks = t.RankProcesses(t.COMMAND)\n"
        "config = t.EngineConfig(model=t.ModelConfig(model='none'),"
        " plugins=t.PluginConfig(options={'act': 'hang@build'}))\n"
        "info = t.DeviceInfo(platform='t', index=0, name='t', arch='t')\n"
        "ranks.start(t.RankOrder(1, 2, 'file:///none', 't', info, config), {})\n"
        "ranks.await_opened(); print(ranks.pids[0], flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    pid = int(done.stdout)
    for _ in range(1000):
        if not is_running(pid):
            break
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_meeting_is_bounded(start):
    ranks = start(patience=0.3)
    ranks.await_opened()
    assert ranks.during(lambda: 5) == 5
    with pytest.raises(KeyError, match="odd"):
        ranks.during(lambda: {}["odd"])
    with pytest.raises(RankFailed, match="did not meet"):
        ranks.during(lambda: time.sleep(2))


def test_a_failure_while_meeting(start):
    ranks = start(act="config@build")
    ranks.await_opened()
    with pytest.raises(ConfigError, match=r"rank 1: model\.dtype is odd"):
        ranks.during(lambda: time.sleep(3))
