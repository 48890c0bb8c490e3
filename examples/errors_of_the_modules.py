"""Read the evidence of a release, and draw the error of each module above the rounding of the merge.

    python examples/errors_of_the_modules.py adapter/extraction.json

The bar is the relative error; the mark is the rounding floor: what no adapter of this base can be below.
"""

import sys
from pathlib import Path

import publisher

WIDTH = 50  # characters of the longest bar


def main(evidence: str) -> None:
    """Draw one line for each module, the largest error first."""
    extraction = publisher.Extraction.read(Path(evidence))
    modules = sorted(extraction.modules, key=lambda module: module.relative_error, reverse=True)
    unit = WIDTH / modules[0].relative_error
    for module in modules:
        bar = "#" * round(module.relative_error * unit)
        floor = min(round(module.rounding_floor * unit), WIDTH)
        line = f"{bar:<{WIDTH + 1}}"
        print(f"{line[:floor]}|{line[floor + 1 :]} {module.relative_error:.3%}  rank {module.rank}  {module.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
