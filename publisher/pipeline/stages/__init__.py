"""The stages: one module for each, with a function of its name. They never import each other.

Their order, what each needs and leaves, and when its result is reused stand in `pipeline/table.py`: begin there. A
stage writes its own files and no others. It refuses inputs that cannot give a right result, before any long work.
"""
