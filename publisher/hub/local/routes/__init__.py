"""The addresses that a local Hub answers, one module for each part of the real API."""
