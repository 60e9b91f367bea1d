"""How steps are planned."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler.

    None leaves the first four open: the platform may choose, else the engine does
    (``cardan.core.config.fallbacks``).

    Attributes:
        max_num_seqs: most sequences that run at once; each owns a row.
        max_num_batched_tokens: token budget of one step.
        enable_chunked_prefill: split prompts over steps; without it a prompt waits until the
            budget holds it whole, so the budget must hold the longest prompt.
        long_prefill_token_threshold: most tokens of one prompt in one step; 0: no such bound. A
            prompt that a step could not finish leaves half of the step to others in any case.
        mixed_prefill_token_budget: most prompt tokens in a step in which any sequence decodes: it
            bounds the pause that prompts put into running answers. None: the step's budget alone.
            Does not apply without chunked prefill.
        policy: name of the scheduling policy (entry-point group ``cardan.policies``).
        max_num_queued_reqs: most waiting requests before new ones are refused; None: no cap.
        max_num_queued_tokens: most waiting prompt tokens before new requests are refused.
        async_depth: steps planned ahead of the device; None: what the platform supports.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int | None = None
    mixed_prefill_token_budget: int | None = None
    policy: str = "fcfs"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    async_depth: int | None = None
