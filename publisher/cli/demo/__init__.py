"""The demo: two small pairs of checkpoints, which `publish demo` makes and publishes. Begin with `checkpoints`."""
