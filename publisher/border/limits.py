"""How much of anything foreign is accepted. docs/audit.md prints this table; a test holds the two together."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds for whatever comes from a checkpoint, a repository, a manifest or a server.

    Each is far above what any real model needs, and low enough that reading ends within seconds and a gigabyte.
    """

    json_bytes: int = 64 * 2**20  # of one JSON document; an extraction.json takes about 1 kB a module
    json_depth: int = 64  # levels of nesting in a JSON document
    yaml_bytes: int = 256 * 2**10  # of a manifest, or of the header of a card
    yaml_depth: int = 32  # levels of nesting in a YAML document, aliases written out
    yaml_aliases: int = 100  # in one YAML document
    number_digits: int = 64  # of one integer in JSON or YAML
    entries: int = 2_000_000  # values in one JSON document
    yaml_entries: int = 20_000  # values in one YAML document, aliases written out
    text_bytes: int = 16 * 2**20  # of a README.md or another text file
    request_line_bytes: int = 32 * 2**20  # one line of a request file, with its images as data URLs
    request_file_bytes: int = 2**31  # of a whole request file, unpacked
    image_bytes: int = 64 * 2**20  # of one image file
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
    rank: int = 1_000_000  # of one module
    title_characters: int = 200  # the author's words on a card: each is one line
    label_characters: int = 100  # of a variant, or of the name of a test set
    summary_characters: int = 1_000  # of the card's summary
    repository_files: int = 200_000  # entries, folders included, of one listing of a repository
    answer_bytes: int = 16 * 2**20  # of one answer of a server, downloads of files apart; a page of a listing is 1 MB
    answer_pages: int = 2_000  # of one list that a server gives in pages
    answer_seconds: int = 600  # that a server may take for one such answer, and be silent in any
    hollow_bytes: int = 64 * 2**20  # of a file in a foreign folder that is nearly all hole
    file_bytes: int = 2**44  # of one file in a listing: 17.6 TB
    unsized_bytes: int = 2**28  # of a download whose answer does not state its size
    request_bytes: int = 4 * 2**20  # of the JSON or form that is sent to the local Hub
    commit_bytes: int = 256 * 2**20  # of one commit that is sent to the local Hub, large files apart
    xet_bytes: int = 128 * 2**20  # of one xorb or shard that is sent to the local Hub: hf_xet keeps to 64 MiB
    upload_parts: int = 10_000  # of one large file that is sent to the local Hub
    card_yaml_bytes: int = 128 * 2**10  # of a card's metadata that the local Hub parses
    pattern_bytes: int = 2**20  # of memory that one compiled pattern may take
    pattern_steps: int = 20_000_000_000  # size of the patterns x characters of the names; some seconds at the most
    matches: int = 100_000_000  # names of target_modules x modules of the class
    key_matches: int = 1_000_000  # plain keys of rank_pattern x modules that PEFT itself compares
    experts: int = 100_000  # of one layer
    counts: int = 2**20  # any other number of things in a config.json: heads, labels, codebooks
    integer: int = 2**40  # any other integer in a config.json, such as a size, an id or a position
    adapter_bytes: int = 8 * 2**30  # of one file of weights that an audit reads and PEFT loads


LIMITS: Final = Limits()
