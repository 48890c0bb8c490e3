"""The manifest: what is published, from which pinned checkpoints, and how.

`schema` lists the fields and `fields` says what each may hold; `reading` turns a YAML file into a `Manifest`, and
`messages` its problems into words; `new` writes a first manifest, and `pin` sets commit ids into one that is there.

It refuses unknown fields, checkpoints that are not at a full commit id, and paths that leave the repository, and names
every problem of a file at once. It needs no network but in `new` and `pin`, and never torch. Begin with `schema`.
"""
