"""YAML as it comes in: plain values alone, bounded in bytes, depth, aliases, entries and digits.

An alias repeats what it stands for wherever the values are walked, so depth and entries are counted with every alias
written out. A key is one scalar. `BoundedLoader` finds all of this while the nodes are composed, before a value is
made of any.
"""

from typing import Any, Final

import yaml

from publisher.border.limits import LIMITS

_NUMBERS: Final = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader that refuses what passes a limit, at the place where it does."""

    def __init__(self, text: str) -> None:
        """Refuse a text that is too long before anything of it is looked at."""
        if len(text.encode(errors="surrogatepass")) > LIMITS.yaml_bytes:
            raise yaml.YAMLError(f"it has more than {LIMITS.yaml_bytes:,} bytes")
        super().__init__(text)
        self._aliases = 0
        self._depth = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # entries and depth of a finished node, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, counted.

        Raises:
            ComposerError: a limit is passed there, or an alias stands for what it is part of.
        """
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if is_alias := isinstance(event, yaml.AliasEvent):
            self._aliases += 1
            self._require(self._aliases <= LIMITS.yaml_aliases, f"has more than {LIMITS.yaml_aliases} aliases", event)
        self._depth += 1
        self._require(self._depth <= LIMITS.yaml_depth, f"is nested more than {LIMITS.yaml_depth} levels deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            if is_alias:
                self._require(id(node) in self._sizes, "is an alias into itself; write it out", event)
            else:
                self._sizes[id(node)] = self._size(node)
            self._require_size(node, event)
        return node

    def _require_size(self, node: yaml.Node, event: yaml.Event) -> None:
        entries, depth = self._sizes[id(node)]
        self._require(entries <= LIMITS.yaml_entries, f"has more than {LIMITS.yaml_entries:,} entries", event)
        self._require(
            self._depth + depth <= LIMITS.yaml_depth, f"is nested more than {LIMITS.yaml_depth} levels deep", event
        )

    def _size(self, node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                self._require(isinstance(key, yaml.ScalarNode), "has a key that is no plain text", key)
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        else:
            long = node.tag in _NUMBERS and len(node.value) > LIMITS.number_digits
            self._require(not long, f"has a number of more than {LIMITS.number_digits} digits", node)
            return 1, 1
        sizes = [self._sizes[id(part)] for part in parts]
        return 1 + sum(entries for entries, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)

    def _require(self, holds: bool, what: str, at: Any) -> None:
        if not holds:
            raise yaml.composer.ComposerError(None, None, what, at.start_mark)


def parse_yaml(text: str) -> Any:
    """Return the plain value that a YAML text stands for.

    Raises:
        ValueError: it is not YAML, holds something that no plain value is, or passes a limit.
    """
    try:
        return yaml.load(text, BoundedLoader)  # noqa: S506 - a SafeLoader with bounds
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (LookupError, AttributeError, TypeError) as error:  # PyYAML's own slips on odd tags
        raise ValueError(f"it holds a value that YAML cannot read ({error})") from None
