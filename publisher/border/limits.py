"""How much of anything foreign is accepted. docs/audit.md prints this table; a test holds the two together."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds for whatever comes from a checkpoint, a repository, a manifest or a server.

    Each is far above what any real model needs, and low enough that reading ends within seconds and a gigabyte.
    """

    json_bytes: int = 256 * 2**20  # an extraction.json of 100,000 modules is about 100 MB
    json_depth: int = 64
    yaml_bytes: int = 2**20
    yaml_depth: int = 32
    yaml_aliases: int = 100
    number_digits: int = 64  # of one integer in JSON or YAML
    entries: int = 5_000_000  # values in one JSON document
    yaml_entries: int = 100_000  # values in one YAML document
    text_bytes: int = 16 * 2**20  # of a README.md or another text file
    header_bytes: int = 100_000_000  # of a safetensors header: the bound of the safetensors library itself
    tensors: int = 1_000_000  # of one checkpoint
    name_characters: int = 512  # of a tensor's or a module's name
    path_characters: int = 512  # of a file's name inside a repository
    dimensions: int = 8  # of one tensor
    pattern_characters: int = 10_000  # of one regular expression
    patterns: int = 100_000  # entries of rank_pattern, alpha_pattern and target_modules together
    layers: int = 2_000  # of a model class that is built without weights
    modules: int = 500_000  # of such a model: layers x experts, replicated layers included
    layer_replications: int = 2_000  # layers after layer_replication
    rank: int = 1_000_000
    pattern_bytes: int = 2**20  # of memory that one compiled pattern may take
    pattern_steps: int = 20_000_000_000  # size of the patterns x characters of the names; some seconds at the most
    matches: int = 100_000_000  # names of target_modules x modules of the class
    key_matches: int = 1_000_000  # plain keys of rank_pattern x modules that PEFT itself compares
    experts: int = 100_000  # of one layer
    counts: int = 2**20  # any other number of things in a config.json: heads, labels, codebooks
    integer: int = 2**40  # any other integer in a config.json, such as a size, an id or a position
    adapter_bytes: int = 8 * 2**30  # of one adapter's tensors that an audit reads and PEFT loads


LIMITS: Final = Limits()
