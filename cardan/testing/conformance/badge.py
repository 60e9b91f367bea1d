"""A result as a badge: a small SVG, or the JSON from which shields.io draws one."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_LABEL = "cardan"
# Units of the drawing, which is as many pixels large unless it is scaled.
_HEIGHT = 20
_FONT_SIZE = 11
_MARGIN = 7
_LETTER = 6.6
_NARROW = frozenset(" .,:;|il1·'-")
_NARROW_LETTER = 3.7
_INK = "#2b2f36"
_COLOURS = {"none": "#9f3a38", "some": "#8a6d1f", "engine": "#2f6f4f"}
_SHIELDS = {"none": "red", "some": "yellow", "engine": "green"}


def as_badge(document: Mapping[str, Any]) -> str:
    """An SVG that needs nothing from elsewhere: ``cardan | L5 · contract 1.0``.

    Green from L5 on, where whole engines run; red where no level was reached.
    """
    message = badge_text(document)
    left, right = _width(_LABEL), _width(message)
    title = escape(f"{_LABEL}: {message} ({document['platform']}, {document['date'][:10]})")
    colour = _COLOURS[_grade(document)]
    baseline = _HEIGHT / 2 + _FONT_SIZE * 0.36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" '
        f'role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{left + right}" height="{_HEIGHT}" rx="4" fill="{colour}"/>\n'
        f'<path d="M4 0H{left}V{_HEIGHT}H4a4 4 0 0 1-4-4V4a4 4 0 0 1 4-4z" fill="{_INK}"/>\n'
        f'<g fill="#fff" text-anchor="middle" font-size="{_FONT_SIZE}" '
        f'font-family="Verdana,DejaVu Sans,Geneva,sans-serif">\n'
        f"{_word(_LABEL, left / 2, baseline, left)}\n"
        f"{_word(message, left + right / 2, baseline, right)}\n"
        f"</g>\n</svg>\n"
    )


def as_endpoint(document: Mapping[str, Any]) -> str:
    """JSON for https://shields.io/badges/endpoint-badge, to be served where that can read it."""
    facts = {
        "schemaVersion": 1,
        "label": _LABEL,
        "message": badge_text(document),
        "color": _SHIELDS[_grade(document)],
    }
    return json.dumps(facts, ensure_ascii=False, indent=2) + "\n"


def badge_text(document: Mapping[str, Any]) -> str:
    """What was reached, and of which contract."""
    return f"{document['reached'] or 'no level'} · contract {document['contract']}"


def _grade(document: Mapping[str, Any]) -> str:
    reached = document["reached"]
    if reached is None:
        return "none"
    return "engine" if reached >= "L5" else "some"


def _width(text: str) -> int:
    """Room for ``text`` with its margins; it is then stretched to fit whatever font is there."""
    letters = sum(_NARROW_LETTER if letter in _NARROW else _LETTER for letter in text)
    return round(letters) + 2 * _MARGIN


def _word(text: str, middle: float, baseline: float, width: int) -> str:
    return (
        f'<text x="{middle:g}" y="{baseline:g}" textLength="{width - 2 * _MARGIN}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )
