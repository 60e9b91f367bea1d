"""Drawing a token from what temperature, top-k, top-p and min-p leave: one program a row, no sort.

Cuts are order keys, found by search and therefore exact: each pass over the row measures what lies
above three pivots. The search is closed in first, by what chunks of the vocabulary have as maxima
(the k-th largest of these is not above the k-th largest logit) or by what a share leaves to chance
(tokens of a weight below it, all together, do not add up to the rest); as soon as few tokens are in
question these are copied, and the search goes on among them.
"""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.greedy import key_value, order_key
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def _block(row, start, size, largest, heat, BLOCK: tl.constexpr):
    """Of BLOCK logits: order keys (int32, least past the end), and the tempered logits below 0."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    keys = tl.where(ids < size, order_key(values), -0x7FFFFFFF)
    return keys, (values - largest) / heat


@triton.jit
def _measure(row, size, largest, heat, one, two, three, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights (MASS; float64, else the numbers again) and numbers (int32) of the tokens whose keys
    are each of three ascending pivots or more. Rows have less than 1024 blocks."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    # Three counters of ten bits.
    counters = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        keys, tempered = _block(row, start, size, largest, heat, BLOCK)
        in_first = keys >= one
        in_second = keys >= two
        in_third = keys >= three
        counters += in_first.to(tl.int32)
        counters += (in_second.to(tl.int32) << 10) + (in_third.to(tl.int32) << 20)
        if MASS:
            weight = tl.exp(tempered)
            first += tl.where(in_first, weight, 0.0)
            second += tl.where(in_second, weight, 0.0)
            third += tl.where(in_third, weight, 0.0)
    number = tl.sum(counters & 1023, 0)
    fewer = tl.sum((counters >> 10) & 1023, 0)
    least = tl.sum(counters >> 20, 0)
    if MASS:
        total = tl.sum(first.to(tl.float64), 0)
        less = tl.sum(second.to(tl.float64), 0)
        rest = tl.sum(third.to(tl.float64), 0)
    else:
        total = number.to(tl.float64)
        less = fewer.to(tl.float64)
        rest = least.to(tl.float64)
    return total, less, rest, number, fewer, least


@triton.jit
def _pivot(low, high, bottom, width, is_even, number: tl.constexpr):
    """The ``number``-th of three keys (int32) that quarter an interval (int64), of the logits that
    they stand for while ``is_even``; above ``low``."""
    even = order_key(bottom + width * (number * 0.25)).to(tl.int64)
    step = (high - low + 4) // 4
    key = tl.where(is_even, even, low + number * step)
    return tl.minimum(tl.maximum(key, low + 1), high)


@triton.jit
def _narrow(
    row,
    size,
    largest,
    heat,
    low,
    high,
    wanted,
    enough,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Close in on the largest key from ``low`` to ``high`` above which, itself included, tokens
    weigh (MASS) or number ``wanted`` at least, until ``enough`` tokens or fewer are in question (0:
    until one key is). ``low`` stays where none does.

    Returns both ends, and the weight or number above the upper one (float64).
    """
    above = tl.zeros([], tl.float64)
    beyond = tl.zeros([], tl.int32)
    reached = beyond + size
    rounds = tl.zeros([], tl.int32)
    while (low < high) & (reached - beyond > enough):
        bottom = key_value(low.to(tl.int32))
        width = key_value(high.to(tl.int32)) - bottom
        # Logits are about evenly spread, their keys are not; keys end the search for certain.
        is_even = (rounds < 6) & (bottom > -1.0e30)
        one = _pivot(low, high, bottom, width, is_even, 1)
        two = _pivot(low, high, bottom, width, is_even, 2)
        three = _pivot(low, high, bottom, width, is_even, 3)
        total, less, rest, number, fewer, least = _measure(
            row,
            size,
            largest,
            heat,
            one.to(tl.int32),
            two.to(tl.int32),
            three.to(tl.int32),
            MASS,
            BLOCK,
        )
        if rest >= wanted:
            low = three
            reached = least
        elif less >= wanted:
            low = two
            reached = fewer
            high = three - 1
            above = rest
            beyond = least
        elif total >= wanted:
            low = one
            reached = number
            high = two - 1
            above = less
            beyond = fewer
        else:
            high = one - 1
            above = total
            beyond = number
        rounds += 1
    return low, high, above


@triton.jit
def _gather(row, size, low, high, values, ids, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the logits whose order keys are from ``low`` to ``high``, in order of ids, and their
    ids. Returns how many there are; those past ROOM are counted only."""
    count = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < size
        logits = tl.load(row + places, mask=inside, other=float("-inf"))
        keys = order_key(logits.to(tl.float32)).to(tl.int64)
        wanted = inside & (keys >= low) & (keys <= high)
        number = tl.sum(wanted.to(tl.int32), 0)
        if number > 0:
            target = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
            mask = wanted & (target < ROOM)
            tl.store(values + target, logits, mask=mask)
            tl.store(ids + target, places, mask=mask)
            count += number
    return count


@triton.jit
def _cut(
    row,
    size,
    few,
    few_at,
    largest,
    heat,
    low,
    high,
    wanted,
    enough,
    MASS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``_narrow``, to the end; what is in question when it is ``enough``, ROOM at most, goes to
    ``few`` and ``few_at``. Returns the key and the weight or number above it."""
    low, high, above = _narrow(row, size, largest, heat, low, high, wanted, enough, MASS, BLOCK)
    if low < high:
        count = _gather(row, size, low, high, few, few_at, ROOM, BLOCK)
        tl.debug_barrier()
        low, high, more = _narrow(
            few, count, largest, heat, low, high, wanted - above, 0, MASS, BLOCK
        )
        above += more
        tl.debug_barrier()
    return low, above


@triton.jit
def _weights(keys, tempered, cut, allowed_ties, ties_before, floor):
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
def _kth_maximum(maxima, num_maxima, k, least, PLACES: tl.constexpr):
    """The k-th largest order key of ``maxima`` (order keys in the upper halves), ``least`` where
    it is lower."""
    place = tl.arange(0, PLACES)
    found = tl.load(maxima + place, mask=place < num_maxima, other=-0x7FFFFFFFFFFFFFFF) >> 32
    low = least
    high = tl.max(found, 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((found >= middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _draw(row, size, largest, heat, cut, allowed, floor, uniform, BLOCK: tl.constexpr):
    """The place up to which the weights that the cuts leave exceed ``uniform`` of their sum."""
    mass = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        keys, tempered = _block(row, start, size, largest, heat, BLOCK)
        weight, ties = _weights(keys, tempered, cut, allowed, ties, floor)
        mass += tl.sum(weight, 0).to(tl.float64)
        ids = start + tl.arange(0, BLOCK)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, ids, 0), 0).to(tl.int64))
    target = uniform * mass
    before = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    token = last
    for start in range(0, size, BLOCK):
        keys, tempered = _block(row, start, size, largest, heat, BLOCK)
        weight, ties = _weights(keys, tempered, cut, allowed, ties, floor)
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
def _nucleus(
    row,
    size,
    few,
    few_at,
    largest,
    heat,
    least,
    top_key,
    share,
    enough,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut that leaves ``share`` of the weight of the tokens from key ``least`` on, and how many
    of the tokens at it are left. ``few`` and what follows ``share`` are as in ``_cut``."""
    pivot = least.to(tl.int32)
    total, _, _, _, _, _ = _measure(row, size, largest, heat, pivot, pivot, pivot, True, BLOCK)
    wanted = share * total
    # Below this all tokens together weigh less than what the share leaves.
    depth = tl.log((size / (total - wanted)).to(tl.float32)) * 1.001 + 0.01
    bound = order_key(largest - heat * depth).to(tl.int64)
    low = tl.maximum(least, tl.minimum(bound, top_key))
    # fmt: off
    cut, above = _cut(
        row, size, few, few_at, largest, heat, low, top_key, wanted, enough, True, ROOM, BLOCK
    )
    # fmt: on
    weight = tl.exp((key_value(cut.to(tl.int32)) - largest) / heat).to(tl.float64)
    missing = (wanted - above) / tl.maximum(weight, 1.0e-30)
    return cut, tl.ceil(tl.minimum(tl.maximum(missing, 1.0), 1.0e9)).to(tl.int32)


@launched
@triton.jit(
    do_not_specialize=["num_maxima", "has_index", "has_temperature", "has_top_k", "has_shares"]
)
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
    has_index,
    has_temperature,
    has_top_k,
    has_shares,
    PLACES: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace ``tokens`` [N] of the rows at ``index`` [M], which are the likeliest ones, by drawn
    ones: the first token in order of ids up to which the weights left exceed ``uniform`` [M] of
    all. Rows that ``failed`` keep theirs. ``shares`` [2, M]: top-p, then min-p.

    ``maxima`` [N, num_maxima] is from ``chunk_maxima_kernel``; more than PLACES of them are not
    used. ``few_logits`` and ``few_ids`` [M, ROOM] are scratch for candidates. What there is of the
    optional arguments is known when it runs, so that one program serves all requests.
    """
    member = tl.program_id(0)
    indexed = has_index != 0
    place = tl.load(index + member, mask=indexed, other=0)
    place = tl.where(indexed, place, member.to(tl.int64))
    if tl.load(failed + place):
        return
    row = logits + place * row_stride
    few = few_logits + member.to(tl.int64) * ROOM
    few_at = few_ids + member.to(tl.int64) * ROOM
    largest = tl.load(row + tl.load(tokens + place)).to(tl.float32)
    top_key = order_key(largest).to(tl.int64)
    heat = tl.load(temperature + member, mask=has_temperature != 0, other=1.0)
    k = tl.load(top_k + member, mask=has_top_k != 0, other=0)
    shared = has_shares != 0
    share = tl.load(shares + member, mask=shared, other=1.0).to(tl.float64)
    least_share = tl.load(shares + tl.num_programs(0) + member, mask=shared, other=0.0)
    floor = tl.log(least_share.to(tl.float64)).to(tl.float32)
    # Tokens of minus infinity, whose key is one less, are never left.
    cut = tl.full([], -0x7F800000, tl.int64)
    allowed = tl.full([], -1, tl.int32)
    size = tl.zeros([], tl.int32) + vocab_size
    enough = tl.full([], ROOM, tl.int32)
    is_few = tl.zeros([], tl.int32)
    if (k > 0) & (k < vocab_size):
        if (k <= num_maxima) & (num_maxima <= PLACES):
            cut = _kth_maximum(maxima + place * num_maxima, num_maxima, k, cut, PLACES)
            count = _gather(row, size, cut, top_key, few, few_at, ROOM, BLOCK)
            if count <= ROOM:
                tl.debug_barrier()
                row = few
                size = count
                enough = tl.zeros([], tl.int32)
                is_few += 1
        number = k.to(tl.float64)
        # fmt: off
        cut, _ = _cut(
            row, size, few, few_at, largest, heat, cut, top_key, number, enough, False, ROOM, BLOCK
        )
        # fmt: on
    if share < 1.0:
        cut, allowed = _nucleus(
            row, size, few, few_at, largest, heat, cut, top_key, share, enough, ROOM, BLOCK
        )
        if is_few == 0:
            count = _gather(row, size, cut, top_key, few, few_at, ROOM, BLOCK)
            if count <= ROOM:
                tl.debug_barrier()
                row = few
                size = count
                is_few += 1
    wanted_share = tl.load(uniform + member).to(tl.float64)
    token = _draw(row, size, largest, heat, cut, allowed, floor, wanted_share, BLOCK)
    if is_few != 0:
        token = tl.load(few_at + token).to(tl.int64)
    tl.store(tokens + place, token)
