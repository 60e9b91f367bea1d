"""Block tables of all rows on the device, one for each KV group."""

import torch

from cardan.core.types.step import BlockEdits, NewRow


class BlockTables:
    """Owner of ``tables[g]`` [max_num_rows, max_blocks] int32; unused entries are stale."""

    def __init__(
        self, num_groups: int, max_num_rows: int, max_blocks: int, device: torch.device
    ) -> None:
        self.tables = tuple(
            torch.zeros(max_num_rows, max_blocks, dtype=torch.int32, device=device)
            for _ in range(num_groups)
        )

    def add(self, row: NewRow) -> None:
        for table, ids in zip(self.tables, row.block_ids, strict=True):
            table[row.row, : len(ids)].copy_(torch.from_numpy(ids), non_blocking=True)

    def edit(self, edits: tuple[BlockEdits, ...]) -> None:
        """Scatter a step's edits, one launch a group."""
        for table, edit in zip(self.tables, edits, strict=True):
            if len(edit.rows):
                device = table.device
                rows = torch.from_numpy(edit.rows).to(device, torch.int64, non_blocking=True)
                columns = torch.from_numpy(edit.columns).to(device, torch.int64, non_blocking=True)
                ids = torch.from_numpy(edit.block_ids).to(device, non_blocking=True)
                table[rows, columns] = ids
