"""The Hub: what this tool asks of the Hugging Face Hub, and an embedded Hub (`local/`) for rehearsals and tests.

An answer that is not what a Hub gives is refused: a file name that leads out of the cache, an endless list, a redirect
that would take the token to another host. Begin reading with `client`, which lists every question; `door` guards the
connections, `failures` turns what went wrong into one error. `local/` is a project of its own and uses none of these.
"""
