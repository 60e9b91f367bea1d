"""What the device knows of each live sequence, in permanent rows."""

from collections.abc import Sequence

import numpy as np
import torch

from cardan.core.types.step import Int64, NewRow


class RequestStates:
    """Owner of the rows' tokens. Joins and leaves move no other row.

    Attributes:
        token_ids: [max_num_rows, max_model_len] int32 on the device; sampled tokens are written
            here by the sampling launch, so the next step needs no host.
        num_prompt_tokens: [max_num_rows] int32, host.
        prompt_logprobs: rows that want log-probabilities of their prompt, with their number.
    """

    def __init__(
        self, max_num_rows: int, max_model_len: int, device: torch.device, *, on_host: bool = False
    ) -> None:
        """``on_host``: the device computes at once, in memory of the host."""
        # Zeroed pages of host memory are mapped only when a row's tokens reach them.
        self.token_ids = torch.zeros(max_num_rows, max_model_len, dtype=torch.int32, device=device)
        self._host_token_ids = self.token_ids.numpy() if on_host else None
        self.num_prompt_tokens = np.zeros(max_num_rows, np.int32)
        self.prompt_logprobs: dict[int, int] = {}
        self._live: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def add(self, row: NewRow) -> None:
        self._live.add(row.row)
        tokens = torch.from_numpy(row.token_ids)
        self.token_ids[row.row, : len(tokens)].copy_(tokens, non_blocking=True)
        self.num_prompt_tokens[row.row] = row.num_prompt_tokens
        if row.params.prompt_logprobs is not None:
            self.prompt_logprobs[row.row] = row.params.prompt_logprobs

    def append(self, rows: Int64, lengths: Int64, token_ids: torch.Tensor) -> None:
        """Write the tokens sampled for ``rows`` behind their ``lengths`` tokens.

        The next step reads them from here, whether or not the host has seen them.
        """
        if self._host_token_ids is not None:
            self._host_token_ids[rows, lengths] = token_ids.numpy()
            return
        device = token_ids.device
        where = torch.from_numpy(lengths).to(device, non_blocking=True)
        places = torch.from_numpy(rows).to(device, non_blocking=True)
        self.token_ids[places, where] = token_ids.to(torch.int32)

    def remove(self, rows: Sequence[int]) -> None:
        self._live.difference_update(rows)
        for row in rows:
            self.prompt_logprobs.pop(row, None)
