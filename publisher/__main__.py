"""`python -m publisher` is the `publish` command.

Python puts the folder one happens to stand in first on its path then, and would import whatever modules lie there:
those of a release that is audited, say. That folder is taken off before anything is imported.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from publisher.cli.app import main

if __name__ == "__main__":
    main()
