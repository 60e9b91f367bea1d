"""Dtypes of caches of the Triton attention, besides those it computes in; imports no torch."""

FLOAT8 = "float8_e4m3"
_NVIDIA_FROM = 89
_AMD = ("gfx942", "gfx950", "gfx12")


def cache_dtypes(arch: str) -> tuple[str, ...]:
    """Dtypes of caches on GPUs of this name (``sm_90``, ``gfx942``).

    Float8 is for those that have instructions to convert it. Those of gfx942 convert another form
    of it: there arithmetic converts, and caches hold the same bits as everywhere.
    """
    if arch.startswith("sm_"):
        converts = int(arch.removeprefix("sm_")) >= _NVIDIA_FROM
    else:
        converts = arch.startswith(_AMD)
    return ("int8", FLOAT8) if converts else ("int8",)
