"""`python -m publisher` is the `publish` command."""

from publisher.cli import main

if __name__ == "__main__":
    main()
