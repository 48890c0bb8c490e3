"""The Hub: `client` is all that this tool asks of one, and `local/` is an embedded Hub for rehearsals and tests."""
