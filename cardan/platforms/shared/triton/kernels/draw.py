"""Drawing a token from what temperature, top-k, top-p and min-p leave: one program a row, no sort.

Cuts are found by search over order keys: four intervals a pass, until one key is left, so that they
are exact. With top-k the search is among few candidates: the k-th largest of the maxima of blocks
of the vocabulary is not above the k-th largest logit.
"""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.greedy import order_key


@triton.jit
def _block(row, start, vocab_size, largest, heat, BLOCK: tl.constexpr):
    """Of BLOCK logits: order keys (int64, least past the end), and the tempered logits below 0."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    keys = tl.where(ids < vocab_size, order_key(values).to(tl.int64), -0x80000000)
    return keys, (values - largest) / heat


@triton.jit
def _measure(
    row, vocab_size, largest, heat, least, low, step, high, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many tokens, or how much weight, has keys of ``least`` or more and of each of three
    pivots or more."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        keys, tempered = _block(row, start, vocab_size, largest, heat, BLOCK)
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if MASS:
            weight = tl.exp(tempered)
        weight = tl.where(keys >= least, weight, 0.0)
        first += tl.where(keys >= tl.minimum(low + step, high), weight, 0.0)
        second += tl.where(keys >= tl.minimum(low + 2 * step, high), weight, 0.0)
        third += tl.where(keys >= tl.minimum(low + 3 * step, high), weight, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _search(
    row, vocab_size, largest, heat, least, high, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key from ``least`` to ``high`` above which, itself included, tokens number (or
    weigh) ``wanted`` at least; ``least`` where none does."""
    low = least
    while low < high:
        step = (high - low + 4) // 4
        one, two, three = _measure(
            row, vocab_size, largest, heat, least, low, step, high, MASS, BLOCK
        )
        last = high
        if three >= wanted:
            low = tl.minimum(low + 3 * step, last)
        elif two >= wanted:
            high = tl.minimum(low + 3 * step, last) - 1
            low = tl.minimum(low + 2 * step, last)
        elif one >= wanted:
            high = tl.minimum(low + 2 * step, last) - 1
            low = tl.minimum(low + step, last)
        else:
            high = tl.minimum(low + step, last) - 1
    return low


@triton.jit
def _weights(keys, tempered, cut, allowed_ties, ties_before, floor, BLOCK: tl.constexpr):
    """Weights of the tokens that are left, and the number of ties up to here. ``allowed_ties`` of
    the tokens at the cut are left, those of the lowest ids; -1: all."""
    weight = tl.where((keys >= cut) & (tempered >= floor), tl.exp(tempered), 0.0)
    if allowed_ties >= 0:
        tied = (keys == cut).to(tl.int32)
        rank = ties_before + tl.cumsum(tied, 0)
        weight = tl.where((tied > 0) & (rank > allowed_ties), 0.0, weight)
        ties_before += tl.sum(tied, 0)
    return weight, ties_before


@triton.jit
def _cuts(row, vocab_size, largest, heat, top_key, k, share, BLOCK: tl.constexpr):
    """The least key that top-k and top-p leave, and how many ties of it (-1: all)."""
    least = tl.full([], -0x7F800001, tl.int64)  # the key of minus infinity
    cut = least
    if (k > 0) & (k < vocab_size):
        cut = _search(
            row, vocab_size, largest, heat, least, top_key, k.to(tl.float32), False, BLOCK
        )
    allowed = tl.full([], -1, tl.int32)
    if share < 1.0:
        total, _, _ = _measure(row, vocab_size, largest, heat, cut, cut, 0, cut, True, BLOCK)
        wanted = (share * total).to(tl.float32)
        cut = _search(row, vocab_size, largest, heat, cut, top_key, wanted, True, BLOCK)
        above = tl.zeros([BLOCK], tl.float32)
        weight = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            keys, tempered = _block(row, start, vocab_size, largest, heat, BLOCK)
            value = tl.exp(tempered)
            above += tl.where(keys > cut, value, 0.0)
            weight = tl.maximum(weight, tl.where(keys == cut, value, 0.0))
        missing = (wanted - tl.sum(above, 0)) / tl.maximum(tl.max(weight, 0), 1.0e-30)
        allowed = tl.minimum(tl.maximum(tl.ceil(missing), 1.0), 1.0e9).to(tl.int32)
    return cut, allowed


@triton.jit
def _kth_maximum(maxima, num_maxima, k, BLOCKS: tl.constexpr):
    """The k-th largest order key of ``maxima`` (order keys in the upper halves), the key of minus
    infinity where there are fewer."""
    place = tl.arange(0, BLOCKS)
    found = tl.load(maxima + place, mask=place < num_maxima, other=-0x7FFFFFFFFFFFFFFF) >> 32
    low = tl.full([], -0x7F800001, tl.int64)
    high = tl.max(found, 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((found >= middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _gather(row, vocab_size, least, values, ids, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the logits whose order keys are ``least`` or more, in order of ids, and their ids.
    Returns how many there are; those past ROOM are counted only."""
    count = 0
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocab_size
        logits = tl.load(row + places, mask=inside, other=float("-inf"))
        wanted = inside & (order_key(logits).to(tl.int64) >= least)
        number = tl.sum(wanted.to(tl.int32), 0)
        if number > 0:
            target = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
            mask = wanted & (target < ROOM)
            tl.store(values + target, logits, mask=mask)
            tl.store(ids + target, places, mask=mask)
            count += number
    return count


@triton.jit
def _draw(row, size, largest, heat, cut, allowed, floor, uniform, BLOCK: tl.constexpr):
    """The place up to which the weights that the cuts leave exceed ``uniform`` of their sum."""
    mass = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        keys, tempered = _block(row, start, size, largest, heat, BLOCK)
        weight, ties = _weights(keys, tempered, cut, allowed, ties, floor, BLOCK)
        mass += tl.sum(weight, 0).to(tl.float64)
        ids = start + tl.arange(0, BLOCK)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, ids, 0), 0).to(tl.int64))
    target = uniform * mass
    before = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    token = last
    for start in range(0, size, BLOCK):
        keys, tempered = _block(row, start, size, largest, heat, BLOCK)
        weight, ties = _weights(keys, tempered, cut, allowed, ties, floor, BLOCK)
        inside = tl.sum(weight, 0).to(tl.float64)
        if (target >= before) & (target < before + inside):
            ends = before + tl.cumsum(weight.to(tl.float64), 0)
            ids = start + tl.arange(0, BLOCK)
            # The sum of a block may be rounded otherwise than its prefix sums.
            beyond = tl.where((ends > target) & (weight > 0.0), ids, size)
            final = tl.max(tl.where(weight > 0.0, ids, 0), 0)
            token = tl.minimum(tl.min(beyond, 0), final).to(tl.int64)
        before += inside
    return token


@triton.jit
def draw_kernel(
    logits,
    maxima,
    few_logits,
    few_ids,
    index,
    uniform,
    temperature,
    top_k,
    shares,
    tokens,
    failed,
    row_stride,
    vocab_size,
    num_maxima,
    HAS_INDEX: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace ``tokens`` [N] of the rows at ``index`` [M], which are the likeliest ones, by drawn
    ones: the first token in order of ids up to which the weights left exceed ``uniform`` [M] of
    all. Rows that ``failed`` keep theirs. ``shares`` [2, M]: top-p, then min-p.

    ``maxima`` [N, num_maxima], in BLOCKS places, is from ``chunk_maxima_kernel``. ``few_logits``
    and ``few_ids`` [M, ROOM] are scratch for candidates.
    """
    member = tl.program_id(0)
    place = member.to(tl.int64)
    if HAS_INDEX:
        place = tl.load(index + member)
    if tl.load(failed + place):
        return
    row = logits + place * row_stride
    largest = tl.load(row + tl.load(tokens + place)).to(tl.float32)
    heat = 1.0
    if HAS_TEMPERATURE:
        heat = tl.load(temperature + member)
    cut = tl.full([], -0x7F800001, tl.int64)
    allowed = tl.full([], -1, tl.int32)
    floor = float("-inf")
    size = vocab_size
    is_few = 0
    if HAS_CUTS:
        share = tl.load(shares + member)
        least_share = tl.load(shares + tl.num_programs(0) + member).to(tl.float32)
        if least_share > 0.0:
            floor = tl.log(least_share)
        k = tl.load(top_k + member)
        if (k > 0) & (k <= num_maxima):
            least = _kth_maximum(maxima + place * num_maxima, num_maxima, k, BLOCKS)
            few = few_logits + member.to(tl.int64) * ROOM
            few_at = few_ids + member.to(tl.int64) * ROOM
            count = _gather(row, vocab_size, least, few, few_at, ROOM, BLOCK)
            if count <= ROOM:
                tl.debug_barrier()
                row = few
                size = count
                is_few = 1
        top_key = order_key(largest).to(tl.int64)
        cut, allowed = _cuts(row, size, largest, heat, top_key, k, share, BLOCK)
    wanted = tl.load(uniform + member).to(tl.float64)
    token = _draw(row, size, largest, heat, cut, allowed, floor, wanted, BLOCK)
    if is_few == 1:
        token = tl.load(few_ids + member.to(tl.int64) * ROOM + token).to(tl.int64)
    tl.store(tokens + place, token)
