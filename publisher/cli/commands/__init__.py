"""The commands, a file for each group of the help page. Each reads its options, calls the API and returns a result."""
