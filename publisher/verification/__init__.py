"""Base + adapter held against the released model: two models answer the same requests, and metrics compare the answers.

What is in here, in the order of the work: `request_files` reads and checks the test sets; `models` loads one model at
a time and lets it answer, with `multi_gpu` where one GPU does not hold it and `fp8_emulation` where the base is
replaced by its FP8 release; `answer_job` is the unit of work that an engine does; `answer_log` keeps the answers on
disk; `metrics` says how far the answers of the reference and of the candidate are apart.

It refuses requests that are malformed before a model is loaded, a model that is not loaded whole, and a test set of
which no question was answered by both models. Begin with `request_files`, then `metrics`.
"""
