"""Regular expressions of others, matched in linear time by RE2 and never by `re`.

PEFT writes its patterns for `re`. Here they are matched by the same rules, as far as both engines read a pattern alike:
literals, classes, groups, alternatives and repetitions. A pattern with anything else (a look-around, a reference back,
flags) is not tried at all, and the error says so. The work is bounded too: by the length of a pattern, its memory, and
the number of names times the size of the program.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Self

import re2

from publisher.border.limits import LIMITS
from publisher.errors import PatternError, UncheckablePatternError, shown

_PLAIN: Final = re.compile(r"[\w.-]+", re.ASCII)
_ESCAPED: Final = r"[ -/:-@\[-^`{-~]"  # signs that a backslash makes literal in both
_CLASS: Final = rf"\[\^?\]?(?:\\[dDwWsS]|\\{_ESCAPED}|(?!--)[^\]\\\[&~|])*\]"
_TOKEN: Final = re.compile(
    rf"\\[dDwWsSbB]|\\{_ESCAPED}|{_CLASS}|(?P<open>\((?:\?:|\?P<[A-Za-z_]\w*>)?(?![?*]))|"
    r"(?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|[^\\\[({*+?}\n]",
    re.ASCII,
)
_DEPTH: Final = 100  # groups within groups
_UNLIKE: Final = re.compile(r"\\[dDwWsSbB]")  # RE2 knows ASCII alone in these


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern of the dialect that `re` and RE2 share.

    Attributes:
        text: as it is matched.
        program: RE2's.
    """

    text: str
    program: Any

    @classmethod
    def of(cls, text: str, *, captures: bool = False) -> Self:
        """Return the pattern that a text stands for.

        Args:
            text: the regular expression, as it was written.
            captures: whether the text that groups match is asked for.

        Returns:
            The compiled pattern.

        Raises:
            PatternError: it is no regular expression at all.
            UncheckablePatternError: it is too long, or holds what RE2 does not have or reads otherwise.
        """
        _require_shared(text)
        options = re2.Options()
        options.log_errors, options.never_capture, options.max_mem = False, not captures, LIMITS.pattern_bytes
        try:
            return cls(text, re2.compile(text, options))
        except re2.error as error:
            raise _refusal(text, error) from None

    def matches(self, name: str) -> bool:
        """Return whether the whole of the name matches.

        Raises:
            UncheckablePatternError: the name holds a line feed, or characters that the engines class differently.
        """
        _require_like(self.text, name)
        return self.program.fullmatch(name) is not None

    def first_group(self, name: str, group: str) -> str | None:
        """Return what the group matched at the beginning of the name, or None where nothing matches there."""
        _require_like(self.text, name)
        found = self.program.match(name)
        return None if found is None else found.group(group)

    def steps(self, names: Iterable[str]) -> int:
        """Return a bound for the work of matching these names."""
        return int(self.program.programsize) * sum(map(len, names))


def is_plain(text: str) -> bool:
    """Return whether a pattern consists of letters, digits, `_`, `-` and `.` alone: harmless to any engine."""
    return _PLAIN.fullmatch(text) is not None and len(text) <= LIMITS.name_characters


def matching(text: str, names: Sequence[str]) -> list[str]:
    """Return the names that the pattern matches as a whole.

    Raises:
        PatternError, UncheckablePatternError: as `Pattern.of`, or the names are too many for this pattern.
    """
    pattern = Pattern.of(text)
    _require_bounded(pattern.steps(names))
    return [name for name in names if pattern.matches(name)]


@dataclass(frozen=True)
class Keys:
    """The keys of rank_pattern or alpha_pattern, in their order, as PEFT's get_pattern_key takes them.

    A key is to match the whole name, or what follows any dot in it, and the first key that does counts. Keys that hold
    no special character but the dot, which is any character, are looked up; the others are matched by RE2.
    """

    keys: Sequence[str]
    _steps: list[int] = field(default_factory=lambda: [0])

    @cached_property
    def _plain(self) -> dict[int, dict[tuple[int, ...], dict[str, int]]]:
        """By length, and the places of the dots: the place in the order by the key without its dots."""
        found: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        for place, key in enumerate(self.keys):
            if is_plain(key):
                dots = tuple(at for at, letter in enumerate(key) if letter == ".")
                found.setdefault(len(key), {}).setdefault(dots, {}).setdefault(_without(key, dots), place)
        return found

    @cached_property
    def _others(self) -> list[tuple[int, Pattern]]:
        return [(at, Pattern.of(rf"(.*\.)?({key})$")) for at, key in enumerate(self.keys) if not is_plain(key)]

    def key_for(self, name: str) -> str | None:
        """Return the first key that matches the module's name, or None.

        Raises:
            PatternError, UncheckablePatternError: as `Pattern.of`, or there is too much to match.
        """
        places = sorted({*self._looked_up(name), *self._matched(name)})
        return self.keys[places[0]] if places else None

    def used(self, names: Iterable[str]) -> set[str]:
        """Return the keys that match any of the names."""
        return {self.keys[place] for name in names for place in {*self._looked_up(name), *self._matched(name)}}

    def _looked_up(self, name: str) -> Iterator[int]:
        if self._plain and "\n" in name:
            raise UncheckablePatternError(f"the name {shown(name)} holds a line feed")
        for start in [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]:
            shapes = self._plain.get(len(name) - start, {})
            self._count(len(shapes) * len(name))
            for dots, places in shapes.items():
                place = places.get(_without(name[start:], dots))
                if place is not None:
                    yield place

    def _matched(self, name: str) -> Iterator[int]:
        for place, pattern in self._others:
            self._count(pattern.steps([name]))
            if pattern.matches(name):
                yield place

    def _count(self, steps: int) -> None:
        self._steps[0] += steps
        _require_bounded(self._steps[0])


def literal(names: Iterable[str]) -> str:
    """Return a pattern for `re` that matches just these names as a whole, without anything to backtrack over."""
    return rf"\A(?:{'|'.join(map(re.escape, names))})\Z"


def _without(text: str, places: Sequence[int]) -> str:
    """Return the text with a NUL for each of these places, which no key or name holds."""
    letters = list(text)
    for place in places:
        letters[place] = "\0"
    return "".join(letters)


def _require_shared(text: str) -> None:
    """Raise UncheckablePatternError unless `re` and RE2 read the pattern alike."""
    if len(text) > LIMITS.pattern_characters:
        raise UncheckablePatternError(
            f"a pattern of {len(text):,} characters", expected=f"at most {LIMITS.pattern_characters:,}"
        )
    place, repeated, depth = 0, False, 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        repeats = found is not None and found["repeat"] is not None
        if found is None or (repeats and repeated):
            raise _not_shared(text, place)
        depth += (found["open"] is not None) - (found[0] == ")")
        if depth > _DEPTH:
            raise UncheckablePatternError(f"the pattern {shown(text)} has groups more than {_DEPTH} deep")
        place, repeated = found.end(), repeats


def _not_shared(text: str, place: int) -> PatternError:
    return UncheckablePatternError(
        f"the pattern {shown(text)} holds {shown(text[place : place + 8])} at character {place + 1}",
        expected="literals, classes, groups, alternatives and repetitions, which are matched in linear time",
    )


def _refusal(text: str, error: Exception) -> PatternError:
    message = error.args[0] if error.args else ""
    why = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    if "repetition size" in why or "too large" in why:
        return UncheckablePatternError(f"the pattern {shown(text)} is too large: {why}")
    return PatternError(f"{shown(text)} is no regular expression: {why}")


def _require_like(text: str, name: str) -> None:
    """Raise UncheckablePatternError for a name over which the two engines may differ."""
    if "\n" in name or len(name) > LIMITS.name_characters:
        raise UncheckablePatternError(f"the name {shown(name)} holds a line feed, or is too long")
    if not name.isascii() and _UNLIKE.search(text):
        raise UncheckablePatternError(f"the pattern {shown(text)} on {shown(name)}, which goes beyond ASCII")


def _require_bounded(steps: int) -> None:
    if steps > LIMITS.pattern_steps:
        raise UncheckablePatternError("the patterns and names together are too many to match")
