"""What the demo's source repositories hold beside their weights; `make_demo` copies it, nothing imports it."""
