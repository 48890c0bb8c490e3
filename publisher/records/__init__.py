"""The artefacts: one schema for each, their file names, their canonical form and digests, and what made them.

A record is frozen and holds no time, no host name and no path of this machine. One that is damaged, of another schema
or too large is refused when it is read, and so is a name that would lead out of its folder. Begin with `record`, then
`extraction`; `filenames` lists the artefacts, `closure` finds the code that a result rests on.
"""
