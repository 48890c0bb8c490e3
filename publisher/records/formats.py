"""How numbers are written, wherever a person reads them: on a card, on a chart, in a terminal, in a message.

Each kind of number has one form, and this module has them all. It imports nothing, so that any room but the border
may use it; it lies with the records because what it writes are their figures. What tests hold to the last digit, such
as a message about two figures that should be equal, is not written with it.
"""

from collections.abc import Iterable

_HALF_A_HUNDREDTH = 0.00005  # of one per cent: half of the last digit of a percentage
_GIGABYTE, _MEGABYTE, _KILOBYTE = 1e9, 1e6, 1e3
_ROUNDS_UP = 0.9995  # of a unit: from here on, three digits of the next smaller unit would read 1000
_HOUR, _MINUTE = 3600, 60  # seconds


def count(number: int) -> str:
    """Return a whole number with commas between thousands: `6,373`."""
    return f"{number:,}"


def figure(value: float) -> str:
    """Return a figure with three significant digits: 1.0 as `1.00`, 0.00351 as it is. P-values have this form too."""
    return f"{value:#.3g}"


def percent(share: float) -> str:
    """Return a share in per cent with two decimals: 0.0009 as `0.09%`.

    `0%` and `100%` are exact: what is near them reads `<0.01%` or `>99.99%`.
    """
    if share in {0, 1}:
        return f"{100 * share:.0f}%"
    if 0 < share < _HALF_A_HUNDREDTH:
        return "<0.01%"
    if 1 - _HALF_A_HUNDREDTH <= share < 1:
        return ">99.99%"
    return f"{100 * share:.2f}%"


def percents(shares: Iterable[float]) -> str:
    """Return several shares in per cent: `0.20% / 0.79% / 2.57%`."""
    return " / ".join(map(percent, shares))


def significant_percent(share: float, *, digits: int) -> str:
    """Return a share in per cent with so many significant digits, without zeros at its end: 0.0000123 as `0.00123%`.

    This is for a figure that is looked at by itself, where `percent` could hide it behind `<0.01%`.
    """
    return f"{100 * share:.{digits}g}%"


def points(share: float) -> str:
    """Return a difference of two shares in percentage points, signed: -0.00012 as `-0.012`, 0 as `0`."""
    return f"{100 * share:+.3g}" if share else "0"


def size(octets: int) -> str:
    """Return a number of bytes in decimal units, as the Hub shows them: `1.32 GB`, `88.8 MB`, `4.0 kB`, `312 B`."""
    if octets >= _ROUNDS_UP * _GIGABYTE:
        return f"{octets / _GIGABYTE:.2f} GB"
    if octets >= _ROUNDS_UP * _MEGABYTE:
        return f"{octets / _MEGABYTE:.1f} MB"
    if octets >= _KILOBYTE:
        return f"{octets / _KILOBYTE:.1f} kB"
    return f"{octets} B"


def part_of_size(done: int, total: int) -> str:
    """Return how many of so many bytes are done, in the unit of the total: `1.20/9.80 GB`."""
    scale, unit = (_GIGABYTE, "GB") if total >= _GIGABYTE else (_MEGABYTE, "MB")
    return f"{done / scale:.2f}/{total / scale:.2f} {unit}"


def bytes_per_second(rate: float) -> str:
    """Return a rate in bytes per second: `1.5 MB/s`."""
    return f"{rate / _MEGABYTE:.3g} MB/s"


def pieces_per_second(rate: float) -> str:
    """Return a rate in pieces per second: `2/s`; below one a second, by the minute: `30/min`."""
    return f"{rate:.3g}/s" if rate >= 1 else f"{_MINUTE * rate:.3g}/min"


def duration(seconds: float) -> str:
    """Return a length of time in hours, minutes and seconds: `0:05`, `12:40`, `3:02:11`."""
    hours, rest = divmod(round(seconds), _HOUR)
    minutes, last = divmod(rest, _MINUTE)
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"
