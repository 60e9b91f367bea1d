"""Where a kernel lets the next one begin, and where it waits for those before; the rules are in
``cardan.platforms.shared.triton.dependent_launch``."""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # of Triton's builds for other vendors, on whose devices nothing overlaps
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Once each program was here or has ended, the next kernel may begin."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_constants(is_fixed, OVERLAPS: tl.constexpr):
    """After it constants may be loaded; it waits for earlier kernels unless ``is_fixed``, as of
    ``are_fixed``."""
    if OVERLAPS:
        if is_fixed == 0:
            gdc_wait()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """After it everything may be loaded and stored. Waiting again takes no time."""
    if OVERLAPS:
        gdc_wait()
