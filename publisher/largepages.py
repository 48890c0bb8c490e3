"""Memory in large pages, where Linux gives them on request.

A weight of the 27B is hundreds of megabytes that are taken and given back several times for each module, and the
kernel hands memory out in pages of 4 kB: that takes a tenth of a module's processor time and more. torch asks for
pages of 2 MB if this variable is set before it takes its first memory; elsewhere it means nothing. No result depends
on it.
"""

import os


def ask_for_large_pages() -> None:
    """For this process and those it starts, unless the user has decided otherwise."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
