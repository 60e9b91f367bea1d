"""Looks inside an offline engine: what must read zero when nobody asks for anything."""

import time

from cardan import LLM


def idle_facts(llm: LLM) -> dict[str, int]:
    engine = llm._client._loop._engine
    # Of several ranks, the one in this process.
    executor = getattr(engine._executor, "_local", engine._executor)
    scheduler = engine._scheduler
    cache, table = scheduler._cache, scheduler._table
    sampling = executor._runner._sampling
    return {
        "sequences": len(scheduler._sequences),
        "waiting": len(scheduler._waiting),
        "waiting_tokens": scheduler._waiting.num_tokens,
        "running": len(scheduler._running),
        "used_rows": len(table.keys) - table.num_free,
        "used_blocks": cache.num_used,
        "references": sum(sum(pool._ref_counts) for pool in cache._pools),
        "device_rows": executor.num_live_rows,
        "sampling_rows": sampling.num_rows,
        "in_flight": len(engine._in_flight),
        "front": llm._frontend.num_live,
    }


def assert_idle(llm: LLM, patience: float = 5.0) -> None:
    """The engine frees the last rows with its next (empty) step: give it that long."""
    deadline = time.monotonic() + patience
    while any(idle_facts(llm).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    facts = idle_facts(llm)
    assert not any(facts.values()), facts
