"""Check what somebody published, and list what speaks against it.

    python examples/audit_a_release.py owner/name@revision     # or a folder

It ends with exit code 1 where a check failed. Nothing that the repository holds is run.
"""

import sys

import publisher


def main(target: str) -> int:
    """List every check that failed, and those that could not be made."""
    found = publisher.audit(target)
    for check in found.failed:
        print(f"FAILED {check.name} {check.variant}".rstrip())
        print("\n".join(f"    {line}" for line in check.detail.splitlines()))
    for check in found.checks:
        if check.status == "not checked":
            print(f"not checked: {check.name}: {check.detail.splitlines()[0]}")
    print(f"{len(found.failed)} of {len(found.checks)} checks failed")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
