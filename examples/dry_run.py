"""A whole run from a manifest, up to the first write to the Hub, with the commit that it would make.

    python examples/dry_run.py pair.yaml

`publish new` writes a manifest for a pair. Without `dry_run=True` the same call publishes.
"""

import sys

import publisher


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Show a line for each kind of work, and not for each of its pieces."""
    if not done:
        print(f"... {what} ({total} pieces)" if total else f"... {what}", file=sys.stderr)


def main(manifest: str) -> None:
    """Run every stage, and list the files of the commit."""
    print(f"{publisher.load_manifest(manifest).repo} would get:")
    outcome = publisher.run(manifest, dry_run=True, progress=report)
    for operation in outcome.plan.operations if outcome.plan else ():
        print(f"  {operation.change:<9} {operation.path}")
    for variant in outcome.variants:
        if variant.validation:
            print(f"{variant.label}: PEFT loads all {variant.validation.modules} modules")
    print(f"the staged tree is {outcome.staged}")


if __name__ == "__main__":
    main(*sys.argv[1:])
