"""The artefacts: their schemas, file names, canonical form, digests, and what made them. Begin with `schemas`."""
