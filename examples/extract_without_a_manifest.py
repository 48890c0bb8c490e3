"""The first look at a merged fine-tune: its adapter in a folder, with no manifest and nothing published.

    python examples/extract_without_a_manifest.py models/tuned models/base adapter

Each checkpoint is a folder, or `owner/name@commit` on the Hub.
"""

import sys

import publisher


def main(tuned: str, base: str, folder: str) -> None:
    """Extract, say what was found, and save it."""
    result = publisher.extract(tuned=tuned, base=base)
    summary = result.summary
    print(f"{summary.linears} linears in layers {summary.layers}, rank {summary.rank}")
    print(f"median relative error {summary.relative_error.median:.2%}, {summary.exact_share:.1%} bit for bit")
    worst = max(result.modules, key=lambda module: module.relative_error)
    print(f"the largest error is that of {worst.name}: {worst.relative_error:.2%}")
    print("loads with", ", ".join(one.loader for one in result.loaders if one.loads == "yes"))
    print(f"saved in {result.save(folder)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except publisher.PublisherError as error:  # found, expected, next step
        sys.exit(f"error: {error}")
