"""The Python API: what the command line does, as functions that return frozen values and print nothing.

Users reach it as `publisher.extract`, `publisher.run` and so on. It refuses, before any work, options that contradict
each other, and it lets no exception out that is not a `PublisherError`. Begin with `extraction`, the first look at a
pair, and `runs`, the whole job from a manifest.
"""
