"""Intel's GPUs as the kernel shows them under ``/sys/class/drm``, without touching any.

Reading needs no driver of user space, no permission, and no import of torch, and is safe before and
after a fork.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_INTEL = 0x8086
# First byte of PCI class codes of displays.
_DISPLAY = 0x03
_CARD = re.compile(r"card\d+")
_RENDER = re.compile(r"renderD\d+")
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU.

    ``address`` on the PCI bus. ``driver`` is the kernel's: ``i915`` or ``xe``. ``render_node`` is
    the name of the device file that programs compute through; empty: the kernel made none.
    """

    address: str
    device_id: int
    driver: str
    render_node: str


def intel_cards(root: Path) -> tuple[Card, ...]:
    """All of the machine whose root directory is ``root``, in order of their addresses."""
    folder = root / "sys" / "class" / "drm"
    try:
        entries = sorted(entry for entry in folder.iterdir() if _CARD.fullmatch(entry.name))
    except OSError:
        return ()
    found = [card for card in map(_card, entries) if card is not None]
    return tuple(sorted(found, key=lambda card: card.address))


def _card(entry: Path) -> Card | None:
    device = entry / "device"
    if _number(device / "vendor") != _INTEL:
        return None
    kind, device_id = _number(device / "class"), _number(device / "device")
    if kind is None or kind >> 16 != _DISPLAY or device_id is None:
        return None
    driver = device / "driver"
    return Card(
        address=device.resolve().name,
        device_id=device_id,
        driver=driver.resolve().name if driver.exists() else "none",
        render_node=_render_node(device),
    )


def _render_node(device: Path) -> str:
    try:
        names = sorted(entry.name for entry in (device / "drm").iterdir())
    except OSError:
        return ""
    return next((name for name in names if _RENDER.fullmatch(name)), "")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii").strip(), 16)
    except (OSError, ValueError):
        return None


def render_path(root: Path, card: Card) -> Path:
    return root / "dev" / "dri" / card.render_node


def may_open(path: Path) -> bool:
    """Whether this process may read and write the device file."""
    return os.access(path, os.R_OK | os.W_OK)


def host_memory(root: Path) -> tuple[int, int] | None:
    """Total and available bytes of the host, which integrated GPUs share; None: not known."""
    try:
        lines = (root / "proc" / "meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return tuple(  # type: ignore[return-value]
            int(fields[name].split()[0]) * _KIB for name in ("MemTotal", "MemAvailable")
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None


def visible(
    cards: Sequence[tuple[Card, int]], mask: str | None, joins_tiles: bool
) -> tuple[tuple[Card, int], ...]:
    """Cards and tiles that ``ZE_AFFINITY_MASK`` leaves, in the order of the bus.

    ``cards`` are devices as the driver counts them: cards if it ``joins_tiles``, else tiles. The
    mask then names numbers of cards, and of tiles behind a point, or numbers of tiles.
    """
    if mask is None:
        return tuple(cards)
    chosen = set()
    for entry in mask.split(","):
        number, point, tile = entry.strip().partition(".")
        if number.isdecimal() and (not point or (joins_tiles and tile.isdecimal())):
            chosen.add(int(number))
    return tuple(card for index, card in enumerate(cards) if index in chosen)


def finder(root: Path, folders: Sequence[str]) -> Callable[[str], bool]:
    """Whether the loader of programs would find a library: in ``folders``, the usual ones, or its
    cache."""
    usual = ("usr/lib", "usr/lib64", "usr/local/lib", "usr/lib/x86_64-linux-gnu", "lib", "lib64")
    places = [*map(Path, folders), *(root / folder for folder in usual)]

    def is_there(library: str) -> bool:
        if any((place / library).exists() for place in places):
            return True
        try:
            return library.encode() in (root / "etc" / "ld.so.cache").read_bytes()
        except OSError:
            return False

    return is_there
