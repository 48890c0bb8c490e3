"""What `publish explain` knows of one module."""

from publisher.records.extraction import ModuleExtraction
from publisher.records.record import Record


class Explained(Record):
    """All that is known of one module of one variant: headings and what stands beside them, and its figures."""

    module: str
    variant: str
    label: str
    facts: tuple[tuple[str, str], ...]
    figures: ModuleExtraction
