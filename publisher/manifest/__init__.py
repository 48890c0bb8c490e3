"""The manifest: its schema and its messages, writing a new one, pinning it to commits.

It refuses unknown fields, names without a commit, and every other problem at once. Begin with `schema`.
"""
