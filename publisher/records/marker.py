"""The marker of a finished stage."""

from publisher.records.checkpoint import FileDigest
from publisher.records.record import Each, Record


class Marker(Record):
    """A finished stage: its result holds as long as the key and the files do."""

    key: str
    files: Each[FileDigest]
