"""A release as a whole: its evidence, its card and charts, its report, the plan of its commit, its signature.

It refuses evidence that is not the manifest's, and shows no figure that no artefact holds. Begin with `evidence`, which
reads it; `card`, `report` and `explain` show it.
"""
