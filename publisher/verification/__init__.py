"""Base + adapter held against the released model: requests, models that answer them, answers on disk, and metrics.

It refuses requests that are malformed before a model is loaded. Begin with `requests`, then `metrics`.
"""
