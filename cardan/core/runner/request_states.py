"""What the device knows of each live sequence, in permanent rows."""

from collections.abc import Sequence

import numpy as np
import torch

from cardan.core.types.step import Int32, NewRow


class RequestStates:
    """Owner of the rows' tokens. Joins and leaves move no other row.

    Attributes:
        token_ids: [max_num_rows, max_model_len] int32 on the device; sampled tokens are written
            here by the sampling launch, so the next step needs no host.
        fresh: tokens of new rows that ``token_ids`` does not hold yet: they come with the inputs
            of the first step that computes the row. Empty where the device computes at once.
        num_prompt_tokens: [max_num_rows] int32, host.
        prompt_logprobs: rows that want log-probabilities of their prompt, with their number.
    """

    def __init__(
        self, max_num_rows: int, max_model_len: int, device: torch.device, *, on_host: bool = False
    ) -> None:
        """``on_host``: the device computes at once, in memory of the host."""
        # Zeroed pages of host memory are mapped only when a row's tokens reach them.
        self.token_ids = torch.zeros(max_num_rows, max_model_len, dtype=torch.int32, device=device)
        self._flat = self.token_ids.view(-1)
        self._host = self._flat.numpy() if on_host else None
        self.fresh: dict[int, Int32] = {}
        self.num_prompt_tokens = np.zeros(max_num_rows, np.int32)
        self.prompt_logprobs: dict[int, int] = {}
        self._live: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def host_token_ids(self) -> Int32:
        """``token_ids`` where the device computes at once.

        Raises:
            RuntimeError: it does not.
        """
        if self._host is None:
            raise RuntimeError("the rows' tokens are on a device")
        return self._host.reshape(self.token_ids.shape)

    def add(self, row: NewRow) -> None:
        self._live.add(row.row)
        if self._host is None:
            self.fresh[row.row] = row.token_ids
        else:
            self.host_token_ids[row.row, : len(row.token_ids)] = row.token_ids
        self.num_prompt_tokens[row.row] = row.num_prompt_tokens
        if row.params.prompt_logprobs is not None:
            self.prompt_logprobs[row.row] = row.params.prompt_logprobs

    def write(self, row: int) -> None:
        """Write the fresh tokens of a row now, by a copy of their own."""
        tokens = torch.from_numpy(self.fresh.pop(row))
        self.token_ids[row, : len(tokens)].copy_(tokens, non_blocking=True)

    def append(self, places: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens to ``places`` [S] int64 of the flattened ``token_ids``.

        The next step reads them from here, whether or not the host has seen them.
        """
        if self._host is not None:
            self._host[places.numpy()] = token_ids.numpy()
        else:
            self._flat.index_copy_(0, places, token_ids.to(torch.int32))

    def remove(self, rows: Sequence[int]) -> None:
        self._live.difference_update(rows)
        for row in rows:
            self.fresh.pop(row, None)
            self.prompt_logprobs.pop(row, None)
